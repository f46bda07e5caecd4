"""The matmuls of the blocks' linear layers with 8-bit operands, in training (numerics.precision: fp8).

The forward pass and the input gradient read casts of the weight, made once per update. Activations and
gradients are cast for each matmul. Their scales come from the amax values of the previous update (delayed
scaling). That saves a pass over each array. An engine's first update has no previous one:
`device.current_scaling` then uses the array's own amax. cuBLASLt needs k as the contiguous extent of both FP8
operands. So transposed casts are stored, too.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from kernels.config import ModelConfig
from kernels.cuda.bias import bias_backward
from kernels.cuda.gelu import gelu_backward, gelu_forward
from kernels.cuda.matmul import cublaslt
from kernels.cuda.matmul.fp8 import ROWS, fp8, fp8_gelu_backward, fp8_gelu_forward
from kernels.cuda.runtime.device import Device, Request, request_bytes
from kernels.cuda.runtime.launch import E4M3, FLOAT, Array
from kernels.cuda.sum_rows import add_rows
from kernels.fp8 import MULTIPLE, pitch

_CUBLASLT = (cublaslt.WORKSPACE_BYTES,), np.uint8  # the library's workspace comes first in scratch memory


class Fp8Weight(NamedTuple):
    """A linear layer's weight (outputs, inputs) in FP8, and what its matmuls need.

    Args:
        bf16: the weight itself.
        cast, transposed: its cast, and the transposed cast.
        saved_inp: bytes for the transposed cast of the input. The forward pass writes it for the backward
            pass.
        scale, inp_scale, dout_scale: () fp32, the scales of the casts of weight, input and output gradient.
        inp_amax, dout_amax: () int32, the bits of the amax of this update's inputs and gradients so far.
    """

    bf16: Array
    cast: Array
    transposed: Array
    saved_inp: Array
    scale: Array
    inp_scale: Array
    dout_scale: Array
    inp_amax: Array
    dout_amax: Array

    @property
    def size(self) -> int:
        """Elements of the weight."""
        return int(self.bf16.size)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and its casts."""
        return int(self.bf16.nbytes + self.cast.nbytes + self.transposed.nbytes)


def fp8_weight(device: Device, *arrays: Array, scales: Array, amax: Array) -> Fp8Weight:
    """An Fp8Weight from its four arrays, the first column of scales (3, 4), and amax (2,)."""
    return Fp8Weight(*arrays, *(scalar.reshape(()) for scalar in (*scales[:, :1], *amax.reshape(2, 1))))


def cast_weight(device: Device, weight: Fp8Weight) -> None:
    """Update the casts from the weight."""
    fp8(device, weight.cast, weight.transposed, weight.scale, None, weight.bf16, measure=True)


def fp8_forward(device: Device, out: Any, inp: Any, weight: Fp8Weight, bias: Any) -> None:
    """out = inp @ weight^T (+ bias), operands in FP8. out is bf16, rounded once."""
    _, cast = device.workspace(_CUBLASLT, (inp.shape, E4M3))
    saved, scale = _saved_inp(weight, len(inp)), weight.inp_scale
    fp8(device, cast, saved, scale, weight.inp_amax, inp, measure=device.current_scaling)
    _multiply(device, out, cast, weight.cast, (scale, weight.scale), bias=bias)


def fp8_backward(
    device: Device, dinp: Any, dweight: Any, dout: Any, weight: Fp8Weight, *, accumulate: bool
) -> None:
    """matmul_backward with FP8 operands. The input is that of the last fp8_forward with this weight."""
    cast, transposed, _ = _gradient_scratch(device, dout)
    fp8(device, cast, transposed, weight.dout_scale, weight.dout_amax, dout, measure=device.current_scaling)
    _multiply_gradient(device, dinp, dweight, cast, transposed, weight, accumulate=accumulate)


def fp8_mlp_forward(
    device: Device, out: Any, act: Any, up: Any, inp: Any, weight: Fp8Weight, bias: Any, down: Fp8Weight
) -> None:
    """matmul_gelu_forward and the next matmul, out = act @ down^T. act is cast without being stored.

    With current scaling, it is also stored.
    """
    fp8_forward(device, up, inp, weight, bias)
    _, cast = device.workspace(_CUBLASLT, (up.shape, E4M3))
    saved = _saved_inp(down, len(up))
    if device.current_scaling:
        gelu_forward(device, act, up)
        fp8(device, cast, saved, down.inp_scale, down.inp_amax, act, measure=True)
    else:
        fp8_gelu_forward(device, cast, saved, down.inp_scale, down.inp_amax, up)
    _multiply(device, out, cast, down.cast, (down.inp_scale, down.scale))


def fp8_mlp_backward(
    device: Device, dinp: Any, dup: Any, dweight: Any, dbias: Any, ddown: Any, dout: Any, up: Any,
    weight: Fp8Weight, down: Fp8Weight, *, add_dweight: bool,
) -> None:  # fmt: skip
    """The backward pass of fp8_mlp_forward. dbias accumulates. dweight and ddown are as in matmul_backward.

    With current scaling, dup gets the gradient of up. Otherwise it gets the gradient of act, and the gradient
    of up exists only as a cast.
    """
    fp8_backward(device, dup, ddown, dout, down, accumulate=add_dweight)  # dup holds the gradient of act
    if device.current_scaling:
        gelu_backward(device, dup, dup, up)
        if dbias is not None:
            bias_backward(device, dbias, dup)
        fp8_backward(device, dinp, dweight, dup, weight, accumulate=add_dweight)
        return
    cast, transposed, partial = _gradient_scratch(device, dup)
    fp8_gelu_backward(device, cast, transposed, weight.dout_scale, weight.dout_amax, partial, dup, up)
    if dbias is not None:
        add_rows(device, partial, dbias)
    _multiply_gradient(device, dinp, dweight, cast, transposed, weight, accumulate=add_dweight)


def _saved_inp(weight: Fp8Weight, rows: int) -> Any:
    """The transposed cast of an input with this many rows. Its rows are padded to a multiple of 16."""
    shape = weight.bf16.shape[1], pitch(rows)
    return weight.saved_inp[: math.prod(shape)].view(E4M3).reshape(shape)


def _multiply_gradient(
    device: Device,
    dinp: Any,
    dweight: Any,
    cast: Any,
    transposed: Any,
    weight: Fp8Weight,
    *,
    accumulate: bool,
) -> None:
    """Both matmuls of a gradient, from its casts."""
    saved, scales = _saved_inp(weight, len(cast)), (weight.dout_scale, weight.inp_scale)
    # The sum over all positions is the longest sum. So it is accumulated in fp32.
    cublaslt.multiply(
        device,
        dweight,
        transposed,
        saved,
        precision="fp8",
        transpose_b=True,
        accumulate=accumulate,
        scales=scales,
    )
    _multiply(device, dinp, cast, weight.transposed, (weight.dout_scale, weight.scale))


def _multiply(device: Device, out: Any, a: Any, b: Any, scales: tuple[Any, Any], bias: Any = None) -> None:
    """out = a @ b^T (+ bias), accumulated by the tensor cores with fewer bits than fp32."""
    epilogue = "" if bias is None else "bias"
    cublaslt.multiply(
        device, out, a, b, precision="fp8 fast", transpose_b=True, epilogue=epilogue, bias=bias, scales=scales
    )


def _gradient_requests(rows: int, outputs: int) -> tuple[Request, ...]:
    """The library's workspace, a gradient's cast, the transposed cast, and the sums over each tile's rows."""
    partial = (1, -(-rows // ROWS), outputs), FLOAT
    return _CUBLASLT, ((rows, outputs), E4M3), ((outputs, pitch(rows)), E4M3), partial


def _gradient_scratch(device: Device, dout: Any) -> list[Any]:
    return device.workspace(*_gradient_requests(*dout.shape))[1:]


def scratch_bytes(device: Device, config: ModelConfig, rows: int) -> int:
    """Scratch memory of the widest linear layer, forward or backward.

    Raises:
        ValueError: a width is not a multiple of 16.
    """
    if device.fp8 is None:
        return 0
    for width in {width for linear in config.linears.values() for width in linear}:
        if width % MULTIPLE:
            raise ValueError(
                f"numerics.precision: fp8 needs linear layers with widths that are multiples of {MULTIPLE} "
                f"(they follow from model.dim, ffn, heads and kv_heads), one is {width}; set it to bf16"
            )
    backward = (request_bytes(*_gradient_requests(rows, outputs)) for outputs, _ in config.linears.values())
    forward = (request_bytes(_CUBLASLT, ((rows, inputs), E4M3)) for _, inputs in config.linears.values())
    return max(*backward, *forward)
