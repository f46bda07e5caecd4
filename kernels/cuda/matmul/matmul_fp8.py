"""The products of a block's linear layer with factors of 8 bits, as training with numerics.precision fp8 makes them.

Forward and input gradient take the weight's cast, made once an update; activations and gradients are cast for each product. Their
scales are what the largest magnitudes of the update before ask for, which spares a pass over each array, and those of now in an
engine's first update, `device.measuring`. cuBLASLt has FP8 products only where both sums run along the factors' rows: hence the
transposed copies.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from kernels.cuda.bias import bias_backward
from kernels.cuda.gelu import gelu_backward, gelu_forward
from kernels.cuda.matmul import cublaslt
from kernels.cuda.matmul.fp8 import ROWS, fp8, fp8_gelu_backward, fp8_gelu_forward
from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import E4M3, FLOAT, Array
from kernels.cuda.sum_rows import add_rows
from kernels.fp8 import MULTIPLE, pitch

_RESERVED = (cublaslt.WORKSPACE_BYTES,), np.uint8  # the library's part of the workspace, which comes first


class Fp8Weight(NamedTuple):
    """A weight (outputs, inputs) as these products take it, and what goes with it.

    Args:
        wide: the weight itself, bf16.
        out, transposed: its cast and that transposed.
        saved: bytes for the transposed cast of an input, which forward leaves to backward.
        scale, inp_scale, dout_scale: () of the casts of weight, input and gradient.
        inp_most, dout_most: () the largest magnitudes of an update's inputs and gradients so far.
    """

    wide: Array
    out: Array
    transposed: Array
    saved: Array
    scale: Array
    inp_scale: Array
    dout_scale: Array
    inp_most: Array
    dout_most: Array

    @property
    def size(self) -> int:
        """Elements of the weight."""
        return int(self.wide.size)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and its casts."""
        return int(self.wide.nbytes + self.out.nbytes + self.transposed.nbytes)


def fp8_weight(device: Device, *arrays: Array, scales: Array, most: Array) -> Fp8Weight:
    """The handle of a weight over its first four arrays, three scales, (3, 4), and two magnitudes; cast_weight fills it."""
    return Fp8Weight(*arrays, *(one.reshape(()) for one in (*scales[:, :1], *most.reshape(2, 1))))


def cast_weight(device: Device, weight: Fp8Weight) -> None:
    """Bring the casts up to the weight."""
    fp8(device, weight.out, weight.transposed, weight.scale, None, weight.wide, measure=True)


def fp8_forward(device: Device, out: Any, inp: Any, weight: Fp8Weight, bias: Any) -> None:
    """out, bf16, = inp @ weight^T (+ bias) of both factors' casts; one rounding."""
    _, cast = device.workspace(_RESERVED, (inp.shape, E4M3))
    fp8(
        device,
        cast,
        _saved(weight, len(inp)),
        weight.inp_scale,
        weight.inp_most,
        inp,
        measure=device.measuring,
    )
    epilogue = "" if bias is None else "bias"
    _multiply(device, out, cast, weight.out, (weight.inp_scale, weight.scale), epilogue, bias)


def fp8_backward(
    device: Device, dinp: Any, dweight: Any, dout: Any, weight: Fp8Weight, add_dweight: bool
) -> None:
    """matmul_backward of the factors' casts; the input is that of the last fp8_forward with this weight."""
    cast, turned, _ = _of_gradient(device, dout)
    fp8(device, cast, turned, weight.dout_scale, weight.dout_most, dout, measure=device.measuring)
    _backward(device, dinp, dweight, cast, turned, weight, add_dweight)


def fp8_mlp_forward(
    device: Device, out: Any, act: Any, up: Any, inp: Any, weight: Fp8Weight, bias: Any, down: Fp8Weight
) -> None:
    """kernels.cpu.matmul_gelu.matmul_gelu_forward and the product behind it, out = act @ down^T, in which GELU is cast at once.

    act is written only while scales are measured.
    """
    fp8_forward(device, up, inp, weight, bias)
    _, cast = device.workspace(_RESERVED, (up.shape, E4M3))
    saved = _saved(down, len(up))
    if device.measuring:
        gelu_forward(device, act, up)
        fp8(device, cast, saved, down.inp_scale, down.inp_most, act, measure=True)
    else:
        fp8_gelu_forward(device, cast, saved, down.inp_scale, down.inp_most, up)
    _multiply(device, out, cast, down.out, (down.inp_scale, down.scale))


def fp8_mlp_backward(
    device: Device, dinp: Any, dup: Any, dweight: Any, dbias: Any, ddown: Any, dout: Any, up: Any, weight: Fp8Weight,
    down: Fp8Weight, *, add_dweight: bool,
) -> None:  # fmt: skip
    """Back through fp8_mlp_forward. dbias or None is accumulated, dweight and ddown as matmul_backward's.

    dup is overwritten, with act's gradient: its own is there only while scales are measured, else as a cast alone.
    """
    fp8_backward(device, dup, ddown, dout, down, add_dweight)  # what is in dup now is act's gradient
    if device.measuring:
        gelu_backward(device, dup, dup, up)
        if dbias is not None:
            bias_backward(device, dbias, dup)
        fp8_backward(device, dinp, dweight, dup, weight, add_dweight)
        return
    cast, turned, partial = _of_gradient(device, dup)
    fp8_gelu_backward(device, cast, turned, weight.dout_scale, weight.dout_most, partial, dup, up)
    if dbias is not None:
        add_rows(device, partial, dbias)
    _backward(device, dinp, dweight, cast, turned, weight, add_dweight)


def workspace_bytes(rows: int, outputs: int, inputs: int) -> int:
    """What these products need of the workspace."""
    return (
        cublaslt.WORKSPACE_BYTES
        + (rows + MULTIPLE) * max(2 * outputs, inputs)
        + 4 * outputs * (rows // ROWS + 1)
        + 4 * 256
    )


def _saved(weight: Fp8Weight, rows: int) -> Any:
    """The transposed cast of so many rows of input, in rows that are multiples of 16."""
    shape = weight.wide.shape[1], pitch(rows)
    return weight.saved[: math.prod(shape)].view(E4M3).reshape(shape)


def _of_gradient(device: Device, dout: Any) -> tuple[Any, Any, Any]:
    """Workspace for a gradient's cast, that transposed, and sums over its tiles' rows."""
    (rows, outputs), length = dout.shape, pitch(len(dout))
    parts = (dout.shape, E4M3), ((outputs, length), E4M3), ((1, -(-rows // ROWS), outputs), FLOAT)
    _, cast, turned, partial = device.workspace(_RESERVED, *parts)
    return cast, turned, partial


def _backward(
    device: Device, dinp: Any, dweight: Any, cast: Any, turned: Any, weight: Fp8Weight, add_dweight: bool
) -> None:
    """Both products of a gradient that is cast."""
    saved, scales = _saved(weight, len(cast)), (weight.dout_scale, weight.inp_scale)
    cublaslt.multiply(
        device, dweight, turned, saved, False, True, add_dweight, "fp8", scales=scales
    )  # in fp32, the longest
    _multiply(device, dinp, cast, weight.transposed, (weight.dout_scale, weight.scale))


def _multiply(
    device: Device, out: Any, a: Any, b: Any, scales: tuple[Any, Any], epilogue: str = "", bias: Any = None
) -> None:
    """out = a @ b^T, summed by tensor cores alone, which keep fewer bits than fp32."""
    cublaslt.multiply(device, out, a, b, False, True, False, "fp8 fast", epilogue, bias, scales=scales)
