"""A training stage around the loop: from its section of params.yaml to an engine, and from the engine to the
stage's outputs.
"""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from kernels.config import ModelConfig
from kernels.devices import open_ops
from kernels.engine import Engine
from kernels.memory import plan_of_rank, report
from kernels.ranks import ALONE, Link
from stages import checkpoint
from stages.fingerprint import fingerprint, sources
from stages.metrics import now, open_display, versions, write_provenance
from stages.ranks.gpus import check_divides, training_rank_count, unused_gpus_note
from stages.ranks.join import is_rank
from stages.ranks.launch import LAUNCHED
from stages.resume import ResumeFolder, RunIdentity, resume_root
from stages.settings import Settings
from stages.training import Outs, Task, train
from stages.training_settings import Training


def build_engine(
    settings: Settings, training: Training, config: ModelConfig, link: Link = ALONE
) -> Engine | None:
    """The engine of a training stage with random weights. Prints the device, the versions and the memory plan
    (of rank 0, if there are several).

    None if runtime.plan asks for the memory plan only.

    Raises:
        ValueError: the device or precision is not available, the model does not fit, or the ranks do not
            divide the micro-batches of an update.
    """
    runtime, numerics, optimizer = settings.runtime, settings.numerics, training.make_optimizer()
    if runtime.plan:
        if link.rank == 0:
            _print_plan(settings, training, config, max(link.size, training_rank_count(runtime, training)))
        return None
    check_divides(training, link.size)
    engine = Engine(config, numerics, micro_batch=training.micro_batch, device=runtime.device,
                    threads=runtime.threads, seed=training.seed, optimizer=optimizer, link=link,
                    shard_optimizer=runtime.shard_optimizer)  # fmt: skip
    if link.rank:
        return engine
    libraries = ", ".join(f"{library} {number}" for library, number in versions().items())
    size = (
        f"{config.layers} layers, dim {config.dim}, context {config.context}, vocabulary {config.vocab_size}"
    )
    print(f"{training.section()}: {size}")
    print(f"{engine.describe()}; {libraries}\n{engine.plan_report()}", flush=True)
    others_started_it = is_rank() and LAUNCHED not in os.environ
    if not others_started_it and (line := unused_gpus_note(runtime, training)):
        print(line, flush=True)
    if link.size > 1:
        print(
            f"{link.size} ranks, each with {training.grad_accum_steps // link.size} micro-batches an update"
        )
    return engine


def _print_plan(settings: Settings, training: Training, config: ModelConfig, ranks: int) -> None:
    runtime, optimizer = settings.runtime, training.make_optimizer()
    ops = open_ops(runtime.device, settings.numerics, threads=runtime.threads)
    sizes = config, settings.numerics, training.micro_batch, ops
    _, plan = plan_of_rank(*sizes, optimizer, ranks=ranks, sharded=runtime.shard_optimizer)
    if ranks > 1:
        print(f"each of {ranks} ranks:")
    print(report(plan))


def run_stage(
    settings: Settings, training: Training, engine: Engine, tokenizer_sha256: str, task: Task, *,
    deps: Sequence[Path], outs: Outs,
) -> None:  # fmt: skip
    """Trains and writes the outputs of the stage; resumes an earlier attempt that was stopped.

    Args:
        settings: all sections, for provenance.
        training: the section of this stage, which has its name.
        engine: holds the initial weights.
        tokenizer_sha256: of the tokenizer whose ids the model reads.
        task: data, update, validation and samples.
        deps: the files and folders that the stage reads.
        outs: the files and folders that the stage writes.

    Raises:
        ValueError, SystemExit: see train.
    """
    name, started = training.section(), now()
    rank = engine.ranks.rank
    display = open_display(settings.runtime.display if rank == 0 else "none", name)
    identity = _identity(settings, training, engine, deps)
    provenance_folder = resume_root().parent / "runs" / f"{name}-{identity.fingerprint}"
    resume = ResumeFolder(identity, resume_root(), display.say)
    with display, resume if rank == 0 else nullcontext():
        history = train(engine, training, task, resume=resume, display=display, outs=outs)
        weights = engine.weights()
        if rank:
            return
        checkpoint.save(outs.checkpoint, weights, engine.config, tokenizer_sha256)
        history.write_curves(outs.curves)
        history.write_samples(outs.samples)
        for path in (outs.speed, provenance_folder / "speed.csv"):
            history.write_speed(path)
        # A finished run keeps the provenance of the sessions that trained it.
        if not (resume.finished and (provenance_folder / "provenance.json").exists()):
            write_provenance(
                provenance_folder / "provenance.json", stage=name, fingerprint=identity.fingerprint,
                started=started, ended=now(), seconds=round(history.seconds, 1),
                resumed_at=history.resumed_at, device=engine.device, engine=engine.describe(),
                parameters=asdict(settings),
            )  # fmt: skip
        resume.finish()
        display.say(f"{name}: done, checkpoint in {outs.checkpoint}, provenance in {provenance_folder}")


def _identity(settings: Settings, training: Training, engine: Engine, deps: Sequence[Path]) -> RunIdentity:
    """The identity of this run for resuming: everything that decides its bits, but the number
    of ranks.
    """
    name = training.section()
    without_length = {
        key: value for key, value in asdict(training).items() if key not in ("steps", "cooldown_steps")
    }
    parameters = {
        "model": engine.config.to_dict(),
        name: without_length,
        "numerics": asdict(settings.numerics),
    }
    values = {"stage": name, "parameters": parameters, "device": engine.device, "versions": versions()}
    shared_hash = fingerprint([*deps, *sources(name)], values)
    before_cooldown = training.steps - training.cooldown_steps if training.schedule == "wsd" else 0
    return RunIdentity(name, shared_hash, training.steps, before_cooldown)
