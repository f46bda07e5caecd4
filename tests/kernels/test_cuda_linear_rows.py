"""A linear layer of few rows, which kernels.cuda.matmul takes for any backend, against the CPU's product."""

from typing import Any

import numpy as np
import pytest

from kernels.cpu.matmul import matmul_forward
from tests.compare import Array, Arrays, assert_same_bits
from tests.cuda import STORAGES, Gpu, Side, assert_calibrated_op

# (outputs, inputs): rows of one warp, of several, of more than all of them hold at once, and odd ones.
SHAPES = ((12, 1), (35, 7), (24, 50), (133, 64), (96, 256), (264, 768), (24, 3072), (12, 4104), (13, 1031))


def run(side: Side, a: Arrays) -> Arrays:
    """With a bias where there is one."""
    inp, weight = side.stored(a["inp"]), side.stored(a["weight"])
    bias = side.stored(a["bias"]) if "bias" in a else None
    out = side.stored(np.full((len(a["inp"]), len(a["weight"])), np.nan))
    if isinstance(side, Gpu):
        from kernels.cuda.matmul.linear_rows import linear_rows

        linear_rows(side.device, out, inp, weight, bias)
    else:
        side(matmul_forward, out, inp, weight, bias)
    return {"out": out}


def arrays_of(shape: tuple[int, int], rows: int, bias: bool) -> Arrays:
    """Random inputs."""
    (outputs, inputs), rng = shape, np.random.default_rng([*shape, rows])
    sizes: dict[str, tuple[int, ...]] = {
        "inp": (rows, inputs),
        "weight": shape,
        **({"bias": (outputs,)} if bias else {}),
    }
    arrays: dict[str, Array] = {name: rng.standard_normal(size) for name, size in sizes.items()}
    arrays["weight"] /= np.sqrt(inputs)
    return arrays


# A part of the inputs left out or summed twice, an output of another warp, a bias left out.
@pytest.mark.gpu
@pytest.mark.parametrize("storage", STORAGES, ids=("fp32", "bf16"))
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_against_the_product(rows: int, bias: bool, storage: np.dtype[Any]) -> None:
    for shape in SHAPES:
        assert_calibrated_op(run, arrays_of(shape, rows, bias), storage)


# A sum whose order depends on the other rows: a verified draft would differ from the token drawn without
# drafts.
@pytest.mark.gpu
@pytest.mark.parametrize("storage", STORAGES, ids=("fp32", "bf16"))
def test_bits_of_a_row_do_not_depend_on_the_others(storage: np.dtype[Any]) -> None:
    arrays, side = arrays_of((96, 776), 4, True), Gpu(storage)
    together = side.host(run(side, arrays)["out"])
    alone = [side.host(run(side, arrays | {"inp": arrays["inp"][i : i + 1]})["out"]) for i in range(4)]
    assert_same_bits({"out": np.concatenate(alone)}, {"out": together})
