"""The one training loop, for pretrain, sft and whatever comes after.

A step is one update: grad_accum_steps micro-batches, gradients added up, one update by AdamW or Muon. The loss of an update is

    loss = sum_k mtp_weights[k] * sum(weight_k * nll_k) / sum(weight_k)

over the whole update, so accumulating over small micro-batches is the same as one large one, whatever part of each counts.
"""

import math
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType

import numpy as np

from kernels.batch import Batch, head_weight_sums
from kernels.config import ModelConfig
from kernels.engine import AdamW, Engine
from stages import checkpoint
from stages.batches import Ahead, Batches
from stages.checkpoint import ResumeFolder, State, fingerprint, resume_root, sources
from stages.metrics import MOST_ROWS, Display, Progress, Record, Speed, now, open_display, versions, write_provenance
from stages.settings import Settings, Training


@dataclass(frozen=True)
class Validation:
    """Loss of held-out text: `loss` in nats a target, and in bits per UTF-8 byte of it."""

    loss: float
    bits_per_byte: float


@dataclass(frozen=True)
class Task:
    """What one kind of training has of its own.

    Args:
        batches: what to train on.
        validate: measures the model on held-out text.
        sample: writes something with the model; the argument is a seed.
    """

    batches: Batches
    validate: Callable[[], Validation]
    sample: Callable[[int], str]


@dataclass(frozen=True)
class Outs:
    """The folders a training stage writes."""

    checkpoint: Path
    log: Path
    curves: Path


@dataclass(frozen=True)
class Outcome:
    """One update: `loss` of head 0 and `total_loss` over all heads in nats, `grad_norm` before clipping."""

    loss: float
    total_loss: float
    grad_norm: float


def learning_rate(step: int, training: Training) -> float:
    """The learning rate of update `step`, counted from 0.

    Warm-up rises linearly and is never 0: (step + 1) / warmup_steps. Then cosine falls along half a cosine towards min_lr,
    which the step after the last would have; wsd stays, and falls linearly over the last cooldown_steps likewise.
    """
    warm = min(1.0, (step + 1) / max(1, training.warmup_steps))
    if training.schedule == "cosine":
        gone = (step - training.warmup_steps) / max(1, training.steps - training.warmup_steps)
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, gone))))
    else:
        share = min(1.0, (training.steps - step) / max(1, training.cooldown_steps))
    return warm * (training.min_lr + (training.lr - training.min_lr) * share)


def train_step(
    engine: Engine, batches: Sequence[Batch], mtp_weights: Sequence[float], optimizer: AdamW, lr: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> Outcome:  # fmt: skip
    """One update over these micro-batches; `meanwhile` is engine.update's.

    Raises:
        ValueError: no target of head 0 counts in any of them.
    """
    weights = np.asarray(mtp_weights, np.float64)
    sums = np.sum([head_weight_sums(batch, len(weights)) for batch in batches], axis=0)
    if not sums[0] > 0:
        raise ValueError("an update without a single target that counts: every loss weight of its micro-batches is 0")
    per_weight = np.divide(1.0, sums, out=np.zeros_like(sums), where=sums > 0)  # 0: a head that has nothing to learn here
    for batch in batches:
        engine.micro_step(batch, weights * per_weight)
    engine.reduce()
    update = engine.update(optimizer, lr, meanwhile)
    losses = update.nll_sums * per_weight
    return Outcome(float(losses[0]), float(weights @ losses), float(update.grad_norm))


def held_out_nats(engine: Engine, batches: Iterable[Batch]) -> tuple[float, float]:
    """(sum of weight * nll, sum of weight) of head 0 over held-out batches, summed in float64."""
    nats = targets = 0.0
    for batch in batches:
        nats += float(np.sum(engine.score(batch) * batch.loss_weight, dtype=np.float64))
        targets += float(np.sum(batch.loss_weight, dtype=np.float64))
    return nats, targets


class Interrupt:
    """Turns Ctrl-C or SIGTERM into a request that the loop answers when its step is done; a second one stops at once."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> "Interrupt":
        self._before = {number: signal.signal(number, self._request) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


def train(engine: Engine, training: Training, task: Task, *, resume: ResumeFolder, display: Display, curves: Path) -> Record:
    """Trains from the newest resume state, or from where the engine stands, to training.steps.

    Args:
        engine: holds the initial weights; afterwards the trained ones.
        training: how long, how fast and how often to report.
        task: data, validation, samples.
        resume: open folder of this run's states; a state is saved every checkpoint_every steps, at Ctrl-C and at the end.
        display: where progress is shown.
        curves: folder of the CSV curves, written with each state.

    Returns:
        All that the run has to show, also of sittings before this one.

    Raises:
        ValueError: a loss or gradient is not finite; nothing is saved from then on.
        KeyboardInterrupt: Ctrl-C; the state is saved.
    """
    optimizer = AdamW(training.beta1, training.beta2, training.eps, training.weight_decay, training.grad_clip)
    step, record = _restore(engine, resume, display)
    begun, before_s, speed = time.perf_counter(), record.seconds, Speed()
    accum, every = training.grad_accum_steps, math.ceil(training.steps / MOST_ROWS)
    ahead = Ahead(task.batches, accum, training.steps, len(training.mtp_weights))
    with Interrupt() as interrupt:
        while step < training.steps:
            step_begun, lr = time.perf_counter(), learning_rate(step, training)
            batches = ahead.of(step)
            outcome = train_step(engine, batches, training.mtp_weights, optimizer, lr, partial(ahead.fetch, step + 1))
            step_s = speed.add(time.perf_counter() - step_begun)
            tokens_per_s = accum * batches[0].tokens.size / step_s
            step += 1
            last, stopping = step == training.steps, interrupt.requested
            saving = last or stopping or step % training.checkpoint_every == 0
            _check_finite(engine, outcome, step, lr, resume, weights=saving)
            if step == 1 or last or step % every == 0:
                row = (step, outcome.loss, outcome.total_loss, lr, outcome.grad_norm, tokens_per_s)
                record.train.append(row)
            if last or step % training.val_every == 0:
                _validate(task, record, step, display)
            if last or step % training.sample_every == 0:
                _sample(task, record, step, training.seed, display)
            here_s = time.perf_counter() - begun
            record.seconds = before_s + here_s
            if saving:
                resume.save(State(step, engine.state(), record.to_dict()))
                record.write_curves(curves)
            left_s = speed.left_s(training.steps - step, here_s)
            bpb = record.val[-1][2] if record.val else None
            display.update(Progress(step, training.steps, **asdict(outcome), lr=lr, tokens_per_s=tokens_per_s,
                                    left_s=left_s, val_bpb=bpb))  # fmt: skip
            if stopping:
                display.say(f"interrupted: step {step} is saved; the same command goes on from there")
                raise KeyboardInterrupt
    if interrupt.requested:  # while the last step was being validated or saved: the stages behind this one must not start
        raise KeyboardInterrupt
    return record


def _restore(engine: Engine, resume: ResumeFolder, display: Display) -> tuple[int, Record]:
    """Puts the newest state into the engine; its step and record."""
    state = resume.load()
    if state is None:
        return 0, Record()
    engine.load_state(state.arrays)
    record = Record(**state.record)
    record.resumed_at.append(state.step)
    display.say(f"resumed at step {state.step} from {resume.folder}")
    return state.step, record


def _check_finite(
    engine: Engine, outcome: Outcome, step: int, lr: float, resume: ResumeFolder, *, weights: bool
) -> None:  # fmt: skip
    """Stops the run at the first loss or gradient norm that is not a number; with `weights`, at the first weight as well."""
    finite = math.isfinite(outcome.total_loss) and math.isfinite(outcome.grad_norm)
    bad = engine.first_nonfinite() if weights or not finite else None
    if not finite or bad:
        raise ValueError(
            f"step {step}: loss {outcome.loss}, learning rate {lr:.3g}, gradient norm {outcome.grad_norm}, first bad tensor "
            f"{bad or 'none'}: not finite; last good checkpoint {resume.newest() or 'none'}; try a lower lr or a longer warm-up"
        )


def _validate(task: Task, record: Record, step: int, display: Display) -> None:
    result = task.validate()
    record.val.append((step, result.loss, result.bits_per_byte))
    display.say(f"step {step}  val loss {result.loss:.4f}  val bits/byte {result.bits_per_byte:.4f}")


def _sample(task: Task, record: Record, step: int, seed: int, display: Display) -> None:
    text = task.sample(seed + step)
    record.samples.append((step, text))
    display.say(f"step {step}  sample: {text!r}")


def announce(name: str, engine: Engine, config: ModelConfig) -> None:
    """Prints what was chosen and the memory plan."""
    chosen = ", ".join(f"{library} {number}" for library, number in versions().items())
    print(f"{name}: {config.layers} layers, dim {config.dim}, context {config.context}, vocabulary {config.vocab_size}")
    print(f"{engine.describe()}; {chosen}\n{engine.plan_report()}", flush=True)


def run_stage(
    name: str, settings: Settings, training: Training, engine: Engine, config: ModelConfig, tokenizer_sha256: str,
    task: Task, *, deps: Sequence[Path], outs: Outs,
) -> None:  # fmt: skip
    """A training stage from the built engine to its outs; goes on from where an earlier attempt was stopped.

    Args:
        name: of the stage, a module of stages/.
        settings: all of them, for provenance.
        training: this stage's section.
        engine, config, tokenizer_sha256: the model and what its checkpoint says of it.
        task: data, validation, samples.
        deps: the files and folders that the stage reads.
        outs: where it writes.

    Raises:
        ValueError, KeyboardInterrupt: see train.
    """
    started = now()
    parameters = {"model": config.to_dict(), name: asdict(training), "numerics": asdict(settings.numerics)}
    place = {"device": engine.device, "versions": versions()}
    values = {"stage": name, "parameters": parameters, **place}
    key = fingerprint([*deps, *sources(name)], values)
    display = open_display(settings.runtime.display, name)
    with display, ResumeFolder(key, resume_root(), display.say) as resume:
        record = train(engine, training, task, resume=resume, display=display, curves=outs.curves)
        checkpoint.save(outs.checkpoint, engine.weights(), config, tokenizer_sha256)
        record.write_curves(outs.curves)
        record.write_samples(outs.log / "samples.txt")
        write_provenance(
            outs.log / "provenance.json", stage=name, fingerprint=key, started=started, ended=now(),
            seconds=round(record.seconds, 1), resumed_at=record.resumed_at, device=engine.device,
            engine=engine.describe(), parameters=asdict(settings),
        )  # fmt: skip
        resume.finish()
        display.say(f"{name}: done, checkpoint in {outs.checkpoint}")
