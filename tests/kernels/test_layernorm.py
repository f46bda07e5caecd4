"""LayerNorm, alone and fused with the residual addition."""

import numpy as np
import pytest

from kernels.cpu.layernorm import (
    layernorm_backward,
    layernorm_forward,
    residual_layernorm_backward,
    residual_layernorm_forward,
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
    return {**arrays, **{name: normal(rng, width) for name in ("weight", "bias", "branch_bias")}}


def run(a: Arrays, before: float = 0.0, alias: bool = False) -> Arrays:
    """layernorm; with `alias`, dinp is dout's own array."""
    inp, weight, dout = a["inp"], a["weight"], a["dout"].copy()
    out, mean, rstd = unwritten(inp), unwritten(inp, len(inp)), unwritten(inp, len(inp))
    dinp, dweight, dbias = (
        dout if alias else unwritten(inp),
        np.full_like(weight, before),
        np.full_like(weight, before),
    )
    layernorm_forward(out, mean, rstd, inp, weight, a["bias"], eps=EPS)
    layernorm_backward(dinp, dweight, dbias, dout, inp, weight, mean, rstd)
    return {"out": out, "mean": mean, "rstd": rstd, "dinp": dinp, "dweight": dweight, "dbias": dbias}


def run_residual(a: Arrays, before: float = 0.0, alias: bool = False) -> Arrays:
    """residual_layernorm; with `alias`, dinp is dresidual_out's own array. branch_bias and dresidual_out need
    not be there.
    """
    branch, weight, branch_bias = a["branch"], a["weight"], a.get("branch_bias")
    dresidual_out = a["dresidual_out"].copy() if "dresidual_out" in a else None
    dbranch_bias = None if branch_bias is None else np.full_like(branch_bias, before)
    residual_out, out = unwritten(branch), unwritten(branch)
    mean, rstd = unwritten(branch, len(branch)), unwritten(branch, len(branch))
    dinp = dresidual_out if alias and dresidual_out is not None else unwritten(branch)
    dweight, dbias = np.full_like(weight, before), np.full_like(weight, before)
    residual_layernorm_forward(
        residual_out, out, mean, rstd, a["residual"], branch, branch_bias, weight, a["bias"], eps=EPS
    )
    residual_layernorm_backward(
        dinp, dweight, dbias, dbranch_bias, dresidual_out, a["dout"], residual_out, weight, mean, rstd
    )
    saved = {"residual_out": residual_out, "out": out, "mean": mean, "rstd": rstd}
    sums = {
        "dweight": dweight,
        "dbias": dbias,
        **({} if dbranch_bias is None else {"dbranch_bias": dbranch_bias}),
    }
    return {**saved, "dbranch": dinp, "dresidual": dinp.copy(), **sums}


# A variance of n - 1, a missing eps, or weight and bias in each other's place.
@pytest.mark.parametrize("shape", ROWS)
def test_forward_is_the_formula(shape: tuple[int, int]) -> None:
    a = inputs(*shape)
    mean, rstd = a["inp"].mean(axis=1), 1 / np.sqrt(a["inp"].var(axis=1) + EPS)
    out = (a["inp"] - mean[:, None]) * rstd[:, None] * a["weight"] + a["bias"]
    for name, expected in (("mean", mean), ("rstd", rstd), ("out", out)):
        assert_within(name, run(a)[name], expected, 1e-12 * max(1, rstd.max()))


# A dropped projection term, a factor of the width, a row left out of a parameter's gradient, or a branch's
# bias that stays out of the norm.
@pytest.mark.parametrize("shape", ROWS)
def test_gradient(shape: tuple[int, int]) -> None:
    assert_gradients(run, inputs(*shape), NORM, ("inp", "weight", "bias"))
    assert_gradients(
        run_residual, inputs(*shape), RESIDUAL, ("branch", "branch_bias", "residual", "weight", "bias")
    )


# A constant or a sum held in the wrong precision. The terms of dinp, each of the size of rstd * g, may
# cancel; the difference from the mean is relative to the input and multiplied by rstd.
@pytest.mark.parametrize("shape", ROWS)
def test_float32(shape: tuple[int, int]) -> None:
    a = inputs(*shape)
    g, inp = (
        float(np.abs(a["dout"] * a["weight"]).max()),
        float(np.abs(a["inp"]).max() + np.abs(a["branch"]).max()),
    )
    for one in (run, run_residual):
        rstd = float(one(a)["rstd"].max())
        dinp = g * rstd * max(1, rstd * inp) + float(np.abs(a["dresidual_out"]).max())
        scale = {
            "mean": inp,
            "dinp": dinp,
            "dbranch": dinp,
            "dresidual": dinp,
            "rstd": rstd * max(1, rstd * inp),
        }
        scale["dbranch_bias"] = dinp * len(a["inp"])
        assert_float32(one, a, max(shape), scale)


# A race between groups of rows, or an order of summation that depends on the number of threads.
@pytest.mark.parametrize("one", [run, run_residual])
def test_same_bits_again_and_on_one_thread(one) -> None:  # type: ignore[no-untyped-def]
    assert_repeats(one, inputs(131, 65))


# Gradient accumulation would keep only the last micro-batch.
@pytest.mark.parametrize("one", [run, run_residual])
def test_parameter_gradients_accumulate(one) -> None:  # type: ignore[no-untyped-def]
    assert_accumulates(
        one,
        inputs(17, 65),
        ("dweight", "dbias", "dbranch_bias") if one is run_residual else ("dweight", "dbias"),
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
    for name in ("dweight", "dbias"):
        assert_within(name, fused[name], parts[name], 1e-13 * np.abs(parts[name]).max())
    assert ("dbranch_bias" in fused) == ("branch_bias" not in without)
    if "dbranch_bias" in fused:
        assert_within("dbranch_bias", fused["dbranch_bias"], dinp.sum(axis=0), 1e-13 * len(dinp) * scale)


# A variance computed as mean(x^2) - mean(x)^2 loses all its digits in float32 when the mean is large.
def test_large_mean_keeps_the_variance() -> None:
    a = inputs(3, 64)
    a["inp"] += 4096
    # Adding 4096 to the input rounds it to 2^-11 of a unit; what float32 adds to that is the mean's own
    # rounding.
    a["inp"] = a["inp"].astype(np.float32).astype(np.float64)
    got, exact = run(single(a)), run(a)
    assert_within(
        "out", got["out"], exact["out"], 4096 * 2.0**-23 * np.abs(a["weight"]).max() * exact["rstd"].max()
    )


# One column: the variance is zero and only eps keeps the division finite.
def test_one_column() -> None:
    a = single(inputs(3, 1))
    got = run(a)
    assert all(np.isfinite(array).all() for array in got.values())
    np.testing.assert_array_equal(got["out"], np.broadcast_to(a["bias"], (3, 1)))
