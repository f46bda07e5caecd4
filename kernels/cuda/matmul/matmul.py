"""The product of every linear layer by one of two backends, `device.matmul`: cublaslt, or custom, the kernels written here.

    own       bf16 by matmul_mma.cu, on tensor cores; fp32 by matmul_tiled.cu. With tf32 it too multiplies fp32 as it is.
    cublaslt  see cublaslt.py. With fp32 it multiplies fp32 as it is, with tf32 the factors rounded to 10 bits.

Both sum in fp32 and round once to the type of the result. Of a weight that FP8 products take, see matmul_fp8.py.
"""

from typing import Any

from kernels.cuda.bias import bias_forward
from kernels.cuda.matmul import cublaslt, linear_rows
from kernels.cuda.matmul.matmul_fp8 import Fp8Weight, fp8_backward, fp8_forward
from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import BF16, FLOAT, Kernel
from kernels.cuda.runtime.vectors import vector_size

# (type of the result; whether the sum runs along the rows of a, of b; whether 16 bytes are copied at once): the three products,
# and Muon's of a matrix with itself, which it goes on with in bf16.
_LAYOUTS = ((BF16, True, True), (BF16, True, False), (FLOAT, False, False), (BF16, False, False))
_MMA = Kernel(
    "matmul/matmul_mma.cu",
    "matmul_mma",
    tuple((*layout, wide) for layout in _LAYOUTS for wide in (True, False)),
)
_TILED = Kernel("matmul/matmul_tiled.cu", "matmul_tiled", tuple(layout[1:] for layout in _LAYOUTS[:3]))
# The kernels' TILE and THREADS, and the bytes of _MMA's stages.
_TILE = 128
_MMA_THREADS, _MMA_SHARED_BYTES = 128, 65536
_TILED_THREADS = 256
_WIDE_BYTES = 16


def matmul_forward(device: Device, out: Any, inp: Any, weight: Any, bias: Any = None) -> None:
    """See kernels.cpu.matmul.matmul_forward. All arrays hold T; sums in fp32, the bias added before the one rounding.

    With our own matrix kernel, and where rows are no multiple of 16 bytes, there is a second rounding before the bias.
    """
    if isinstance(weight, Fp8Weight):
        fp8_forward(device, out, inp, weight, bias)
    elif len(inp) <= linear_rows.MOST_ROWS:  # whatever the backend
        linear_rows.linear_rows(device, out, inp, weight, bias)
    elif device.matmul == "cublaslt" and (bias is None or vector_size(out.shape[1], out, bias) > 1):
        epilogue = "" if bias is None else "bias"
        cublaslt.multiply(device, out, inp, weight, False, True, False, device.precision, epilogue, bias)
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
    """See kernels.cpu.matmul.matmul_backward. dweight is fp32, all else T; dinp is rounded once, also where it accumulates."""
    if isinstance(weight, Fp8Weight):
        assert not add_dinp
        fp8_backward(device, dinp, dweight, dout, weight, add_dweight)
        return
    weight_gradient(device, dweight, dout, inp, add_dweight)
    input_gradient(device, dinp, dout, weight, add_dinp)


def weight_gradient(device: Device, dweight: Any, dout: Any, inp: Any, add: bool) -> None:
    """dweight = dout^T @ inp, or += where `add`: matmul_backward's first half."""
    multiply(device, dweight, dout, inp, transpose_a=True, accumulate=add)


def input_gradient(device: Device, dinp: Any, dout: Any, weight: Any, add: bool) -> None:
    """dinp = dout @ weight, or += where `add`: its second half."""
    multiply(device, dinp, dout, weight, accumulate=add)


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
    """out (m, n) (+)= op(a) @ op(b); or, all three with one more extent in front, that many such products."""
    if device.matmul == "cublaslt":
        cublaslt.multiply(device, out, a, b, transpose_a, transpose_b, accumulate, device.precision)
    elif out.ndim == 3:
        for matrices in zip(out, a, b, strict=True):
            multiply_own(device, *matrices, transpose_a, transpose_b, accumulate)
    else:
        multiply_own(device, out, a, b, transpose_a, transpose_b, accumulate)


def multiply_own(
    device: Device,
    out: Any,
    a: Any,
    b: Any,
    transpose_a: bool = False,
    transpose_b: bool = False,
    accumulate: bool = False,
) -> None:
    """out (m, n) (+)= op(a) @ op(b) by our own kernel. Few rows take as long as a whole tile of them."""
    (m, n), k = out.shape, a.shape[0 if transpose_a else 1]
    blocks = -(-m // _TILE) * -(-n // _TILE)
    given = {"out": out, "a": a, "b": b, "m": m, "n": n, "k": k, "accumulate": accumulate}
    if a.dtype == FLOAT:
        device.launch(_TILED, (not transpose_a, transpose_b), blocks, _TILED_THREADS, **given)
        return
    wide = all(
        array.shape[1] * BF16.itemsize % _WIDE_BYTES == 0 and array.data.ptr % _WIDE_BYTES == 0
        for array in (a, b)
    )
    wide = wide and n % 2 == 0 and out.data.ptr % (2 * out.dtype.itemsize) == 0  # pairs are stored at once
    template = (out.dtype, not transpose_a, transpose_b, wide)
    device.launch(_MMA, template, blocks, _MMA_THREADS, shared_bytes=_MMA_SHARED_BYTES, **given)
