"""The matmul of every linear layer, by one of two backends (numerics.matmul).

    cublaslt  the library, see cublaslt.py. With tf32 it rounds the operands to 10 bits of mantissa.
    custom    matmul_mma.cu for bf16, on tensor cores. matmul_tiled.cu for fp32; it ignores tf32.

Both accumulate in fp32 and round once to the type of the result. Weights in FP8 go to matmul_fp8.py.
"""

from typing import Any

from kernels.config import ModelConfig
from kernels.cuda.bias import bias_forward
from kernels.cuda.matmul import cublaslt, linear_rows
from kernels.cuda.matmul.matmul_fp8 import Fp8Weight, fp8_backward, fp8_forward
from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import BF16, FLOAT, Kernel, constants
from kernels.cuda.runtime.vectors import vector_size

# Type of the result, and whether k is the contiguous extent of a, and of b. In this order: forward, input
# gradient, weight gradient, and Muon's Gram matrix in bf16.
_LAYOUTS = ((BF16, True, True), (BF16, True, False), (FLOAT, False, False), (BF16, False, False))
_MMA = Kernel(
    "matmul/matmul_mma.cu",
    "matmul_mma",
    tuple((*layout, wide) for layout in _LAYOUTS for wide in (True, False)),
)
_TILED = Kernel("matmul/matmul_tiled.cu", "matmul_tiled", tuple(layout[1:] for layout in _LAYOUTS[:3]))
_MMA_CONSTANTS, _TILED_CONSTANTS = constants("matmul/matmul_mma.cu"), constants("matmul/matmul_tiled.cu")
_TILE = _MMA_CONSTANTS["TILE"]
assert _TILED_CONSTANTS["TILE"] == _TILE
# Tiles of both operands, in stages.
_MMA_SHARED_BYTES = 2 * _MMA_CONSTANTS["STAGES"] * _TILE * _MMA_CONSTANTS["TILE_K"] * BF16.itemsize
_WIDE_BYTES = 16


def matmul_forward(device: Device, out: Any, inp: Any, weight: Any, bias: Any = None) -> None:
    """See kernels/cpu/matmul.py. All arrays hold T. The bias is added in fp32, before the one rounding.

    The custom backend rounds a second time before the bias. So does cublaslt if a row is not a multiple of 16
    bytes.
    """
    if isinstance(weight, Fp8Weight):
        fp8_forward(device, out, inp, weight, bias)
    elif len(inp) <= linear_rows.MAX_ROWS:  # decoding; with either backend
        linear_rows.linear_rows(device, out, inp, weight, bias)
    elif device.matmul == "cublaslt" and (bias is None or vector_size(out.shape[1], out, bias) > 1):
        epilogue = "" if bias is None else "bias"
        cublaslt.multiply(
            device,
            out,
            inp,
            weight,
            precision=device.precision,
            transpose_b=True,
            epilogue=epilogue,
            bias=bias,
        )
    else:
        multiply(device, out, inp, weight, transpose_b=True)
        if bias is not None:
            bias_forward(device, out, out, bias)


def matmul_backward(
    device: Device,
    dinp: Any,
    dweight: Any,
    dout: Any,
    inp: Any,
    weight: Any,
    *,
    add_dinp: bool = False,
    add_dweight: bool = True,
) -> None:
    """See kernels/cpu/matmul.py. dweight is fp32, the rest T. dinp is rounded once, even if accumulated."""
    if isinstance(weight, Fp8Weight):
        assert not add_dinp
        fp8_backward(device, dinp, dweight, dout, weight, accumulate=add_dweight)
        return
    weight_gradient(device, dweight, dout, inp, accumulate=add_dweight)
    multiply(device, dinp, dout, weight, accumulate=add_dinp)


def weight_gradient(device: Device, dweight: Any, dout: Any, inp: Any, *, accumulate: bool) -> None:
    """dweight (+)= dout^T @ inp, half of matmul_backward."""
    multiply(device, dweight, dout, inp, transpose_a=True, accumulate=accumulate)


def multiply(
    device: Device,
    out: Any,
    a: Any,
    b: Any,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    accumulate: bool = False,
) -> None:
    """out (m, n) (+)= op(a) @ op(b). 3-d arrays are a batch of such matmuls."""
    if device.matmul == "cublaslt":
        cublaslt.multiply(
            device, out, a, b, precision=device.precision, transpose_a=transpose_a, transpose_b=transpose_b,
            accumulate=accumulate,
        )  # fmt: skip
        return
    batch = zip(out, a, b, strict=True) if out.ndim == 3 else [(out, a, b)]
    for matrices in batch:
        multiply_custom(
            device, *matrices, transpose_a=transpose_a, transpose_b=transpose_b, accumulate=accumulate
        )


def multiply_custom(
    device: Device,
    out: Any,
    a: Any,
    b: Any,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    accumulate: bool = False,
) -> None:
    """out (m, n) (+)= op(a) @ op(b) with our own kernels. Few rows take as long as a whole tile."""
    (m, n), k = out.shape, a.shape[0 if transpose_a else 1]
    blocks = -(-m // _TILE) * -(-n // _TILE)
    given = {"out": out, "a": a, "b": b, "m": m, "n": n, "k": k, "accumulate": accumulate}
    if a.dtype == FLOAT:
        threads = _TILED_CONSTANTS["THREADS"]
        device.launch(_TILED, (not transpose_a, transpose_b), blocks, threads, **given)
        return
    # Whether operands can be copied 16 bytes at a time, and results stored in pairs.
    wide = all(
        array.shape[1] * BF16.itemsize % _WIDE_BYTES == 0 and array.data.ptr % _WIDE_BYTES == 0
        for array in (a, b)
    )
    wide = wide and n % 2 == 0 and out.data.ptr % (2 * out.dtype.itemsize) == 0
    template = (out.dtype, not transpose_a, transpose_b, wide)
    device.launch(_MMA, template, blocks, _MMA_CONSTANTS["THREADS"], shared_bytes=_MMA_SHARED_BYTES, **given)


def scratch_bytes(device: Device, config: ModelConfig, rows: int) -> int:
    """cuBLASLt's workspace."""
    return cublaslt.WORKSPACE_BYTES
