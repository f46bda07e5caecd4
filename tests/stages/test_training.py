"""The training loop on the real engine, small: exact sums, exact resume, and nothing that disturbs the
weights.
"""

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.batch import Batch
from kernels.engine import Engine
from stages import training as training_module
from stages.interrupt import Interrupt
from stages.metrics import PlainDisplay, TrainingHistory
from stages.resume import ResumeFolder, RunIdentity, State
from stages.training import Outs, Task, ValidationResult, train
from stages.training_settings import Training
from stages.updates import Outcome, held_out_nats, train_step
from tests.stages.small_training import CONFIG, SETTINGS, engine, random_batch


@dataclass
class Data:
    """Micro-batches that remember which were asked for; `at` is called when `at_index` is."""

    asked: list[int] = field(default_factory=list)
    at_index: int = -1
    at: str = ""

    def batch(self, index: int) -> Batch:
        self.asked.append(index)
        if index == self.at_index and self.at == "ctrl-c":
            signal.raise_signal(signal.SIGINT)
        if index == self.at_index and self.at == "kill":
            raise SystemExit("killed")
        return random_batch(index)


class HeldOut:
    """Two batches."""

    def __len__(self) -> int:
        return 2

    def batch(self, index: int) -> Batch:
        return random_batch(1000 + index)


HELD_OUT = HeldOut()


def task(one: Engine, data: Data | None = None) -> Task:
    def validate(interrupt: Interrupt) -> ValidationResult:
        nats, targets = held_out_nats(one, HELD_OUT, interrupt.check)
        return ValidationResult(nats / targets, nats)

    return Task(data or Data(), train_step, validate, lambda seed, interrupt: f"sample {seed}")


def work(settings: Training = SETTINGS) -> RunIdentity:
    """As run_stage makes it; all runs here have the same shared_hash."""
    before = settings.steps - settings.cooldown_steps if settings.schedule == "wsd" else 0
    return RunIdentity("pretrain", "shared_hash", settings.steps, before)


def outs(folder: Path) -> Outs:
    return Outs(folder / "checkpoint", folder / "samples.txt", folder / "curves", folder / "speed.csv")


def run(
    folder: Path,
    data: Data | None = None,
    settings: Training = SETTINGS,
    one: Engine | None = None,
    of: Task | None = None,
) -> tuple[Engine, TrainingHistory]:
    one = one or engine()
    with ResumeFolder(work(settings), folder / "resume") as resume:
        history = train(
            one, settings, of or task(one, data), resume=resume, display=PlainDisplay(), outs=outs(folder)
        )
    return one, history


def same_state(a: Engine, b: Engine) -> bool:
    return all(np.array_equal(array, b.state()[name]) for name, array in a.state().items())


def same_weights(a: Engine, b: Engine) -> bool:
    return np.array_equal(a.state()["parameters"], b.state()["parameters"])


def shown(history: TrainingHistory) -> tuple[object, ...]:
    """What must be the same for the same run."""
    return tuple([tuple(row) for row in rows] for rows in (history.train, history.val, history.samples))


def same_files(a: Path, b: Path) -> bool:
    return all(
        (a / "curves" / name).read_bytes() == (b / "curves" / name).read_bytes()
        for name in ("train.csv", "val.csv")
    )


@pytest.mark.parametrize("killed_at", [1, 6, 19])
def test_killed_and_resumed_is_undisturbed_bit_for_bit(tmp_path: Path, killed_at: int) -> None:
    """Would catch moments, step count, data position, schedule, curves or samples that a state loses."""
    whole, whole_history = run(tmp_path / "whole")
    data = Data(at_index=killed_at, at="kill")
    with pytest.raises(SystemExit):
        run(tmp_path / "parts", data)
    again = Data()
    parts, history = run(tmp_path / "parts", again)
    assert same_state(whole, parts) and shown(history) == shown(whole_history)
    done = max(
        0, killed_at // SETTINGS.grad_accum_steps - 1
    )  # a step's batches are fetched within the step before
    last_saved = done // SETTINGS.checkpoint_every * SETTINGS.checkpoint_every
    assert again.asked == list(
        range(last_saved * SETTINGS.grad_accum_steps, SETTINGS.steps * SETTINGS.grad_accum_steps)
    )
    assert history.resumed_at == ([last_saved] if last_saved else [])


class Disturbed:
    """An engine and its task that raise SIGINT once, during a given call."""

    def __init__(self, where: str, at: int) -> None:
        self.one, self._where, self._left = engine(), where, at
        for name in ("micro_step", "score", "update"):
            setattr(self.one, name, self._counting(name, getattr(self.one, name)))
        plain = task(self.one)
        self.task = replace(plain, sample=self._counting("sample", plain.sample))

    def _counting(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            result = work(*given, **named)  # the signal comes when the work is done: gradients have changed
            self._left -= name == self._where
            if name == self._where and self._left == 0:
                signal.raise_signal(signal.SIGINT)
            return result

        return counted


@pytest.mark.parametrize("cuts", [True, False])
@pytest.mark.parametrize(
    ("where", "at", "saved"),
    [
        ("micro_step", 9, 4),  # the first of step 5, which no checkpoint ends
        ("micro_step", 10, 4),  # the second: all gradients are there
        ("update", 5, 5),  # never cut: step 5 is finished
        ("score", 1, 4),  # the validation after step 4
        ("sample", 1, 5),
        ("score", 5, 10),  # the validation after the last step
        ("sample", 2, 10),
    ],
)
def test_ctrl_c_saves_the_last_finished_step(
    tmp_path: Path, where: str, at: int, saved: int, cuts: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch a slow interrupt, lost steps, an incomplete step, and a validation or sample that is
    missing or repeated.

    Also another exit code than 130, and a state that a micro-step has changed. On a GPU the loop stops at its
    next check.
    """
    if not cuts and (where, at) == ("micro_step", 10):
        saved = 5  # there is no check between the last micro-step and the update
    whole, whole_history = run(tmp_path / "whole")
    disturbed = Disturbed(where, at)
    disturbed.one.device = "cpu" if cuts else "cuda"
    before = signal.getsignal(signal.SIGINT)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path / "parts", one=disturbed.one, of=disturbed.task)
    lines = capsys.readouterr().out.splitlines()
    assert stopped.value.code == 130 and signal.getsignal(signal.SIGINT) is before
    assert f"interrupted: step {saved} is saved; the same command resumes there" == lines[-1]
    assert sum("Ctrl-C: saving" in line for line in lines) == 1
    again = Data()
    parts, history = run(tmp_path / "parts", again)
    assert again.asked[:1] == ([saved * 2] if saved < 10 else []) and history.resumed_at == [saved]
    assert same_weights(whole, parts) and shown(history) == shown(whole_history)
    assert same_files(tmp_path / "whole", tmp_path / "parts")


def test_ctrl_c_in_the_first_step_has_nothing_to_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch a state of step 0, and a traceback if there is none."""
    disturbed = Disturbed("micro_step", 1)
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path, one=disturbed.one, of=disturbed.task)
    assert stopped.value.code == 130 and not list(tmp_path.rglob("*.safetensors"))
    assert "before the first step was finished: nothing to save" in capsys.readouterr().out
    run(tmp_path)


def test_a_saved_step_is_not_saved_again(tmp_path: Path) -> None:
    """Would catch a Ctrl-C right after a checkpoint that writes the same state again."""
    disturbed = Disturbed("micro_step", 7)  # the first of step 4; step 3 is saved

    class Counting(ResumeFolder):
        saves: list[int] = []  # noqa: RUF012 - one instance

        def save(self, state: State) -> None:
            self.saves.append(state.step)
            super().save(state)

    with Counting(work(), tmp_path / "resume") as resume, pytest.raises(SystemExit):
        train(
            disturbed.one,
            SETTINGS,
            disturbed.task,
            resume=resume,
            display=PlainDisplay(),
            outs=outs(tmp_path),
        )
    assert Counting.saves == [3]


# --- longer runs


WSD = replace(SETTINGS, schedule="wsd")


@pytest.mark.parametrize(
    ("first", "second", "begins"),
    [
        ((6, 2), (10, 3), 4),  # from before the cool-down of the first, which ends between two checkpoints
        ((6, 0), (10, 3), 6),  # from its end, whose last validation and sample the longer run has not
        ((6, 0), (6, 2), 3),  # only another cool-down: the state before it is that of a checkpoint
        ((8, 4), (8, 3), 4),
        ((5, 1), (4, 0), 4),  # a shorter one
    ],
)
def test_a_wsd_run_of_other_steps_goes_on_as_if_from_scratch(
    tmp_path: Path,
    first: tuple[int, int],
    second: tuple[int, int],
    begins: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Would catch a cool-down that stays in the weights, and rows, validations or samples of the shorter
    run's end.
    """
    settings = [replace(WSD, steps=steps, cooldown_steps=cooldown) for steps, cooldown in (first, second)]
    scratch, scratch_history = run(tmp_path / "scratch", settings=settings[1])
    run(tmp_path / "on", settings=settings[0])
    capsys.readouterr()
    data = Data()
    on, history = run(tmp_path / "on", data, settings=settings[1])
    assert f"resumed at step {begins} of an earlier run of {first[0]} steps" in capsys.readouterr().out
    assert data.asked[:1] == ([begins * 2] if begins < second[0] else [])
    assert same_weights(on, scratch) and shown(history) == shown(scratch_history)
    assert same_files(tmp_path / "on", tmp_path / "scratch")


def test_a_cosine_run_of_other_steps_starts_over(tmp_path: Path) -> None:
    """Would catch a longer run that begins with the learning rates of the shorter one."""
    run(tmp_path, settings=replace(SETTINGS, steps=6))
    data = Data()
    run(tmp_path, data)
    assert data.asked[0] == 0


def test_the_state_of_finished_work_is_small(tmp_path: Path) -> None:
    """Would catch a disk that keeps moments which no update will read, and lost ones that a longer wsd run
    needs.
    """
    sizes = {}
    for name, settings in (("cosine", SETTINGS), ("constant", WSD), ("wsd", replace(WSD, cooldown_steps=4))):
        with ResumeFolder(work(settings), tmp_path / name) as resume:
            one = engine()
            train(one, settings, task(one), resume=resume, display=PlainDisplay(), outs=outs(tmp_path))
            resume.finish()
        sizes[name] = sorted(path.stat().st_size for path in (tmp_path / name).rglob("*.safetensors"))
    assert len(sizes["cosine"]) == len(sizes["constant"]) == 1
    small, full = sizes["cosine"][0], sizes["constant"][0]
    assert small < 0.45 * full and sizes["wsd"] == pytest.approx([small, full], rel=0.05)


# --- what a run shows


def test_seconds_are_those_of_all_sessions(tmp_path: Path) -> None:
    """Would catch a resumed run that counts only its last session, or subtracts earlier ones."""
    one = engine()
    for _ in range(4):
        train_step(one, [random_batch(0), random_batch(1)], (1.0, 0.1), lr=0.0)
    with ResumeFolder(work(), tmp_path / "resume") as resume:
        resume.save(State(4, one.state(), TrainingHistory(seconds=1000.0).to_dict()))
    assert 1000.0 < run(tmp_path)[1].seconds < 1100.0


def test_curves_grow_while_a_run_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch plots that show nothing of a run before its first checkpoint, or a file that is half
    there.
    """
    monkeypatch.setattr(training_module, "CURVES_EVERY_S", 0.0)
    seen: list[list[str]] = []

    class Watched(Data):
        def batch(self, index: int) -> Batch:
            paths = [
                tmp_path / "curves" / "train.csv",
                tmp_path / "curves" / "val.csv",
                tmp_path / "speed.csv",
            ]
            seen.append([path.read_text(encoding="utf-8") if path.exists() else "" for path in paths])
            return super().batch(index)

    monkeypatch.setattr(time, "perf_counter", iter(range(10**6)).__next__)  # a second passes at every look
    run(
        tmp_path,
        Watched(),
        settings=replace(SETTINGS, checkpoint_every=1000, steps=400, grad_accum_steps=1, val_every=100),
    )
    counts = [len(text.splitlines()) for text, _, _ in seen]
    assert counts == sorted(counts) and 1 < len(set(counts)) < 100  # not at every step
    assert any(len(val.splitlines()) == 2 for _, val, _ in seen) and any(
        len(speed.splitlines()) > 100 for *_, speed in seen
    )


def test_finished_work_is_not_repeated(tmp_path: Path) -> None:
    """Would catch training done twice when a kill comes after the last step and before DVC's lock."""
    first, history = run(tmp_path)
    again = Data()
    second, second_record = run(tmp_path, again)
    assert again.asked == [] and same_weights(first, second) and shown(second_record) == shown(history)


def test_validation_and_samples_do_not_disturb_training(tmp_path: Path) -> None:
    """Would catch evaluation that touches gradients, loss sums, moments or a shared random state."""
    often, history = run(tmp_path / "often", settings=replace(SETTINGS, val_every=1, sample_every=1))
    seldom, seldom_record = run(
        tmp_path / "seldom", settings=replace(SETTINGS, val_every=100, sample_every=100)
    )
    assert same_state(often, seldom)
    assert shown(history)[0] == shown(seldom_record)[0]
    assert [row[0] for row in history.val] == list(range(1, 11)) and [
        row[0] for row in seldom_record.val
    ] == [10]


def test_two_runs_are_bitwise_equal(tmp_path: Path) -> None:
    """Would catch a sum whose order depends on timing."""
    assert same_state(run(tmp_path / "a")[0], run(tmp_path / "b")[0])


def test_a_batch_is_memorized(tmp_path: Path) -> None:
    """Would catch a loop that reports another loss than it minimizes, or steps in the wrong direction."""

    class Same(Data):
        def batch(self, index: int) -> Batch:
            return random_batch(0, supervised=1.0)

    settings = replace(
        SETTINGS, steps=150, grad_accum_steps=1, weight_decay=0.0, mtp_loss_weights=(1.0, 0.0), val_every=150
    )
    _, history = run(tmp_path, Same(), replace(settings, checkpoint_every=150))
    assert (
        history.train[0][1] == pytest.approx(math.log(CONFIG.vocab_size), rel=0.1)
        and history.train[-1][1] < 0.05
    )


def test_a_step_may_pair_sequences_and_ask_a_frozen_model(tmp_path: Path) -> None:
    """Would catch a loop that only takes train_step: preference training (DPO) weights each target by two
    models.
    """
    one, frozen, beta, margins = engine(4), engine(4), 0.5, []
    chosen = np.array([1, 0, 1, 0], np.float32)  # sequences come in pairs, the chosen one first

    class Pairs(Data):
        def batch(self, index: int) -> Batch:
            return random_batch(0, rows=4, supervised=1.0)

    def logprobs(model: Engine, batch: Batch) -> np.ndarray:
        return -(model.score(batch) * batch.loss_weight).sum(axis=1)

    def step(
        engine: Engine, batches: Any, weights: Any, lr: float, while_gpu_computes: Any, interruptible: Any
    ) -> Outcome:
        (batch,) = batches
        ahead = logprobs(engine, batch) - logprobs(frozen, batch)
        margin = ahead[0::2] - ahead[1::2]
        pull = np.repeat(beta / (1 + np.exp(beta * margin)), 2) * np.where(chosen, 1, -1)
        weight = (batch.loss_weight * pull[:, None]).astype(np.float32)
        with interruptible():
            engine.micro_step(replace(batch, loss_weight=weight), np.array([0.5, 0.0]))
        engine.reduce()
        loss = float(np.log1p(np.exp(-beta * margin)).mean())
        margins.append(float(margin.mean()))
        return Outcome(loss, loss, float(engine.update(lr, while_gpu_computes).grad_norm))

    settings = replace(SETTINGS, steps=20, grad_accum_steps=1)
    _, history = run(tmp_path, settings=settings, one=one, of=replace(task(one, Pairs()), step=step))
    assert history.train[0][1] == pytest.approx(math.log(2), rel=1e-5) and history.train[-1][1] < 0.5
    assert margins[0] == 0 and margins[-1] > 1


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    """Would catch a run that continues with NaN, saves it over the last good state, or names no cause."""
    one = engine()

    class Poisoned(Data):
        def batch(self, index: int) -> Batch:
            if index == 8:
                weights = one.weights()
                name = sorted(weights)[0]
                weights[name].flat[0] = np.nan
                one.load(weights)
            return super().batch(index)

    with pytest.raises(ValueError) as caught:
        run(tmp_path, Poisoned(), one=one)
    message = str(caught.value)
    for part in (
        "step 5: loss nan",
        "learning rate 0.00",
        "gradient norm nan",
        "first bad tensor ",
        "000000003-",
        "lower lr",
    ):
        assert part in message
    assert "\n" not in message and "first bad tensor none" not in message
    with ResumeFolder(work(), tmp_path / "resume") as resume:
        state = resume.load()
    assert (
        state is not None
        and state.step == 3
        and all(np.isfinite(array).all() for array in state.arrays.values())
    )


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    """Would catch a checkpoint or a state whose weights the last update made infinite."""
    one = engine()
    update = one.update

    def ruined(*given: Any) -> Any:
        result = update(*given)
        one.parameter("norm.weight")[3] = np.inf
        return result

    one.update = ruined  # type: ignore[assignment]
    with pytest.raises(
        ValueError,
        match=r"step 1: norm\.weight is not finite; last good resume state none; start over with a lower lr",
    ):
        run(tmp_path, one=one, settings=replace(SETTINGS, checkpoint_every=1))
    assert not list(tmp_path.rglob("*.safetensors"))
