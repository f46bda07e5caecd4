"""Launchers of attention_scalar.cu; the mathematics and the contracts are those of kernels.cpu.attention."""

from math import sqrt
from typing import Any

from kernels.cuda.device import Device
from kernels.cuda.launch import BF16, FLOAT, Array, Kernel

LARGEST_HEAD_DIM = 128
_ROUNDED = (32, 64, 96, 128)
_SCALAR = tuple((dtype, head_dim) for dtype in (FLOAT, BF16) for head_dim in _ROUNDED)
_SCALAR_FORWARD = Kernel("attention_scalar.cu", "attention_forward", _SCALAR)
_SCALAR_BACKWARD_QUERY = Kernel("attention_scalar.cu", "attention_backward_query", _SCALAR)
_SCALAR_BACKWARD_KEY = Kernel("attention_scalar.cu", "attention_backward_key", _SCALAR)
_SCALAR_TILE, _SCALAR_BLOCK = 32, 128
_DELTA = Kernel("attention_scalar.cu", "attention_delta", ((FLOAT, 1), (FLOAT, 4), (BF16, 1), (BF16, 8)))
_DELTA_BLOCK, _DELTA_LANES = 256, 8  # the block is not tuned


def attention_forward(device: Device, out: Array, lse: Array, qkv: Array, start: Array) -> None:
    """See kernels.cpu.attention.attention_forward.

    Head dims up to 128. Precision: fp32 arithmetic, one rounding to T at the store of out.
    Determinism: bitwise repeatable (no atomics).
    """
    batch, length, heads, head_dim = out.shape
    grid = (-(-length // _SCALAR_TILE), heads, batch)
    device.launch(
        _SCALAR_FORWARD,
        (qkv.dtype, _rounded(head_dim)),
        grid,
        _SCALAR_BLOCK,
        out=out,
        lse=lse,
        qkv=qkv,
        start=start,
        **_sizes(out, qkv),
    )


def attention_backward(device: Device, dqkv: Array, dout: Array, out: Array, lse: Array, qkv: Array, start: Array) -> None:
    """See kernels.cpu.attention.attention_backward. Kernels, precision and determinism are attention_forward's.

    Workspace: delta, (B, H, T) fp32.
    """
    batch, length, heads, head_dim = out.shape
    (delta,) = device.workspace(((batch, heads, length), FLOAT))
    rows, vector = batch * length * heads, 16 // out.dtype.itemsize
    device.launch(
        _DELTA, (out.dtype, vector if head_dim % vector == 0 else 1), -(-rows * _DELTA_LANES // _DELTA_BLOCK), _DELTA_BLOCK,
        delta=delta, dout=dout, out=out, rows=rows, length=length, heads=heads, head_dim=head_dim,
    )  # fmt: skip
    rounded, tiles = _rounded(head_dim), -(-length // _SCALAR_TILE)
    shared = 4 * (4 * _SCALAR_TILE * (rounded + 4) + _SCALAR_TILE * _SCALAR_TILE)  # four padded tiles, the weights
    given = {"dqkv": dqkv, "delta": delta, "dout": dout, "lse": lse, "qkv": qkv, "start": start, **_sizes(out, qkv)}
    for kernel, kernel_heads in ((_SCALAR_BACKWARD_QUERY, heads), (_SCALAR_BACKWARD_KEY, (qkv.shape[2] - heads) // 2)):
        device.launch(kernel, (qkv.dtype, rounded), (tiles, kernel_heads, batch), _SCALAR_BLOCK, shared_bytes=shared, **given)


def _rounded(head_dim: int) -> int:
    assert head_dim <= LARGEST_HEAD_DIM, f"attention: head dim {head_dim} is over {LARGEST_HEAD_DIM}"
    return next(size for size in _ROUNDED if head_dim <= size)


def _sizes(out: Array, qkv: Array) -> dict[str, Any]:
    _, length, heads, head_dim = out.shape
    kv_heads = (qkv.shape[2] - heads) // 2
    return {"length": length, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "scale": 1 / sqrt(head_dim)}
