"""The training loop, shared by all training stages: updates, validations, samples and resume states.

The outputs do not depend on how often a run was stopped. So a resume state holds whole steps, and the work
that an interrupt cuts off is repeated after the resume.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from kernels.batch import Batch
from kernels.engine import Engine
from stages.batches import Batches, BatchPrefetcher
from stages.interrupt import EXIT_CODE, Interrupt, Interrupted
from stages.metrics import Display, Progress, Speed, TrainingHistory, add_row
from stages.resume import ResumeFolder, State
from stages.training_settings import Training
from stages.updates import Outcome, learning_rate

CURVES_EVERY_S = 5.0  # seconds between two writes of the curves during a run


@dataclass(frozen=True)
class ValidationResult:
    """Loss on held-out text: `loss` in nats per target, and in bits per UTF-8 byte."""

    loss: float
    bits_per_byte: float


class Step(Protocol):
    """One optimizer update, in the form of stages.updates.train_step."""

    def __call__(
        self, engine: Engine, batches: Sequence[Batch], mtp_loss_weights: Sequence[float], lr: float,
        while_gpu_computes: Callable[[], None], interruptible: Callable[[], AbstractContextManager[None]], /,
    ) -> Outcome:  # fmt: skip
        """Updates the engine over these micro-batches."""


@dataclass(frozen=True)
class Task:
    """The parts of training that differ between the stages.

    Args:
        batches: the training micro-batches.
        step: makes one update of them. train_step minimizes their weighted loss. A stage may pass another
            step, e.g. one that computes loss weights from the model's output, or one with a frozen reference
            model (as in DPO).
        validate: measures the model on held-out text; checks for an interrupt before each batch.
        sample: writes a text with the model; checks before each token. The first argument is a seed.
    """

    batches: Batches
    step: Step
    validate: Callable[[Interrupt], ValidationResult]
    sample: Callable[[int, Interrupt], str]


@dataclass(frozen=True)
class Outs:
    """The outputs of a training stage.

    Args:
        checkpoint: folder of the model.
        samples: text file.
        curves: folder of train.csv and val.csv.
        speed: CSV file; not an output for DVC, since it differs from run to run.
    """

    checkpoint: Path
    samples: Path
    curves: Path
    speed: Path


def due(step: int, every: int, steps: int) -> bool:
    """Whether a report is due after this step: every `every` steps, and at the end of a run of `steps`."""
    return step == steps or (step > 0 and step % every == 0)


class _Session:
    """One session of a run, from its start or resume to its end or interrupt: the arguments of `train`, and
    the progress so far. Every rank has its own object.
    """

    def __init__(
        self, engine: Engine, training: Training, task: Task, resume: ResumeFolder, display: Display,
        outs: Outs,
    ) -> None:  # fmt: skip
        self.engine, self.training, self.task = engine, training, task
        self.resume, self.display, self.outs = resume, display, outs
        self.step, self.history = 0, TrainingHistory()
        self._restore()
        self.saved = True  # whether the newest state is up to date
        self._speed, self._begun, self._earlier_seconds = Speed(), time.perf_counter(), self.history.seconds
        self._write_at = self._begun + CURVES_EVERY_S

    def _restore(self) -> None:
        """Loads the newest state into the engine. Drops reports that were due only at the end of a shorter
        run. With several ranks, rank 0 reads the state and sends it to the others.
        """
        ranks, training = self.engine.ranks, self.training
        state = self.resume.load() if ranks.rank == 0 else None
        # The state at the end of a run has no moments. It is loaded for its weights: no update follows.
        has_moments = state is not None and set(self.engine.moments) <= state.arrays.keys()
        found = ranks.all_gather_object(state and (state.step, state.history, has_moments))[0]
        if found is None:
            return
        step, saved_history, has_moments = found
        current = {} if has_moments else self.engine.state()
        self.engine.load_state({**current, **state.arrays} if state else None)
        history = TrainingHistory(**saved_history)
        self.step, self.history = step, history
        history.val = [row for row in history.val if due(int(row[0]), training.val_every, training.steps)]
        history.samples = [
            sample for sample in history.samples if due(sample[0], training.sample_every, training.steps)
        ]
        history.resumed_at.append(step)
        ranks.link.note = f"last saved step: {step}"

    def run(self, interrupt: Interrupt) -> None:
        """Trains to the last step and saves it.

        Raises:
            Interrupted: `save` can then save the last finished step.
        """
        self._report(interrupt)  # reports that an interrupt cut off
        training = self.training
        heads = len(training.mtp_loss_weights)
        ranks = self.engine.ranks
        prefetcher = BatchPrefetcher(
            self.task.batches, training.grad_accum_steps, training.steps, heads, ranks.rank, ranks.size
        )
        while self.step < training.steps:
            interrupt.check()
            begun, lr = time.perf_counter(), learning_rate(self.step, training)
            batches, while_gpu_computes = prefetcher.get(self.step), partial(prefetcher.fetch, self.step + 1)
            outcome = self.task.step(
                self.engine,
                batches,
                training.mtp_loss_weights,
                lr,
                while_gpu_computes,
                interrupt.interruptible,
            )
            tokens = training.grad_accum_steps * batches[0].tokens.size
            tokens_per_s = tokens / self._speed.add(time.perf_counter() - begun)
            self.step, self.saved = self.step + 1, False
            self._check_finite(outcome, lr)
            row = (self.step, outcome.loss, outcome.total_loss, lr, outcome.grad_norm)
            add_row(self.history.train, row)
            add_row(self.history.speed, (self.step, tokens_per_s))
            self._report(interrupt)
            checkpoint_due = due(self.step, training.checkpoint_every, training.steps)
            if checkpoint_due or self.step == self.resume.identity.steps_before_cooldown:
                self.save()
            elif ranks.rank == 0 and time.perf_counter() >= self._write_at:
                with suppress(ValueError):  # a preview: an error here shows again when the state is saved
                    self._write_curves()
            left_s = self._speed.left_s(training.steps - self.step, time.perf_counter() - self._begun)
            bpb = self.history.val[-1][2] if self.history.val else None
            self.display.update(Progress(self.step, training.steps, **asdict(outcome), lr=lr,
                                         tokens_per_s=tokens_per_s,
                                         left_s=left_s, val_bpb=bpb))  # fmt: skip
        self.save()

    def _report(self, interrupt: Interrupt) -> None:
        """Makes the validation and the sample that are due after this step, unless the history already has
        them.
        """
        step, training, history = self.step, self.training, self.history
        validated = bool(history.val) and history.val[-1][0] == step
        if due(step, training.val_every, training.steps) and not validated:
            with interrupt.interruptible():
                result = self.task.validate(interrupt)
            history.val.append((step, result.loss, result.bits_per_byte))
            self.saved = False
            self.display.say(
                f"step {step}  val loss {result.loss:.4f}  val bits/byte {result.bits_per_byte:.4f}"
            )
        sampled = bool(history.samples) and history.samples[-1][0] == step
        if due(step, training.sample_every, training.steps) and not sampled:
            text = self._sample(interrupt)
            history.samples.append((step, text))
            self.saved = False
            self.display.say(f"step {step}  sample: {text!r}")

    def _sample(self, interrupt: Interrupt) -> str:
        """A text that rank 0 writes. If a stop is requested meanwhile, all ranks stop."""
        text: str | None = None
        if self.engine.ranks.rank == 0:
            with suppress(Interrupted), interrupt.interruptible():
                text = self.task.sample(self.training.seed + self.step, interrupt)
        text = self.engine.ranks.all_gather_object(text)[0]
        if text is None:
            raise Interrupted
        return text

    def save(self) -> None:
        """Saves the last finished step and its curves, unless the newest state is up to date.

        The state at the end of a run has no moments: no update will read them. Exception: a wsd run without a
        cool-down, from which a longer run can resume.
        """
        if self.saved:
            return
        ranks, arrays = self.engine.ranks, self.engine.state()
        finite = ranks.rank > 0 or bool(np.isfinite(arrays["parameters"]).all())
        if not ranks.all_gather_object(finite)[0]:
            raise ValueError(
                f"step {self.step}: {self.engine.first_nonfinite()} is not finite; {self._remedy()}"
            )
        at_end = self.step == self.training.steps
        can_be_extended = self.step == self.resume.identity.steps_before_cooldown
        if at_end and not can_be_extended:
            arrays = {name: array for name, array in arrays.items() if name not in self.engine.moments}
        self.history.seconds = self._earlier_seconds + time.perf_counter() - self._begun
        if ranks.rank == 0:
            self.resume.save(State(self.step, arrays, self.history.to_dict()))
            self._write_curves()
        self.saved = True
        ranks.link.note = f"last saved step: {self.step}"

    def _write_curves(self) -> None:
        """Writes the curves so far. The next write is after CURVES_EVERY_S, or 100 times the duration of this
        one.
        """
        begun = time.perf_counter()
        self.history.write_curves(self.outs.curves)
        self.history.write_speed(self.outs.speed)
        done = time.perf_counter()
        self._write_at = done + max(CURVES_EVERY_S, 100 * (done - begun))

    def _check_finite(self, outcome: Outcome, lr: float) -> None:
        """Stops the run at the first loss or gradient norm that is not finite."""
        if not (math.isfinite(outcome.total_loss) and math.isfinite(outcome.grad_norm)):
            raise ValueError(
                f"step {self.step}: loss {outcome.loss}, learning rate {lr:.3g}, gradient norm "
                f"{outcome.grad_norm}, first bad "
                f"tensor {self.engine.first_nonfinite() or 'none'}: not finite; {self._remedy()}"
            )

    def _remedy(self) -> str:
        state = self.resume.newest() or "none"
        return f"last good resume state {state}; start over with a lower lr or a longer warm-up"


def train(
    engine: Engine, training: Training, task: Task, *, resume: ResumeFolder, display: Display, outs: Outs
) -> TrainingHistory:
    """Trains to training.steps, from the newest resume state or else from the weights in the engine.

    Args:
        engine: holds the initial weights; afterwards the trained ones.
        training: length, learning rate and reporting intervals.
        task: data, update, validation and samples.
        resume: open folder of the resume states. A state is saved every checkpoint_every steps, before the
            cool-down of wsd, at Ctrl-C and at the end.
        display: shows progress.
        outs: its curves and speed are written every few seconds and with each state.

    Returns:
        The history of the run, including earlier sessions.

    Raises:
        ValueError: a loss, gradient or weight is not finite; nothing is saved after that.
        SystemExit: Ctrl-C or SIGTERM; the last finished step is saved, and a line says so.
        KeyboardInterrupt: a second one; nothing more is saved.
    """
    session = _Session(engine, training, task, resume, display, outs)
    with Interrupt(display.say, raise_in_handler=engine.device == "cpu", ranks=engine.ranks) as interrupt:
        with suppress(Interrupted):
            session.run(interrupt)
        # A signal after the last check may have reached some ranks only.
        stopped = any(engine.ranks.all_gather_object(interrupt.requested))
        if stopped:
            session.save()
            nothing = (
                "interrupted before the first step was finished: nothing to save; the same "
                "command starts over"
            )
            saved = f"interrupted: step {session.step} is saved; the same command resumes there"
            display.say(saved if session.step else nothing)
            engine.ranks.all_gather_object(None)  # no rank ends before rank 0 has saved
    if stopped:  # also after the last step: the next stages must not start
        raise SystemExit(EXIT_CODE)
    return session.history
