"""The one training loop, for pretrain, sft and whatever comes after: updates, validations, samples and states.

What a run leaves is the same however often it was stopped. So a state holds whole steps, and what an interrupt cuts off is
done again after the resume.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from kernels.config import ModelConfig
from kernels.engine import AdamW, Engine
from stages import checkpoint
from stages.batches import Batches, BatchPrefetcher
from stages.interrupt import EXIT_CODE, Interrupt, Interrupted
from stages.metrics import (
    Display,
    Progress,
    Speed,
    TrainingHistory,
    add_row,
    now,
    open_display,
    versions,
    write_provenance,
)
from stages.resume import ResumeFolder, State, Work, fingerprint, resume_root, sources
from stages.settings import Settings
from stages.training_settings import Training
from stages.updates import Outcome, learning_rate, train_step

LIVE_S = 5.0  # seconds between two writes of the curves while a run is under way


@dataclass(frozen=True)
class ValidationResult:
    """Loss of held-out text: `loss` in nats a target, and in bits per UTF-8 byte of it."""

    loss: float
    bits_per_byte: float


@dataclass(frozen=True)
class Task:
    """What one kind of training has of its own.

    Args:
        batches: what to train on.
        validate: measures the model on held-out text, with a check of the interrupt before each batch.
        sample: writes something with the model, with a check before each token; the first argument is a seed.
    """

    batches: Batches
    validate: Callable[[Interrupt], ValidationResult]
    sample: Callable[[int, Interrupt], str]


@dataclass(frozen=True)
class Outs:
    """What a training stage writes.

    Args:
        checkpoint: folder of the model.
        samples: text file.
        curves: folder of train.csv and val.csv.
        speed: CSV file; no out for DVC, since it differs from run to run.
    """

    checkpoint: Path
    samples: Path
    curves: Path
    speed: Path


def due(step: int, every: int, steps: int) -> bool:
    """Whether a report is due after this step: one is due every `every` steps and at the end of a run of `steps`."""
    return step == steps or (step > 0 and step % every == 0)


class _Sitting:
    """What one process does of a run: train's arguments, and how far it has come."""

    def __init__(
        self, engine: Engine, training: Training, task: Task, resume: ResumeFolder, display: Display, outs: Outs
    ) -> None:  # fmt: skip
        self.engine, self.training, self.task, self.resume, self.display = (
            engine,
            training,
            task,
            resume,
            display,
        )
        self.outs, self.step, self.history = outs, 0, TrainingHistory()
        self._restore()
        self.saved = True  # whether the newest state holds all there is
        self._speed, self._begun, self._before_s = Speed(), time.perf_counter(), self.history.seconds
        self._write_at = self._begun + LIVE_S

    def _restore(self) -> None:
        """Puts the newest state into the engine. Reports that only the end of a shorter run had due are dropped."""
        state, training = self.resume.load(), self.training
        if state is None:
            return
        full = "exp_avg" in state.arrays
        self.engine.load_state(state.arrays if full else {**self.engine.state(), **state.arrays})
        self.step, self.history = state.step, TrainingHistory(**state.history)
        self.history.val = [
            row for row in self.history.val if due(int(row[0]), training.val_every, training.steps)
        ]
        self.history.samples = [
            one for one in self.history.samples if due(one[0], training.sample_every, training.steps)
        ]
        self.history.resumed_at.append(state.step)

    def go_on(self, interrupt: Interrupt) -> None:
        """Trains to the last step and saves it.

        Raises:
            Interrupted: at a point from which `save` saves the last finished step.
        """
        self._report(interrupt)  # what an interrupt has left undone
        training = self.training
        optimizer = AdamW(
            training.beta1, training.beta2, training.eps, training.weight_decay, training.grad_clip
        )
        prefetcher = BatchPrefetcher(
            self.task.batches, training.grad_accum_steps, training.steps, len(training.mtp_loss_weights)
        )
        while self.step < training.steps:
            interrupt.check()
            begun, lr = time.perf_counter(), learning_rate(self.step, training)
            batches, meanwhile = prefetcher.get(self.step), partial(prefetcher.fetch, self.step + 1)
            outcome = train_step(
                self.engine, batches, training.mtp_loss_weights, optimizer, lr, meanwhile, interrupt.section
            )
            tokens_per_s = (
                training.grad_accum_steps
                * batches[0].tokens.size
                / self._speed.add(time.perf_counter() - begun)
            )
            self.step, self.saved = self.step + 1, False
            self._check_finite(outcome, lr)
            add_row(self.history.train, (self.step, outcome.loss, outcome.total_loss, lr, outcome.grad_norm))
            add_row(self.history.speed, (self.step, tokens_per_s))
            self._report(interrupt)
            if (
                due(self.step, training.checkpoint_every, training.steps)
                or self.step == self.resume.work.trunk_steps
            ):
                self.save()
            elif time.perf_counter() >= self._write_at:
                with suppress(ValueError):  # a preview; with the next state the same files must be written
                    self._write_curves()
            left_s = self._speed.left_s(training.steps - self.step, time.perf_counter() - self._begun)
            bpb = self.history.val[-1][2] if self.history.val else None
            self.display.update(Progress(self.step, training.steps, **asdict(outcome), lr=lr, tokens_per_s=tokens_per_s,
                                         left_s=left_s, val_bpb=bpb))  # fmt: skip
        self.save()

    def _report(self, interrupt: Interrupt) -> None:
        """The validation and the sample that are due after this step, unless the history has them."""
        step, training, history = self.step, self.training, self.history
        if due(step, training.val_every, training.steps) and not (history.val and history.val[-1][0] == step):
            with interrupt.section():
                result = self.task.validate(interrupt)
            history.val.append((step, result.loss, result.bits_per_byte))
            self.saved = False
            self.display.say(
                f"step {step}  val loss {result.loss:.4f}  val bits/byte {result.bits_per_byte:.4f}"
            )
        if due(step, training.sample_every, training.steps) and not (
            history.samples and history.samples[-1][0] == step
        ):
            with interrupt.section():
                text = self.task.sample(training.seed + step, interrupt)
            history.samples.append((step, text))
            self.saved = False
            self.display.say(f"step {step}  sample: {text!r}")

    def save(self) -> None:
        """Saves the last finished step and its curves, unless the newest state holds them.

        The state of a run's end lacks the moments, which no update will read, unless a longer run can go on from it.
        """
        if self.saved:
            return
        arrays = self.engine.state()
        if not np.isfinite(arrays["parameters"]).all():
            raise ValueError(
                f"step {self.step}: {self.engine.first_nonfinite()} is not finite; {self._remedy()}"
            )
        if self.step == self.training.steps != self.resume.work.trunk_steps:
            arrays = {name: array for name, array in arrays.items() if not name.startswith("exp_avg")}
        self.history.seconds = self._before_s + time.perf_counter() - self._begun
        self.resume.save(State(self.step, arrays, self.history.to_dict()))
        self.saved = True
        self._write_curves()

    def _write_curves(self) -> None:
        """Writes the curves so far; the next time when LIVE_S have passed, or a hundred times what writing took."""
        begun = time.perf_counter()
        self.history.write_curves(self.outs.curves)
        self.history.write_speed(self.outs.speed)
        done = time.perf_counter()
        self._write_at = done + max(LIVE_S, 100 * (done - begun))

    def _check_finite(self, outcome: Outcome, lr: float) -> None:
        """Stops the run at the first loss or gradient norm that is not a number."""
        if not (math.isfinite(outcome.total_loss) and math.isfinite(outcome.grad_norm)):
            raise ValueError(
                f"step {self.step}: loss {outcome.loss}, learning rate {lr:.3g}, gradient norm {outcome.grad_norm}, first bad "
                f"tensor {self.engine.first_nonfinite() or 'none'}: not finite; {self._remedy()}"
            )

    def _remedy(self) -> str:
        return f"last good checkpoint {self.resume.newest() or 'none'}; try a lower lr or a longer warm-up"


def train(
    engine: Engine, training: Training, task: Task, *, resume: ResumeFolder, display: Display, outs: Outs
) -> TrainingHistory:
    """Trains from the newest resume state, or from where the engine stands, to training.steps.

    Args:
        engine: holds the initial weights; afterwards the trained ones.
        training: how long, how fast and how often to report.
        task: data, validation, samples.
        resume: open folder of this run's states. A state is saved every checkpoint_every steps, before wsd's cool-down, at
            Ctrl-C and at the end.
        display: where progress is shown.
        outs: its curves and speed are written every few seconds and with each state.

    Returns:
        All that the run has to show, also of sittings before this one.

    Raises:
        ValueError: a loss, gradient or weight is not finite; nothing is saved from then on.
        SystemExit: Ctrl-C or SIGTERM; the last finished step is saved, and a line says so.
        KeyboardInterrupt: a second one; nothing more is saved.
    """
    sitting = _Sitting(engine, training, task, resume, display, outs)
    with Interrupt(display.say, cuts=engine.device == "cpu") as interrupt:
        with suppress(Interrupted):
            sitting.go_on(interrupt)
        if interrupt.requested:
            sitting.save()
            nothing = "interrupted before the first step was finished: nothing to save; the same command starts over"
            saved = f"interrupted: step {sitting.step} is saved; the same command goes on from there"
            display.say(saved if sitting.step else nothing)
    if interrupt.requested:  # also after the last step: the stages behind this one must not start
        raise SystemExit(EXIT_CODE)
    return sitting.history


def announce(name: str, engine: Engine, config: ModelConfig) -> None:
    """Prints what was chosen and the memory plan."""
    chosen = ", ".join(f"{library} {number}" for library, number in versions().items())
    print(
        f"{name}: {config.layers} layers, dim {config.dim}, context {config.context}, vocabulary {config.vocab_size}"
    )
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
        ValueError, SystemExit: see train.
    """
    started = now()
    of_stage = {
        key: value for key, value in asdict(training).items() if key not in ("steps", "cooldown_steps")
    }
    parameters = {"model": config.to_dict(), name: of_stage, "numerics": asdict(settings.numerics)}
    values = {"stage": name, "parameters": parameters, "device": engine.device, "versions": versions()}
    trunk = fingerprint([*deps, *sources(name)], values)
    work = Work(
        name,
        trunk,
        training.steps,
        training.steps - training.cooldown_steps if training.schedule == "wsd" else 0,
    )
    display, own = (
        open_display(settings.runtime.display, name),
        resume_root().parent / "runs" / f"{name}-{work.fingerprint}",
    )
    with display, ResumeFolder(work, resume_root(), display.say) as resume:
        history = train(engine, training, task, resume=resume, display=display, outs=outs)
        checkpoint.save(outs.checkpoint, engine.weights(), config, tokenizer_sha256)
        history.write_curves(outs.curves)
        history.write_samples(outs.samples)
        for path in (outs.speed, own / "speed.csv"):
            history.write_speed(path)
        if not (
            resume.finished and (own / "provenance.json").exists()
        ):  # else it tells of the sittings that made this model
            write_provenance(
                own / "provenance.json", stage=name, fingerprint=work.fingerprint, started=started, ended=now(),
                seconds=round(history.seconds, 1), resumed_at=history.resumed_at, device=engine.device,
                engine=engine.describe(), parameters=asdict(settings),
            )  # fmt: skip
        resume.finish()
        display.say(f"{name}: done, checkpoint in {outs.checkpoint}, where it comes from in {own}")
