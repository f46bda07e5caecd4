"""Launcher of linear_rows.cu: a linear layer with few rows, for decoding."""

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
_BLOCKS_PER_SM = 4  # an SM cannot hold more at once


def linear_rows(device: Device, out: Array, inp: Array, weight: Array, bias: Array | None = None) -> None:
    """out (rows, outputs) = inp @ weight^T (+ bias). All arrays hold T.

    Precision: fp32 arithmetic, one rounding of the result.
    Determinism: the bits of a row do not depend on the number of rows.
    """
    outputs, inputs = weight.shape
    size = vector_size(inputs, weight, inp)
    splits = 1  # warps that share two outputs, until each has at most VECS vectors per lane
    while splits < _WARPS and splits * _VECS * _WARP * size < inputs:
        splits *= 2
    pairs, group = -(-outputs // 2), _WARPS // splits
    blocks = min(-(-pairs // group), _BLOCKS_PER_SM * device.sm_count)
    device.launch(
        _LINEAR, (weight.dtype, size, len(inp)), blocks, (_WARP, splits, group),
        out=out, inp=inp, weight=weight, bias=bias, pairs=pairs, outputs=outputs, inputs=inputs,
    )  # fmt: skip
