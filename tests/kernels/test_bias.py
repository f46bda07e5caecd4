"""The bias of a linear layer."""

import numpy as np
import pytest

from kernels.cpu.bias import bias_backward, bias_forward
from tests.cases import ROWS
from tests.compare import (
    Arrays,
    assert_accumulates,
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
    """Random arrays."""
    rng = np.random.default_rng([rows, width])
    return {"inp": normal(rng, rows, width), "dout": normal(rng, rows, width), "bias": normal(rng, width)}


def run(a: Arrays, before: float = 0.0, alias: bool = False) -> Arrays:
    """With `alias`, out is inp's own array, as model.py has it."""
    inp = a["inp"].copy()
    out, dbias = inp if alias else unwritten(inp), np.full_like(a["bias"], before)
    bias_forward(out, inp, a["bias"])
    bias_backward(dbias, a["dout"])
    return {"out": out, "dbias": dbias}


# A bias added along the wrong axis.
@pytest.mark.parametrize("shape", ROWS)
def test_forward_is_the_sum(shape: tuple[int, int]) -> None:
    a = inputs(*shape)
    assert_within("out", run(a)["out"], a["inp"] + a["bias"], 0)


# A group of rows left out of the sum, where rows are fewer than groups or don't divide among them.
@pytest.mark.parametrize("shape", ROWS)
def test_gradient(shape: tuple[int, int]) -> None:
    assert_gradients(run, inputs(*shape), {"out": "dout"}, ("bias",))


# A sum held in the wrong precision.
@pytest.mark.parametrize("shape", ROWS)
def test_float32(shape: tuple[int, int]) -> None:
    assert_float32(run, inputs(*shape), shape[0])


# An order of summation that depends on the number of threads.
def test_same_bits_again_and_on_one_thread() -> None:
    assert_repeats(run, inputs(131, 65))


# Gradient accumulation would keep only the last micro-batch.
def test_gradient_accumulates() -> None:
    assert_accumulates(run, inputs(17, 65), ("dbias",))


# model.py adds the bias in place.
def test_aliasing() -> None:
    a = single(inputs(17, 65))
    assert_same_bits(run(a, alias=True), run(a))
