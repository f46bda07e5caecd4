"""A linear layer of few rows and its norm, activation, rotation or sum in one kernel, against the CPU's operations in turn."""

from typing import Any

import numpy as np
import pytest

from kernels.cpu.gelu import gelu_forward
from kernels.cpu.layernorm import layernorm_forward
from kernels.cpu.matmul import matmul_forward
from kernels.cpu.rmsnorm import rmsnorm_forward
from kernels.cpu.rope import rope_forward, rope_table
from kernels.cpu.swiglu import swiglu_forward
from tests.compare import Array, Arrays, assert_same_bits
from tests.cuda import STORAGES, Cpu, Gpu, Side, assert_calibrated_op

# (outputs, inputs), outputs a multiple of 12: rows of one warp, of several, of more than all of them hold at once, and odd ones.
SHAPES = ((12, 1), (36, 7), (24, 50), (132, 64), (96, 256), (264, 768), (24, 3072), (12, 4104), (12, 1031))
HEADS, ROTATED = 3, 2
# The norm's parameters, and what follows, of which the launchers make one launch.
LAUNCHED = [(0, "nothing"), (0, "add"), *((norm, then) for norm in (1, 2) for then in ("nothing", "gelu", "swiglu", "rope"))]


def run(side: Side, a: Arrays) -> Arrays:
    """What `a["then"]` names, behind the norm whose parameters there are."""
    then, (rows, inputs), outputs = str(a["then"]), a["inp"].shape, len(a["weight"])
    weight, bias = (side.stored(a[name]) for name in ("weight", "bias"))
    norm = [side.single(a[name]) for name in ("norm_weight", "norm_bias") if name in a]
    inp = (side.single if norm else side.stored)(a["inp"])
    start, half = side.same(-np.arange(rows, dtype=np.int32)[None]), outputs // HEADS // 2
    table = side.single(rope_table(2 * rows, 2 * half, 10000.0))
    width = outputs // 2 if then == "swiglu" else outputs
    out = side.single(a["before"]) if then == "add" else side.stored(np.full((rows, width), np.nan))
    if isinstance(side, Gpu):
        from kernels.cuda.linear_rows import linear_rows, norm_linear_rows, residual_linear_rows

        options: dict[str, Any] = {"activation": then} if then in ("gelu", "swiglu") else {}
        if then == "rope":
            options = {"rope": (start, table, ROTATED)}
        if then == "add":
            residual_linear_rows(side.device, out, inp, weight, bias)
        elif norm:
            norm_linear_rows(side.device, out, inp, norm, weight, bias, eps=1e-5, **options)
        else:
            linear_rows(side.device, out, inp, weight, bias)
        return {"out": out}
    normed, sums = (np.empty(shape, side.precision) for shape in ((rows, inputs), (rows, outputs)))
    mean, rstd = (np.empty(rows, side.precision) for _ in range(2))
    if len(norm) == 2:
        layernorm_forward(normed, mean, rstd, inp, norm[0], norm[1], eps=1e-5)
    elif norm:
        rmsnorm_forward(normed, rstd, inp, norm[0], eps=1e-5)
    matmul_forward(sums, normed if norm else inp, weight, bias)
    if then == "rope":
        rope_forward(sums.reshape(1, rows, HEADS, 2 * half), start, table, rotated=ROTATED)
    activation = {"gelu": gelu_forward, "swiglu": swiglu_forward}.get(then)
    if activation:
        side(activation, out, sums)
    else:
        side(np.add, sums, out if then == "add" else 0, out)
    return {"out": out}


def arrays_of(shape: tuple[int, int], rows: int, then: str, norm: int) -> Arrays:
    """Random inputs; `norm` is the number of its parameters."""
    (outputs, inputs), rng = shape, np.random.default_rng([*shape, rows, norm])
    sizes: dict[str, tuple[int, ...]] = {"inp": (rows, inputs), "weight": shape, "bias": (outputs,), "before": (rows, outputs)}
    sizes |= {name: (inputs,) for name in ("norm_weight", "norm_bias")[:norm]}
    arrays: dict[str, Array] = {name: rng.standard_normal(size) for name, size in sizes.items()}
    arrays["weight"] /= np.sqrt(inputs)
    return {**arrays, "inp": arrays["inp"] + 0.5, "then": np.array(then)}


# A part of the inputs left out or summed twice, an output of another warp, a norm of another row, gate and up exchanged, a pair
# turned by another position's angle, a bias or a sum left out.
@pytest.mark.gpu
@pytest.mark.parametrize("storage", STORAGES, ids=("fp32", "bf16"))
@pytest.mark.parametrize(("norm", "then"), LAUNCHED)
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_against_the_operations_in_turn(rows: int, norm: int, then: str, storage: np.dtype[Any]) -> None:
    for shape in SHAPES:
        if norm and shape[1] == 1:
            continue  # a layernorm of one element is zero, and its error relative to that infinite
        assert_calibrated_op(run, arrays_of(shape, rows, then, norm), storage, single=("out",) if then == "add" else ())


# A sum whose order depends on the other rows: a verified draft would differ from the token drawn without drafts.
@pytest.mark.gpu
@pytest.mark.parametrize("storage", STORAGES, ids=("fp32", "bf16"))
def test_bits_of_a_row_do_not_depend_on_the_others(storage: np.dtype[Any]) -> None:
    arrays = arrays_of((96, 776), 4, "gelu", 2)
    side = Gpu(storage)
    together = side.host(run(side, arrays)["out"])
    alone = [side.host(run(side, arrays | {"inp": arrays["inp"][i : i + 1]})["out"]) for i in range(4)]
    assert_same_bits({"out": np.concatenate(alone)}, {"out": together})


# The oracle itself, where there is no GPU: the operations in turn are the formula.
def test_oracle_is_the_formula() -> None:
    arrays = arrays_of((24, 50), 3, "gelu", 2)
    x = arrays["inp"] - arrays["inp"].mean(1, keepdims=True)
    normed = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5) * arrays["norm_weight"] + arrays["norm_bias"]
    s = normed @ arrays["weight"].T + arrays["bias"]
    expected = s / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (s + 0.044715 * s**3)))
    assert np.allclose(run(Cpu(np.float64, STORAGES[0]), arrays)["out"], expected, rtol=1e-5, atol=1e-5)
