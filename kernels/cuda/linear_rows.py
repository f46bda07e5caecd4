"""Launchers of linear_rows.cu: a linear layer of few rows, as decoding has them, alone or with the norm before and what follows.

    linear_rows                out = inp @ weight^T (+ bias)
    residual_linear_rows       stream += inp @ weight^T (+ bias)
    norm_linear_rows           out = norm(stream) @ weight^T (+ bias), then GELU, SwiGLU, RoPE or nothing

`norm` is (weight, bias) of a LayerNorm or (weight,) of an RMSNorm. It and the stream are fp32, all else holds T. Precision: fp32
arithmetic, one rounding of the result; norm and product are not rounded in between. Determinism: a row's bits do not depend on
how many rows there are.
"""

from collections.abc import Sequence
from typing import Any

from kernels.cuda.device import Device
from kernels.cuda.launch import Array, Kernel
from kernels.cuda.vectors import VECTOR_TEMPLATES, vector_size

MOST_ROWS = 4
_LINEAR = Kernel(
    "linear_rows.cu", "linear_rows", tuple((*t, rows) for t in VECTOR_TEMPLATES for rows in range(1, MOST_ROWS + 1)), early=True
)
_WARP, _WARPS, _PARTS = 32, 4, 4  # the kernel's
_BLOCKS_A_PROCESSOR = 4  # more would not be resident at once
_STORE, _GELU, _ADD, _SWIGLU, _ROPE = range(5)  # the kernel's Then


def linear_rows(device: Device, out: Array, inp: Array, weight: Array, bias: Array | None = None) -> None:
    """out (rows, outputs) = inp @ weight^T (+ bias), overwritten."""
    _launch(device, out, None, inp, weight, bias, _STORE)


def residual_linear_rows(device: Device, stream: Array, inp: Array, weight: Array, bias: Array | None = None) -> None:
    """stream (rows, outputs) += inp @ weight^T (+ bias): a sublayer's last product and the Euler step with it."""
    _launch(device, None, stream, inp, weight, bias, _ADD)


def norm_linear_rows(
    device: Device,
    out: Array,
    stream: Array,
    norm: Sequence[Array],
    weight: Array,
    bias: Array | None = None,
    *,
    eps: float,
    activation: str | None = None,
    rope: tuple[Array, Array, int] | None = None,
) -> None:
    """out = f(norm(stream) @ weight^T (+ bias)), overwritten.

    Args:
        out: (rows, outputs); (rows, outputs / 2) with SwiGLU.
        stream: (rows, inputs).
        norm: its parameters, see above.
        activation: f: "gelu", or "swiglu" of the gates' and the other half's outputs; None for none.
        rope: start (B, T) and table as of rope_forward, and how many heads, the first ones, are turned; outputs are then heads.
    """
    distance, then = 1, _GELU if activation == "gelu" else _STORE
    start, table, rotated = rope or (None, None, 0)
    if activation == "swiglu":
        distance, then = out.shape[1], _SWIGLU
    elif rope:
        distance, then = rope[1].shape[2], _ROPE
    _launch(
        device, out, stream, None, weight, bias, then,
        distance=distance, norm=norm, eps=eps, start=start, table=table, rotated=rotated,
    )  # fmt: skip


def _launch(
    device: Device, out: Array | None, stream: Array | None, inp: Array | None, weight: Array, bias: Array | None, then: int, *,
    distance: int = 1, norm: Sequence[Array] = (), eps: float = 0.0, start: Array | None = None, table: Array | None = None,
    rotated: int = 0,
) -> None:  # fmt: skip
    (outputs, inputs), read = weight.shape, stream if inp is None else inp
    assert read is not None
    norm_weight, norm_bias = (*norm, None, None)[:2]
    size = vector_size(inputs, weight, inp, stream if norm else None, norm_weight, norm_bias)
    splits = 1  # warps that share two outputs: so many that each has PARTS vectors a lane, if it can be
    while splits < _WARPS and splits * _PARTS * _WARP * size < inputs:
        splits *= 2
    pairs = -(-outputs // (2 * distance)) * distance
    arguments: dict[str, Any] = {
        "out": out, "stream": stream, "inp": inp, "norm_weight": norm_weight, "norm_bias": norm_bias, "weight": weight,
        "bias": bias, "start": start, "table": table, "pairs": pairs, "outputs": outputs, "inputs": inputs, "distance": distance,
        "then": then, "length": 1 if start is None else start.shape[1], "rotated": rotated, "eps": eps,
    }  # fmt: skip
    group = _WARPS // splits
    blocks = min(-(-pairs // group), _BLOCKS_A_PROCESSOR * device.processors)
    device.launch(_LINEAR, (weight.dtype, size, len(read)), blocks, (_WARP, splits, group), **arguments)
