"""A training stage around the loop: from its section of params.yaml to an engine, and from the engine to the
stage's outputs.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kernels.config import ModelConfig
from kernels.devices import open_ops
from kernels.engine import Engine
from kernels.memory import plan, report
from stages import checkpoint
from stages.metrics import now, open_display, versions, write_provenance
from stages.resume import ResumeFolder, RunIdentity, fingerprint, resume_root, sources
from stages.settings import Settings
from stages.training import Outs, Task, train
from stages.training_settings import Training


def build_engine(settings: Settings, training: Training, config: ModelConfig) -> Engine | None:
    """The engine of a training stage with random weights. Prints the device, the versions and the memory
    plan.

    None if runtime.plan asks for the memory plan only.

    Raises:
        ValueError: the device or precision is not available, or the model does not fit.
    """
    runtime, numerics = settings.runtime, settings.numerics
    if runtime.plan:
        ops = open_ops(runtime.device, numerics, threads=runtime.threads)
        print(report(plan(config, numerics, training.micro_batch, ops, optimizer=training.make_optimizer())))
        return None
    engine = Engine(config, numerics, micro_batch=training.micro_batch, device=runtime.device,
                    threads=runtime.threads, seed=training.seed,
                    optimizer=training.make_optimizer())  # fmt: skip
    libraries = ", ".join(f"{library} {number}" for library, number in versions().items())
    size = (
        f"{config.layers} layers, dim {config.dim}, context {config.context}, vocabulary {config.vocab_size}"
    )
    print(f"{training.section()}: {size}")
    print(f"{engine.describe()}; {libraries}\n{engine.plan_report()}", flush=True)
    return engine


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
    display = open_display(settings.runtime.display, name)
    identity = _identity(settings, training, engine, deps)
    provenance_folder = resume_root().parent / "runs" / f"{name}-{identity.fingerprint}"
    with display, ResumeFolder(identity, resume_root(), display.say) as resume:
        history = train(engine, training, task, resume=resume, display=display, outs=outs)
        checkpoint.save(outs.checkpoint, engine.weights(), engine.config, tokenizer_sha256)
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
    """The identity of this run for resuming: everything that decides its bits."""
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
