"""A linear layer and the GELU behind it; the mathematics and the contracts are those of kernels.cpu.matmul_gelu.

In bf16 cuBLASLt computes the GELU where it has the product's sums at hand, which spares a pass over (rows, F) each way.
"""

from typing import Any

from kernels.cuda import cublaslt, linear_rows
from kernels.cuda.device import Device
from kernels.cuda.gelu import gelu_backward, gelu_forward
from kernels.cuda.launch import BF16
from kernels.cuda.matmul import matmul_backward, matmul_forward, weight_gradient
from kernels.cuda.vectors import vector_size

_SIZE = 8  # elements that the library's rows are multiples of here


def matmul_gelu_forward(device: Device, act: Any, up: Any, inp: Any, weight: Any, bias: Any = None) -> None:
    """See kernels.cpu.matmul_gelu.matmul_gelu_forward.

    In bf16 the library makes both results of the fp32 sum: act is GELU's of up before it was rounded.
    """
    if _gelu_in_product(device, act, up, bias) and len(inp) > linear_rows.MOST_ROWS:
        epilogue = "gelu" if bias is None else "bias gelu"
        cublaslt.multiply(device, act, inp, weight, False, True, False, device.precision, epilogue, bias, up)
    else:
        matmul_forward(device, up, inp, weight, bias)
        gelu_forward(device, act, up)


def matmul_gelu_backward(
    device: Device, dup: Any, dweight: Any, dout: Any, act: Any, up: Any, weight: Any, *, add_dweight: bool = True
) -> None:
    """See kernels.cpu.matmul_gelu.matmul_gelu_backward. dweight is fp32, all else T; in bf16 the library rounds dup once."""
    if _gelu_in_product(device, dup, up, None):
        weight_gradient(device, dweight, dout, act, add_dweight)
        cublaslt.multiply(device, dup, dout, weight, False, False, False, device.precision, "gelu backward", None, up)
    else:
        matmul_backward(device, dup, dweight, dout, act, weight, add_dweight=add_dweight)
        gelu_backward(device, dup, dup, up)


def _gelu_in_product(device: Device, out: Any, up: Any, bias: Any) -> bool:
    """Whether the library computes GELU with the product: only in bf16, as its tanh is an approximation."""
    given = (out, up) if bias is None else (out, up, bias)
    return device.matmul == "cublaslt" and out.dtype == BF16 and vector_size(out.shape[1], *given) == _SIZE
