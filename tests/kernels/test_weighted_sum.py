"""The sum that a loss is made of."""

import numpy as np
import pytest

from kernels.cpu.weighted_sum import weighted_sum_forward
from tests.compare import Array, normal


def total(nll: Array, weight: Array, before: float = 0.0) -> float:
    """The sum, on top of `before`."""
    out = np.array(before)
    weighted_sum_forward(out, nll, weight)
    return float(out)


# A sum that overwrites would report the last micro-batch's loss only.
@pytest.mark.parametrize("rows", [1, 7, 4097])
def test_adds_the_weighted_sum(rows: int) -> None:
    rng = np.random.default_rng(rows)
    nll, weight = np.abs(normal(rng, rows)), np.abs(normal(rng, rows))
    exact = float((nll * weight).sum())
    assert total(nll, weight, before=2.5) == pytest.approx(2.5 + exact, rel=1e-14)
    # float32 rounds each product once; all of them are positive.
    single = total(nll.astype(np.float32), weight.astype(np.float32), before=2.5)
    assert single == pytest.approx(2.5 + exact, rel=2.0**-24)


# A running sum in float32 stops growing at 2^24.
def test_a_long_sum_keeps_growing() -> None:
    ones = np.ones(1, np.float32)
    assert total(ones, ones, before=2.0**24) == 2.0**24 + 1


# 0 * inf is NaN: one masked position would hide the loss of all.
def test_a_row_of_weight_zero_adds_nothing() -> None:
    nll = np.array([1.5, np.inf, np.nan], np.float32)
    assert total(nll, np.array([2, 0, 0], np.float32)) == 3.0
