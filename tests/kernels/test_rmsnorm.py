"""RMSNorm, alone and fused with the residual addition."""

import numpy as np
import pytest

from kernels.cpu.rmsnorm import (
    residual_rmsnorm_backward,
    residual_rmsnorm_forward,
    rmsnorm_backward,
    rmsnorm_forward,
)
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

EPS = 1e-5
NORM, RESIDUAL = {"out": "dout"}, {"out": "dout", "residual_out": "dresidual_out"}


def inputs(rows: int, width: int) -> Arrays:
    """Random arrays of both forms."""
    rng = np.random.default_rng([rows, width])
    names = ("inp", "dout", "residual", "branch", "dresidual_out")
    return {**{name: normal(rng, rows, width) for name in names}, "weight": normal(rng, width)}


def run(a: Arrays, before: float = 0.0, alias: bool = False) -> Arrays:
    """rmsnorm; with `alias`, dinp is dout's own array."""
    inp, weight, dout = a["inp"], a["weight"], a["dout"].copy()
    out, rstd, dinp = unwritten(inp), unwritten(inp, len(inp)), dout if alias else unwritten(inp)
    dweight = np.full_like(weight, before)
    rmsnorm_forward(out, rstd, inp, weight, eps=EPS)
    rmsnorm_backward(dinp, dweight, dout, inp, weight, rstd)
    return {"out": out, "rstd": rstd, "dinp": dinp, "dweight": dweight}


def run_residual(a: Arrays, before: float = 0.0, alias: bool = False) -> Arrays:
    """residual_rmsnorm; with `alias`, dinp is dresidual_out's own array."""
    branch, weight, dresidual_out = a["branch"], a["weight"], a["dresidual_out"].copy()
    residual_out, out, rstd = unwritten(branch), unwritten(branch), unwritten(branch, len(branch))
    dinp, dweight = dresidual_out if alias else unwritten(branch), np.full_like(weight, before)
    residual_rmsnorm_forward(residual_out, out, rstd, a["residual"], branch, weight, eps=EPS)
    residual_rmsnorm_backward(dinp, dweight, dresidual_out, a["dout"], residual_out, weight, rstd)
    return {
        "residual_out": residual_out, "out": out, "rstd": rstd, "dbranch": dinp, "dresidual": dinp.copy(), "dweight": dweight
    }  # fmt: skip


# A wrong mean, a missing eps, or a weight applied before the norm: the backward pass would agree with the wrong forward.
@pytest.mark.parametrize("shape", ROWS)
def test_forward_is_the_formula(shape: tuple[int, int]) -> None:
    a = inputs(*shape)
    rstd = 1 / np.sqrt((a["inp"] ** 2).mean(axis=1) + EPS)
    got = run(a)
    assert_within("rstd", got["rstd"], rstd, 1e-13 * rstd.max())
    assert_within("out", got["out"], a["inp"] * rstd[:, None] * a["weight"], 1e-13 * np.abs(got["out"]).max())


# A dropped projection term, a factor of the width, or a row left out of dweight.
@pytest.mark.parametrize("shape", ROWS)
def test_gradient(shape: tuple[int, int]) -> None:
    assert_gradients(run, inputs(*shape), NORM, ("inp", "weight"))
    assert_gradients(run_residual, inputs(*shape), RESIDUAL, ("branch", "residual", "weight"))


# A constant or a sum held in the wrong precision. The terms of dinp, each of the size of rstd * g, may cancel.
@pytest.mark.parametrize("shape", ROWS)
def test_float32(shape: tuple[int, int]) -> None:
    a = inputs(*shape)
    largest = float(np.abs(a["dout"] * a["weight"]).max())
    for one in (run, run_residual):
        size = largest * float(one(a)["rstd"].max()) + float(np.abs(a["dresidual_out"]).max())
        assert_float32(one, a, max(shape), {"dinp": size, "dbranch": size, "dresidual": size})


# A race between groups of rows, or an order of summation that depends on the number of threads.
@pytest.mark.parametrize("one", [run, run_residual])
def test_same_bits_again_and_on_one_thread(one) -> None:  # type: ignore[no-untyped-def]
    assert_repeats(one, inputs(131, 65))


# Gradient accumulation would keep only the last micro-batch.
@pytest.mark.parametrize("one", [run, run_residual])
def test_weight_gradient_accumulates(one) -> None:  # type: ignore[no-untyped-def]
    assert_accumulates(one, inputs(17, 65), ("dweight",))


# model.py passes one array as dinp and dresidual_out: an element read after it was written would be wrong.
@pytest.mark.parametrize("one", [run, run_residual])
def test_aliasing(one) -> None:  # type: ignore[no-untyped-def]
    a = single(inputs(17, 65))
    assert_same_bits(one(a, alias=True), one(a))


# The fusion would be another function than its parts.
def test_residual_is_addition_then_norm() -> None:
    a = inputs(17, 65)
    fused, total = run_residual(a), a["residual"] + a["branch"]
    parts = run({**a, "inp": total})
    assert_within("residual_out", fused["residual_out"], total, 0)
    assert_within("out", fused["out"], parts["out"], 1e-13 * np.abs(parts["out"]).max())
    assert_within("dbranch", fused["dbranch"], parts["dinp"] + a["dresidual_out"], 1e-13 * np.abs(parts["dinp"]).max())


# A row of zeros, as an embedding's padding is, divided by its own norm.
def test_row_of_zeros_is_finite() -> None:
    a = single(inputs(2, 7))
    a["inp"][0] = 0
    got = run(a)
    assert all(np.isfinite(array).all() for array in got.values())
    assert not got["out"][0].any()
