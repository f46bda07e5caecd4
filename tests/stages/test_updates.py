"""One update: its learning rate, and sums that do not depend on how the batch is cut into micro-batches."""

import math
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from kernels.batch import Batch
from stages.updates import learning_rate, train_step
from tests.stages.small_training import SETTINGS, engine, random_batch


@pytest.mark.parametrize(
    ("schedule", "cooldown", "expected"),
    [
        (
            "cosine",
            0,
            {
                0: 0.25,
                3: 1.0,
                4: 1.0,
                12: 0.55,
                19: 0.1 + 0.9 * (1 + math.cos(math.pi * 15 / 16)) / 2,
                20: 0.1,
            },
        ),
        ("wsd", 5, {0: 0.25, 3: 1.0, 15: 1.0, 16: 0.1 + 0.9 * 4 / 5, 19: 0.1 + 0.9 / 5, 20: 0.1}),
        ("wsd", 0, {0: 0.25, 3: 1.0, 19: 1.0}),
    ],
)
def test_learning_rate_at_its_corners(
    schedule: Literal["cosine", "wsd"], cooldown: int, expected: dict[int, float]
) -> None:
    """Would catch a first step of learning rate 0, a peak never reached, and an end above or below min_lr."""
    settings = replace(
        SETTINGS, steps=20, warmup_steps=4, lr=1.0, min_lr=0.1, schedule=schedule, cooldown_steps=cooldown
    )
    for step, rate in expected.items():
        assert learning_rate(step, settings) == pytest.approx(rate, rel=1e-12), step


def test_no_warm_up_starts_at_the_peak() -> None:
    """Would catch a division by warmup_steps = 0."""
    assert learning_rate(0, replace(SETTINGS, warmup_steps=0)) == SETTINGS.lr


def test_accumulation_is_one_large_batch() -> None:
    """Would catch a mean of micro-batch means, if their numbers of supervised tokens differ.

    Float32 sums in another order differ by a few eps relative to the largest gradient; a mean of means is off
    by percents.
    """
    parts = [random_batch(index) for index in range(4)]
    whole = Batch(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in Batch.__dataclass_fields__)
    )
    assert len({float(part.loss_weight.sum()) for part in parts}) > 1
    small, large = engine(3), engine(12)
    for one, batches in ((small, parts), (large, [whole])):
        one.outcome = train_step(one, batches, (1.0, 0.1), lr=0.0)  # type: ignore[attr-defined]
    a, b = small.outcome, large.outcome  # type: ignore[attr-defined]
    assert a.loss == pytest.approx(b.loss, rel=1e-6) and a.total_loss == pytest.approx(b.total_loss, rel=1e-6)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)
    first, second = small.state()["exp_avg"], large.state()["exp_avg"]
    assert np.max(np.abs(first - second)) <= 64 * np.finfo(np.float32).eps * np.max(
        np.abs(second)
    ) and np.any(second)


def test_loss_is_head_0_and_the_total_weighs_the_heads() -> None:
    """Would catch a reported loss that mixes the heads, or weights that enter twice."""
    one, batches = engine(), [random_batch(0), random_batch(1)]
    found = [one.evaluate(batch) for batch in batches]
    nll, weight = (
        np.concatenate([getattr(each, name) for each in found], axis=1) for name in ("nll", "weight")
    )
    heads = (nll * weight).sum(axis=(1, 2)) / weight.sum(axis=(1, 2))
    outcome = train_step(one, batches, (1.0, 0.5), lr=0.0)
    assert outcome.loss == pytest.approx(heads[0], rel=1e-5)
    assert outcome.total_loss == pytest.approx(heads[0] + 0.5 * heads[1], rel=1e-5)


def test_a_head_without_targets_is_left_out_and_head_0_may_not_be() -> None:
    """Would catch 0/0 for an MTP head without supervised targets, and an update that silently trains
    nothing.
    """
    batch = random_batch(0)
    weight = np.zeros_like(batch.loss_weight)
    weight[:, 0] = 1  # the first target of a row is one token ahead of the first position only
    outcome = train_step(engine(), [replace(batch, loss_weight=weight)], (1.0, 0.5), lr=0.0)
    assert math.isfinite(outcome.grad_norm) and outcome.total_loss == outcome.loss > 0
    with pytest.raises(ValueError, match="no target in this update is supervised"):
        train_step(engine(), [replace(batch, loss_weight=np.zeros_like(weight))], (1.0, 0.5), lr=0.0)
