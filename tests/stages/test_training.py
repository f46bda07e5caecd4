"""The training loop on the real engine, small: exact sums, exact resume, and nothing that disturbs the weights."""

import math
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from kernels.batch import Batch
from kernels.config import ModelConfig, Numerics
from kernels.engine import AdamW, Engine
from stages import training as training_module
from stages.checkpoint import ResumeFolder
from stages.metrics import MOST_ROWS, PlainDisplay, Progress, Record
from stages.settings import Training
from stages.training import Task, Validation, held_out_nats, learning_rate, train, train_step

CONFIG = ModelConfig(vocab_size=40, layers=2, heads=2, kv_heads=1, dim=16, ffn=24, context=12, mtp_heads=2)
SETTINGS = Training(
    seed=1, steps=10, micro_batch=3, grad_accum_steps=2, optimizer="adamw", schedule="cosine", lr=1e-2, min_lr=0.0,
    warmup_steps=2, cooldown_steps=0, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8, grad_clip=1.0, mtp_weights=(1.0, 0.1),
    val_every=4, sample_every=5, checkpoint_every=3,
)  # fmt: skip


def engine(rows: int = 3) -> Engine:
    return Engine(CONFIG, Numerics(), micro_batch=rows, device="cpu", threads=1, seed=7)


def random_batch(index: int, rows: int = 3, supervised: float = 0.5) -> Batch:
    """Micro-batch `index`: random ids, two documents a row, and some of the targets, in each batch another share of them."""
    rng = np.random.default_rng([11, index])
    ids = rng.integers(0, CONFIG.vocab_size, (rows, CONFIG.context + 1), dtype=np.int32)
    document = np.repeat(np.arange(2, dtype=np.int32), CONFIG.context // 2)[None].repeat(rows, axis=0)
    weight = (rng.random((rows, CONFIG.context)) < supervised * rng.random() + 0.1).astype(np.float32)
    return Batch(np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:]), document, weight)


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


def task(one: Engine, data: Data | None = None) -> Task:
    def validate() -> Validation:
        nats, targets = held_out_nats(one, [random_batch(1000), random_batch(1001)])
        return Validation(nats / targets, nats)

    return Task(data or Data(), validate, lambda seed: f"sample {seed}")


def run(
    folder: Path, data: Data | None = None, settings: Training = SETTINGS, one: Engine | None = None
) -> tuple[Engine, Record]:
    one = one or engine()
    with ResumeFolder("f", folder / "resume") as resume:
        record = train(one, settings, task(one, data), resume=resume, display=PlainDisplay(), curves=folder / "curves")
    return one, record


def same_state(a: Engine, b: Engine) -> bool:
    return all(np.array_equal(array, b.state()[name]) for name, array in a.state().items())


def without_times(record: Record) -> tuple[object, ...]:
    return [tuple(row)[:-1] for row in record.train], [tuple(row) for row in record.val], [tuple(s) for s in record.samples]


@pytest.mark.parametrize(
    ("schedule", "cooldown", "expected"),
    [
        ("cosine", 0, {0: 0.25, 3: 1.0, 4: 1.0, 12: 0.55, 19: 0.1 + 0.9 * (1 + math.cos(math.pi * 15 / 16)) / 2, 20: 0.1}),
        ("wsd", 5, {0: 0.25, 3: 1.0, 15: 1.0, 16: 0.1 + 0.9 * 4 / 5, 19: 0.1 + 0.9 / 5, 20: 0.1}),
        ("wsd", 0, {0: 0.25, 3: 1.0, 19: 1.0}),
    ],
)
def test_learning_rate_at_its_corners(schedule: Literal["cosine", "wsd"], cooldown: int, expected: dict[int, float]) -> None:
    """Would catch a first step of learning rate 0, a peak never reached, and an end above or below min_lr."""
    settings = replace(SETTINGS, steps=20, warmup_steps=4, lr=1.0, min_lr=0.1, schedule=schedule, cooldown_steps=cooldown)
    for step, rate in expected.items():
        assert learning_rate(step, settings) == pytest.approx(rate, rel=1e-12), step


def test_no_warm_up_starts_at_the_peak() -> None:
    """Would catch a division by warmup_steps = 0."""
    assert learning_rate(0, replace(SETTINGS, warmup_steps=0)) == SETTINGS.lr


def test_accumulation_is_one_large_batch() -> None:
    """Would catch a mean of micro-batch means where their supervised tokens differ in number.

    Float32 sums in another order differ by a few eps relative to the largest gradient; a mean of means is off by percents.
    """
    parts = [random_batch(index) for index in range(4)]
    whole = Batch(*(np.concatenate([getattr(part, name) for part in parts]) for name in Batch.__dataclass_fields__))
    assert len({float(part.loss_weight.sum()) for part in parts}) > 1
    small, large = engine(3), engine(12)
    for one, batches in ((small, parts), (large, [whole])):
        one.outcome = train_step(one, batches, (1.0, 0.1), AdamW(), lr=0.0)  # type: ignore[attr-defined]
    a, b = small.outcome, large.outcome  # type: ignore[attr-defined]
    assert a.loss == pytest.approx(b.loss, rel=1e-6) and a.total_loss == pytest.approx(b.total_loss, rel=1e-6)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)
    first, second = small.state()["exp_avg"], large.state()["exp_avg"]
    assert np.max(np.abs(first - second)) <= 64 * np.finfo(np.float32).eps * np.max(np.abs(second)) and np.any(second)


def test_loss_is_head_0_and_the_total_weighs_the_heads() -> None:
    """Would catch a reported loss that mixes the heads, or weights that enter twice."""
    one, batches = engine(), [random_batch(0), random_batch(1)]
    found = [one.evaluate(batch) for batch in batches]
    nll, weight = (np.concatenate([getattr(each, name) for each in found], axis=1) for name in ("nll", "weight"))
    heads = (nll * weight).sum(axis=(1, 2)) / weight.sum(axis=(1, 2))
    outcome = train_step(one, batches, (1.0, 0.5), AdamW(), lr=0.0)
    assert outcome.loss == pytest.approx(heads[0], rel=1e-5)
    assert outcome.total_loss == pytest.approx(heads[0] + 0.5 * heads[1], rel=1e-5)


def test_a_head_without_targets_is_left_out_and_head_0_may_not_be() -> None:
    """Would catch 0/0 where a far head has no supervised target, and an update that silently teaches nothing."""
    batch = random_batch(0)
    weight = np.zeros_like(batch.loss_weight)
    weight[:, 0] = 1  # the first target of a row is one token ahead of the first position only
    outcome = train_step(engine(), [replace(batch, loss_weight=weight)], (1.0, 0.5), AdamW(), lr=0.0)
    assert math.isfinite(outcome.grad_norm) and outcome.total_loss == outcome.loss > 0
    with pytest.raises(ValueError, match="without a single target that counts"):
        train_step(engine(), [replace(batch, loss_weight=np.zeros_like(weight))], (1.0, 0.5), AdamW(), lr=0.0)


@pytest.mark.parametrize("killed_at", [1, 6, 19])
def test_killed_and_resumed_is_undisturbed_bit_for_bit(tmp_path: Path, killed_at: int) -> None:
    """Would catch moments, step count, data position, schedule, curves or samples lost on the way through a state."""
    whole, whole_record = run(tmp_path / "whole")
    data = Data(at_index=killed_at, at="kill")
    with pytest.raises(SystemExit):
        run(tmp_path / "parts", data)
    again = Data()
    parts, record = run(tmp_path / "parts", again)
    assert same_state(whole, parts) and without_times(record) == without_times(whole_record)
    done = max(0, killed_at // SETTINGS.grad_accum_steps - 1)  # a step's batches are fetched within the step before
    last_saved = done // SETTINGS.checkpoint_every * SETTINGS.checkpoint_every
    assert again.asked == list(range(last_saved * SETTINGS.grad_accum_steps, SETTINGS.steps * SETTINGS.grad_accum_steps))
    assert record.resumed_at == ([last_saved] if last_saved else [])


def test_ctrl_c_saves_the_step_and_goes_on_from_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Would catch work lost at Ctrl-C, a step cut in half, and an exit that DVC would take for success."""
    whole, whole_record = run(tmp_path / "whole")
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", Data(at_index=10, at="ctrl-c"))  # within step 5, which no checkpoint ends
    assert signal.getsignal(signal.SIGINT) is before
    assert "interrupted: step 5 is saved" in capsys.readouterr().out
    again = Data()
    parts, record = run(tmp_path / "parts", again)
    assert again.asked[0] == 10 and record.resumed_at == [5]
    assert same_state(whole, parts) and without_times(record) == without_times(whole_record)


def test_ctrl_c_behind_the_last_step_is_not_lost(tmp_path: Path) -> None:
    """Would catch a Ctrl-C during the last validation after which DVC goes on to the next stage."""
    one = engine()

    def sample(seed: int) -> str:
        if seed == SETTINGS.seed + SETTINGS.steps:
            signal.raise_signal(signal.SIGINT)
        return ""

    with ResumeFolder("f", tmp_path) as resume, pytest.raises(KeyboardInterrupt):
        train(one, SETTINGS, replace(task(one), sample=sample), resume=resume, display=PlainDisplay(), curves=tmp_path)
    with ResumeFolder("f", tmp_path) as resume:
        state = resume.load()
    assert state is not None and state.step == SETTINGS.steps


def test_a_second_ctrl_c_stops_at_once() -> None:
    """Would catch a program that cannot be stopped while a step hangs."""
    with training_module.Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_finished_work_is_not_repeated(tmp_path: Path) -> None:
    """Would catch training done twice when a kill comes after the last step and before DVC's lock."""
    first, record = run(tmp_path)
    again = Data()
    second, second_record = run(tmp_path, again)
    assert again.asked == [] and same_state(first, second) and without_times(second_record) == without_times(record)


def test_validation_and_samples_do_not_disturb_training(tmp_path: Path) -> None:
    """Would catch evaluation that touches gradients, loss sums, moments or a shared random state."""
    often, record = run(tmp_path / "often", settings=replace(SETTINGS, val_every=1, sample_every=1))
    seldom, seldom_record = run(tmp_path / "seldom", settings=replace(SETTINGS, val_every=100, sample_every=100))
    assert same_state(often, seldom)
    assert without_times(record)[0] == without_times(seldom_record)[0]
    assert [row[0] for row in record.val] == list(range(1, 11)) and [row[0] for row in seldom_record.val] == [10]


def test_two_runs_are_bitwise_equal(tmp_path: Path) -> None:
    """Would catch a sum whose order depends on timing."""
    assert same_state(run(tmp_path / "a")[0], run(tmp_path / "b")[0])


def test_a_batch_is_learnt_by_heart(tmp_path: Path) -> None:
    """Would catch a loop that trains on something else than it reports, or steps in the wrong direction."""

    class Same(Data):
        def batch(self, index: int) -> Batch:
            return random_batch(0, supervised=1.0)

    settings = replace(SETTINGS, steps=150, grad_accum_steps=1, weight_decay=0.0, mtp_weights=(1.0, 0.0), val_every=150)
    _, record = run(tmp_path, Same(), replace(settings, checkpoint_every=150))
    assert record.train[0][1] == pytest.approx(math.log(CONFIG.vocab_size), rel=0.1) and record.train[-1][1] < 0.05


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    """Would catch a run that goes on with NaN, saves it over the last good state, or doesn't say where to look."""
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
    for part in ("step 5: loss nan", "learning rate 0.00", "gradient norm nan", "first bad tensor ", "000000003-", "lower lr"):
        assert part in message
    assert "\n" not in message and "first bad tensor none" not in message
    with ResumeFolder("f", tmp_path / "resume") as resume:
        state = resume.load()
    assert state is not None and state.step == 3 and all(np.isfinite(array).all() for array in state.arrays.values())


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    """Would catch a checkpoint, or a state called good, of weights that the last update itself made infinite."""
    one = engine()
    update = one.update

    def ruined(*given: Any) -> Any:
        result = update(*given)
        one.parameter("norm.weight")[3] = np.inf
        return result

    one.update = ruined  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"step 1: loss \d.*, gradient norm \d.*, first bad tensor norm.weight: not finite"):
        run(tmp_path, one=one, settings=replace(SETTINGS, checkpoint_every=1))
    assert not list(tmp_path.rglob("*.safetensors"))


def test_curves_stay_small_and_hold_first_and_last_step(tmp_path: Path) -> None:
    """Would catch a CSV of a line a step over a long run, which Git keeps."""

    class Quick:
        """An engine whose steps cost nothing."""

        def __getattr__(self, name: str) -> object:
            return {"micro_step": lambda *_: None, "reduce": lambda: None, "first_nonfinite": lambda: None,
                    "state": lambda: {"step": np.zeros((), np.int64)},
                    "update": lambda *_: type("Update", (), {"nll_sums": np.ones(2), "grad_norm": 1.0})}[name]  # fmt: skip

    class Silent(PlainDisplay):
        def update(self, progress: Progress) -> None:
            pass

        def say(self, text: str) -> None:
            pass

    class One(Data):
        one = random_batch(0)

        def batch(self, index: int) -> Batch:
            return self.one

    settings = replace(SETTINGS, steps=2500, grad_accum_steps=1, val_every=2500, sample_every=2500, checkpoint_every=2500)
    with ResumeFolder("f", tmp_path) as resume:
        record = train(Quick(), settings, Task(One(), lambda: Validation(1.0, 1.0), lambda seed: ""),  # type: ignore[arg-type]
                       resume=resume, display=Silent(), curves=tmp_path)  # fmt: skip
    steps = [row[0] for row in record.train]
    assert (steps[0], steps[-1]) == (1, 2500) and len(steps) <= MOST_ROWS + 1
    assert len((tmp_path / "train.csv").read_text(encoding="utf-8").splitlines()) == len(steps) + 1
