"""GELU in its tanh form."""

import numpy as np
import pytest

from kernels.cpu.gelu import gelu_backward, gelu_forward
from tests.cases import ROWS
from tests.compare import (
    Arrays,
    assert_float32,
    assert_gradients,
    assert_repeats,
    assert_same_bits,
    assert_within,
    normal,
    single,
    unwritten,
)


def inputs(rows: int, width: int) -> Arrays:
    """Random arrays, the input three times as wide as a normal one so that both tails are met."""
    rng = np.random.default_rng([rows, width])
    return {"inp": 3 * normal(rng, rows, width), "dout": normal(rng, rows, width)}


def run(a: Arrays, alias: bool = False) -> Arrays:
    """With `alias`, dinp is dout's own array."""
    inp, dout = a["inp"], a["dout"].copy()
    out, dinp = unwritten(inp), dout if alias else unwritten(inp)
    gelu_forward(out, inp)
    gelu_backward(dinp, dout, inp)
    return {"out": out, "dinp": dinp}


# A wrong constant: GPT-2's weights were trained with this very curve.
@pytest.mark.parametrize("shape", ROWS)
def test_forward_is_the_formula(shape: tuple[int, int]) -> None:
    a = inputs(*shape)
    x = a["inp"]
    expected = x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    assert_within("out", run(a)["out"], expected, 1e-13 * np.abs(x).max())


# A missing term of the product rule or a factor 2 between tanh and sigmoid.
@pytest.mark.parametrize("shape", ROWS)
def test_gradient(shape: tuple[int, int]) -> None:
    assert_gradients(run, inputs(*shape), {"out": "dout"}, ("inp",))


# A constant in the wrong precision. The argument of the exponential, at most 2 u of the largest input,
# amplifies its own rounding; it is capped where the sigmoid is flat anyway, near 20.
@pytest.mark.parametrize("shape", ROWS)
def test_float32(shape: tuple[int, int]) -> None:
    assert_float32(run, inputs(*shape), 20)


# A row that two threads share.
def test_same_bits_again_and_on_one_thread() -> None:
    assert_repeats(run, inputs(131, 65))


# The docstring allows dinp to be dout.
def test_aliasing() -> None:
    a = single(inputs(17, 65))
    assert_same_bits(run(a, alias=True), run(a))


# exp overflows or gives 0 / 0 far from zero, where GELU is 0 or x and its slope 0 or 1.
def test_large_inputs() -> None:
    x = np.array([[-1e4, -100.0, -30.0, 0.0, 30.0, 100.0, 1e4]])
    for a in ({"inp": x, "dout": np.full_like(x, 2.0)}, single({"inp": x, "dout": np.full_like(x, 2.0)})):
        got = run(a)
        assert_within("out", got["out"], np.maximum(x, 0), 1e-30)
        assert_within("dinp", got["dinp"], np.array([[0, 0, 0, 1.0, 2, 2, 2]]), 1e-30)
