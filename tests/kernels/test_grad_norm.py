"""The length of the whole gradient."""

import numpy as np
import pytest

from kernels.cpu.grad_norm import CHUNK, grad_norm, square_sums
from tests.cases import GRADIENTS
from tests.compare import Arrays, assert_repeats, normal


def run(a: Arrays) -> Arrays:
    """The norm is always float64."""
    norm, grads = np.array(np.nan), a["grads"]
    sums = np.full(-(-grads.size // CHUNK), np.nan, grads.dtype)
    square_sums(sums, grads)
    grad_norm(norm, sums)
    return {"norm": norm}


# The last, partial chunk left out, or its border counted twice.
@pytest.mark.parametrize("size", GRADIENTS)
def test_is_the_euclidean_length(size: int) -> None:
    grads = normal(np.random.default_rng(size), size)
    exact = float(np.sqrt((grads**2).sum()))
    assert float(run({"grads": grads})["norm"]) == pytest.approx(exact, rel=1e-13)
    # Sums of positive squares in float32, at most 4096 at a time; half of that relative error is left under
    # the root.
    single = float(run({"grads": grads.astype(np.float32)})["norm"])
    assert single == pytest.approx(exact, rel=2.0**-24 * (min(size, 4096) + 1) / 2)


# Chunks added in the order in which threads finish.
def test_same_bits_again_and_on_one_thread() -> None:
    assert_repeats(run, {"grads": normal(np.random.default_rng(0), 100_003)})


# A NaN or an infinity that the sum loses would let the update spoil every parameter.
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows(value: float) -> None:
    grads = np.ones(10_000, np.float32)
    grads[7777] = value
    assert not np.isfinite(run({"grads": grads})["norm"])
