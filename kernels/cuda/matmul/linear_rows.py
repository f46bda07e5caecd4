"""Launcher of linear_rows.cu: a linear layer of few rows, as decoding has them."""

from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import Array, Kernel, constants
from kernels.cuda.runtime.vectors import VECTOR_TEMPLATES, vector_size

MAX_ROWS = 4
_LINEAR = Kernel(
    "matmul/linear_rows.cu",
    "linear_rows",
    tuple((*t, rows) for t in VECTOR_TEMPLATES for rows in range(1, MAX_ROWS + 1)),
    dependent_launch=True,
)
_CONSTANTS = constants("matmul/linear_rows.cu")
_WARP, _WARPS, _VECS = (_CONSTANTS[name] for name in ("WARP", "WARPS", "VECS"))
_BLOCKS_PER_SM = 4  # more would not be resident at once


def linear_rows(device: Device, out: Array, inp: Array, weight: Array, bias: Array | None = None) -> None:
    """out (rows, outputs) = inp @ weight^T (+ bias), overwritten; all hold T.

    Precision: fp32 arithmetic, one rounding of the result. Determinism: a row's bits do not depend on how many rows there are.
    """
    outputs, inputs = weight.shape
    size = vector_size(inputs, weight, inp)
    splits = 1  # warps that share two outputs: so many that each has PARTS vectors a lane, if it can be
    while splits < _WARPS and splits * _VECS * _WARP * size < inputs:
        splits *= 2
    pairs, group = -(-outputs // 2), _WARPS // splits
    blocks = min(-(-pairs // group), _BLOCKS_PER_SM * device.sm_count)
    device.launch(
        _LINEAR, (weight.dtype, size, len(inp)), blocks, (_WARP, splits, group),
        out=out, inp=inp, weight=weight, bias=bias, pairs=pairs, outputs=outputs, inputs=inputs,
    )  # fmt: skip
