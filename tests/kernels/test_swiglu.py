"""SwiGLU."""

import numpy as np
import pytest

from kernels.cpu.swiglu import swiglu_backward, swiglu_forward
from tests.cases import ROWS
from tests.compare import (
    Arrays,
    assert_float32,
    assert_gradients,
    assert_repeats,
    assert_within,
    normal,
    single,
    unwritten,
)


def inputs(rows: int, width: int) -> Arrays:
    """Random arrays, the gates three times as wide as normal ones so that both tails are met."""
    rng = np.random.default_rng([rows, width])
    gates = np.where(np.arange(2 * width) < width, 3.0, 1.0)
    return {"inp": gates * normal(rng, rows, 2 * width), "dout": normal(rng, rows, width)}


def run(a: Arrays) -> Arrays:
    """Forward and backward."""
    out, dinp = unwritten(a["dout"]), unwritten(a["inp"])
    swiglu_forward(out, a["inp"])
    swiglu_backward(dinp, a["dout"], a["inp"])
    return {"out": out, "dinp": dinp}


# Gate and linear half exchanged: a checkpoint would mean another function elsewhere.
@pytest.mark.parametrize("shape", ROWS)
def test_forward_is_the_formula(shape: tuple[int, int]) -> None:
    a = inputs(*shape)
    gate, up = np.split(a["inp"], 2, axis=1)
    expected = gate / (1 + np.exp(-gate)) * up
    assert_within("out", run(a)["out"], expected, 1e-13 * np.abs(expected).max())


# A missing term of the product rule, in either half.
@pytest.mark.parametrize("shape", ROWS)
def test_gradient(shape: tuple[int, int]) -> None:
    assert_gradients(run, inputs(*shape), {"out": "dout"}, ("inp",))


# A constant in the wrong precision. A sum has no length here.
@pytest.mark.parametrize("shape", ROWS)
def test_float32(shape: tuple[int, int]) -> None:
    assert_float32(run, inputs(*shape), 0)


# A row that two threads share.
def test_same_bits_again_and_on_one_thread() -> None:
    assert_repeats(run, inputs(131, 65))


# exp overflows or gives inf / inf far from zero, where SiLU is 0 or its argument and its slope 0 or 1.
def test_large_gates() -> None:
    gate = np.array([[-1e4, -200.0, 0.0, 200.0, 1e4]])
    a = {"inp": np.concatenate((gate, np.full_like(gate, 3.0)), axis=1), "dout": np.full_like(gate, 2.0)}
    for arrays in (a, single(a)):
        got = run(arrays)
        assert_within("out", got["out"], 3 * np.maximum(gate, 0), 1e-30)
        dgate, dup = np.split(got["dinp"], 2, axis=1)
        assert_within("dgate", dgate, np.array([[0, 0, 3.0, 6, 6]]), 1e-30)
        assert_within("dup", dup, 2 * np.maximum(gate, 0), 1e-30)
