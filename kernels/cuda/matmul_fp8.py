"""The products of a block's linear layer with factors of 8 bits, as training with numerics.precision fp8 makes them.

Forward and input gradient take the weight's cast, made once an update; activations and gradients are cast for each product, with
the scale of their own maximum, so that no state goes from one update to the next. cuBLASLt has FP8 products only where both sums
run along the factors' rows: hence the transposed copies.
"""

from typing import Any, NamedTuple

import numpy as np

from kernels.cuda import cublaslt
from kernels.cuda.device import Device
from kernels.cuda.fp8 import MULTIPLE, fp8
from kernels.cuda.launch import E4M3, E5M2, Array

# Whether tensor cores keep the running sum themselves, in fewer bits than fp32: faster alone, hardly so under load, and
# gradients have the longer sums.
_FAST_FORWARD, _FAST_BACKWARD = True, False
_RESERVED = (cublaslt.WORKSPACE_BYTES,), np.uint8  # the library's part of the workspace, which comes first


class Fp8Weight(NamedTuple):
    """A weight (outputs, inputs) as these products take it, and the scales () of all three factors.

    Args:
        inp: the weight itself, bf16.
        out, transposed: its cast, e4m3, and that transposed.
        scale, inp_scale, dout_scale: of the weight, of the last input, which forward leaves to backward, and gradient.
    """

    inp: Array
    out: Array
    transposed: Array
    scale: Array
    inp_scale: Array
    dout_scale: Array


def fp8_weight(device: Device, weight: Array, out: Array, transposed: Array, scales: Array) -> Fp8Weight:
    """The handle of a weight over memory for its casts, and for three scales; cast_weight fills it."""
    return Fp8Weight(weight, out, transposed, *(scales[i : i + 1].reshape(()) for i in range(3)))


def cast_weight(device: Device, weight: Fp8Weight) -> None:
    """Bring the casts up to the weight."""
    fp8(device, weight.out, weight.transposed, weight.scale, weight.inp, measure=True)


def fp8_forward(device: Device, out: Any, inp: Any, weight: Fp8Weight, bias: Any) -> None:
    """out, bf16, = inp @ weight^T (+ bias) of both factors' casts; sums in fp32 or a little less, one rounding."""
    _, cast = device.workspace(_RESERVED, (inp.shape, E4M3))
    fp8(device, cast, None, weight.inp_scale, inp, measure=True)
    epilogue = "" if bias is None else "bias"
    _multiply(device, out, cast, weight.out, (weight.inp_scale, weight.scale), False, _FAST_FORWARD, epilogue, bias)


def fp8_backward(device: Device, dinp: Any, dweight: Any, dout: Any, inp: Any, weight: Fp8Weight, add_dweight: bool) -> None:
    """matmul_backward of the factors' casts; inp is the input of the last fp8_forward with this weight."""
    rows = -(-len(inp) // MULTIPLE) * MULTIPLE
    _, cast, dout_t, inp_t = device.workspace(
        _RESERVED, (dout.shape, E5M2), ((dout.shape[1], rows), E5M2), ((inp.shape[1], rows), E4M3)
    )
    fp8(device, cast, dout_t, weight.dout_scale, dout, measure=True)
    fp8(device, None, inp_t, weight.inp_scale, inp, measure=False)
    _multiply(device, dweight, dout_t, inp_t, (weight.dout_scale, weight.inp_scale), add_dweight, _FAST_BACKWARD)
    _multiply(device, dinp, cast, weight.transposed, (weight.dout_scale, weight.scale), False, _FAST_BACKWARD)


def workspace_bytes(rows: int, outputs: int, inputs: int) -> int:
    """What these products need of the workspace."""
    return cublaslt.WORKSPACE_BYTES + (rows + MULTIPLE) * (2 * outputs + inputs) + 3 * 256


def _multiply(
    device: Device, out: Any, a: Any, b: Any, scales: tuple[Any, Any], accumulate: bool, fast: bool, epilogue: str = "",
    bias: Any = None,
) -> None:  # fmt: skip
    """out (+)= a @ b^T."""
    precision = "fp8 fast" if fast else "fp8"
    cublaslt.multiply(device, out, a, b, False, True, accumulate, precision, epilogue, bias, scales=scales)
