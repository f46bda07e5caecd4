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
    arrays = {name: normal(rng, rows, width) for name in names}
    return {**arrays, "weight": normal(rng, width), "branch_bias": normal(rng, width)}


def run(a: Arrays, before: float = 0.0, alias: bool = False) -> Arrays:
    """rmsnorm; with `alias`, dinp is dout's own array."""
    inp, weight, dout = a["inp"], a["weight"], a["dout"].copy()
    out, rstd, dinp = unwritten(inp), unwritten(inp, len(inp)), dout if alias else unwritten(inp)
    dweight = np.full_like(weight, before)
    rmsnorm_forward(out, rstd, inp, weight, eps=EPS)
    rmsnorm_backward(dinp, dweight, dout, inp, weight, rstd)
    return {"out": out, "rstd": rstd, "dinp": dinp, "dweight": dweight}


def run_residual(a: Arrays, before: float = 0.0, alias: bool = False) -> Arrays:
    """residual_rmsnorm; with `alias`, dinp is dresidual_out's own array. branch_bias and dresidual_out need
    not be there.
    """
    branch, weight, branch_bias = a["branch"], a["weight"], a.get("branch_bias")
    dresidual_out = a["dresidual_out"].copy() if "dresidual_out" in a else None
    dbranch_bias = None if branch_bias is None else np.full_like(branch_bias, before)
    residual_out, out, rstd = unwritten(branch), unwritten(branch), unwritten(branch, len(branch))
    dinp, dweight = (
        dresidual_out if alias and dresidual_out is not None else unwritten(branch),
        np.full_like(weight, before),
    )
    residual_rmsnorm_forward(residual_out, out, rstd, a["residual"], branch, branch_bias, weight, eps=EPS)
    residual_rmsnorm_backward(
        dinp, dweight, dbranch_bias, dresidual_out, a["dout"], residual_out, weight, rstd
    )
    saved = {"residual_out": residual_out, "out": out, "rstd": rstd}
    sums = (
        {"dweight": dweight} if dbranch_bias is None else {"dweight": dweight, "dbranch_bias": dbranch_bias}
    )
    return {**saved, "dbranch": dinp, "dresidual": dinp.copy(), **sums}


# A wrong mean, a missing eps, or a weight applied before the norm: the backward pass would agree with the
# wrong forward.
@pytest.mark.parametrize("shape", ROWS)
def test_forward_is_the_formula(shape: tuple[int, int]) -> None:
    a = inputs(*shape)
    rstd = 1 / np.sqrt((a["inp"] ** 2).mean(axis=1) + EPS)
    got = run(a)
    assert_within("rstd", got["rstd"], rstd, 1e-13 * rstd.max())
    assert_within("out", got["out"], a["inp"] * rstd[:, None] * a["weight"], 1e-13 * np.abs(got["out"]).max())


# A dropped projection term, a factor of the width, a row left out of a parameter's gradient, or a branch's
# bias that stays out of the norm.
@pytest.mark.parametrize("shape", ROWS)
def test_gradient(shape: tuple[int, int]) -> None:
    assert_gradients(run, inputs(*shape), NORM, ("inp", "weight"))
    assert_gradients(run_residual, inputs(*shape), RESIDUAL, ("branch", "branch_bias", "residual", "weight"))


# A constant or a sum held in the wrong precision. The terms of dinp, each of the size of rstd * g, may
# cancel.
@pytest.mark.parametrize("shape", ROWS)
def test_float32(shape: tuple[int, int]) -> None:
    a = inputs(*shape)
    largest = float(np.abs(a["dout"] * a["weight"]).max())
    for one in (run, run_residual):
        size = largest * float(one(a)["rstd"].max()) + float(np.abs(a["dresidual_out"]).max())
        scale = {"dinp": size, "dbranch": size, "dresidual": size, "dbranch_bias": size * len(a["inp"])}
        assert_float32(one, a, max(shape), scale)


# A race between groups of rows, or an order of summation that depends on the number of threads.
@pytest.mark.parametrize("one", [run, run_residual])
def test_same_bits_again_and_on_one_thread(one) -> None:  # type: ignore[no-untyped-def]
    assert_repeats(one, inputs(131, 65))


# Gradient accumulation would keep only the last micro-batch.
@pytest.mark.parametrize("one", [run, run_residual])
def test_parameter_gradients_accumulate(one) -> None:  # type: ignore[no-untyped-def]
    assert_accumulates(
        one, inputs(17, 65), ("dweight", "dbranch_bias") if one is run_residual else ("dweight",)
    )


# model.py passes one array as dinp and dresidual_out: an element read after it was written would be wrong.
@pytest.mark.parametrize("one", [run, run_residual])
def test_aliasing(one) -> None:  # type: ignore[no-untyped-def]
    a = single(inputs(17, 65))
    assert_same_bits(one(a, alias=True), one(a))


# The fusion would be another function than its parts, or take what is not given for something other than
# zero.
@pytest.mark.parametrize(
    "without", [(), ("branch_bias",), ("dresidual_out",), ("branch_bias", "dresidual_out")], ids=str
)
def test_residual_is_addition_then_norm(without: tuple[str, ...]) -> None:
    a = inputs(17, 65)
    fused = run_residual({name: array for name, array in a.items() if name not in without})
    a |= {name: np.zeros_like(a[name]) for name in without}
    total = a["residual"] + (a["branch"] + a["branch_bias"])
    parts = run({**a, "inp": total})
    dinp, scale = (
        parts["dinp"] + a["dresidual_out"],
        np.abs(parts["dinp"]).max() + np.abs(a["dresidual_out"]).max(),
    )
    assert_within("residual_out", fused["residual_out"], total, 0)
    assert_within("out", fused["out"], parts["out"], 1e-13 * np.abs(parts["out"]).max())
    assert_within("dbranch", fused["dbranch"], dinp, 1e-13 * scale)
    assert_within("dweight", fused["dweight"], parts["dweight"], 1e-13 * np.abs(parts["dweight"]).max())
    assert ("dbranch_bias" in fused) == ("branch_bias" not in without)
    if "dbranch_bias" in fused:
        assert_within("dbranch_bias", fused["dbranch_bias"], dinp.sum(axis=0), 1e-13 * len(dinp) * scale)


# A row of zeros, as an embedding's padding is, divided by its own norm.
def test_row_of_zeros_is_finite() -> None:
    a = single(inputs(2, 7))
    a["inp"][0] = 0
    got = run(a)
    assert all(np.isfinite(array).all() for array in got.values())
    assert not got["out"][0].any()
