"""The exponential that vectorises."""

import numpy as np
import pytest

from kernels.cpu.exponential import exp
from kernels.cpu.jit import jit
from tests.compare import Array


@jit
def _fill(out, inp):  # type: ignore[no-untyped-def]
    for i in range(inp.size):
        out[i] = exp(inp[i])


def compiled(values: Array) -> Array:
    """exp of each element, as the operations call it."""
    out = np.full_like(values, np.nan)
    _fill(out, values)
    return out


def interpreted(values: Array) -> Array:
    """exp of each element, as a debugger steps through it; NumPy warns there of what compiled code does
    silently.
    """
    with np.errstate(all="ignore"):
        return np.array([exp(x) for x in values])


# Wrong coefficients, or a reduction of the argument that loses digits: every softmax would be off.
@pytest.mark.parametrize("lowest", [-87.3, -20.0, -1.0, -1e-3])
def test_relative_error(lowest: float) -> None:
    x = np.linspace(lowest, min(88.0, -lowest), 200_003).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert np.abs(compiled(x) / exact - 1).max() < 3e-7


# Where 2^k changes, at odd multiples of ln 2 / 2, the two sides must meet: a softmax is monotonic.
def test_both_sides_of_each_interval() -> None:
    border = ((np.arange(-125, 127) + 0.5) * np.log(2)).astype(np.float32)
    x = np.stack([np.nextafter(border, np.float32(direction)) for direction in (-np.inf, np.inf)])
    below, above = (compiled(side) for side in x)
    assert (below <= above * np.float32(1 + 3e-7)).all()
    assert np.abs(above / below - 1).max() < 1e-4


# A shifted score is at most 0: exp(0) above 1 would make a probability above 1, and a mask's -inf must count
# for nothing.
def test_special_values() -> None:
    x = np.array([0, -0.0, -np.inf, -1e30, -88, 89, 1e30, np.inf, np.nan], np.float32)
    for values in (compiled(x), interpreted(x)):
        assert values[:2].tolist() == [1, 1]
        assert (values[2:5] < 1.3e-38).all()
        assert (values[2:5] >= 0).all()
        assert np.isinf(values[5:8]).all()
        assert np.isnan(values[8])


# A debugger would show other numbers than the run: both differ by the products that compilation fuses with
# sums.
def test_interpreted_is_compiled() -> None:
    x = np.linspace(-80, 80, 501).astype(np.float32)
    assert np.abs(interpreted(x) / compiled(x).astype(np.float64) - 1).max() < 3e-7
    assert interpreted(x).dtype == np.float32


# float64 is what gradients are checked in.
def test_float64_is_exact() -> None:
    x = np.linspace(-700, 700, 1001)
    for values in (compiled(x), interpreted(x)):
        assert np.abs(values / np.exp(x) - 1).max() < 1e-15
