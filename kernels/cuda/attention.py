"""Launchers of the attention kernels; the mathematics and the contracts are those of kernels.cpu.attention.

Which kernel: `device.attention` "mma" takes attention_mma.cu where the arrays are bf16 and the head dim is 32, 64, 96 or 128;
everything else, and all of "scalar", takes attention_scalar.cu. So fp32 and tf32 are computed in fp32.
"""

from math import sqrt
from typing import Any

from kernels.cuda.device import Device
from kernels.cuda.launch import BF16, FLOAT, Array, Kernel

LARGEST_HEAD_DIM = 128
_HEAD_DIMS = (32, 64, 96, 128)
_BLOCK = 128  # threads, of all but delta

_SCALAR = tuple((dtype, head_dim) for dtype in (FLOAT, BF16) for head_dim in _HEAD_DIMS)
_SCALAR_FORWARD = Kernel("attention_scalar.cu", "attention_forward", _SCALAR)
_SCALAR_BACKWARD_QUERY = Kernel("attention_scalar.cu", "attention_backward_query", _SCALAR)
_SCALAR_BACKWARD_KEY = Kernel("attention_scalar.cu", "attention_backward_key", _SCALAR)
_SCALAR_TILE = 32

_DELTA = Kernel("attention_scalar.cu", "attention_delta", ((FLOAT, 1), (FLOAT, 4), (BF16, 1), (BF16, 8)))
_DELTA_BLOCK, _DELTA_LANES = 256, 8  # the block is not tuned

# By head dim: HEAD_DIM, ROW_TILES, and backward UNIT, KEPT. Those of which no register is spilled; not tuned.
_FORWARD = {32: (32, 2), 64: (64, 2), 96: (96, 2), 128: (128, 2)}
_BACKWARD_QUERY = {32: (32, 2, 32, True), 64: (64, 2, 32, True), 96: (96, 1, 32, True), 128: (128, 1, 32, True)}
_BACKWARD_KEY = {32: (32, 2, 32, True), 64: (64, 1, 32, True), 96: (96, 1, 32, True), 128: (128, 1, 32, False)}
_MMA_FORWARD = Kernel("attention_mma.cu", "attention_forward", tuple(_FORWARD.values()))
_MMA_BACKWARD_QUERY = Kernel("attention_mma_backward.cu", "attention_backward_query", tuple(_BACKWARD_QUERY.values()))
_MMA_BACKWARD_KEY = Kernel("attention_mma_backward.cu", "attention_backward_key", tuple(_BACKWARD_KEY.values()))


def attention_forward(device: Device, out: Array, lse: Array, qkv: Array, start: Array) -> None:
    """See kernels.cpu.attention.attention_forward.

    Args:
        device: its `attention` is "scalar" or "mma", see above. The head dim is 128 at most.

    Precision: fp32 arithmetic, one rounding to T at the store of out; by mma the probabilities, too, are rounded to bf16.
    Determinism: bitwise repeatable (no atomics).
    """
    given = {"out": out, "lse": lse, "qkv": qkv, "start": start}
    heads, head_dim = out.shape[2:]
    if takes_tensor_cores(device, qkv.dtype, head_dim):
        _launch_mma(device, _MMA_FORWARD, _FORWARD[head_dim], heads, 1, 0, given, out, qkv)
    else:
        _launch_scalar(device, _SCALAR_FORWARD, heads, 0, given, out, qkv)


def attention_backward(device: Device, dqkv: Array, dout: Array, out: Array, lse: Array, qkv: Array, start: Array) -> None:
    """See kernels.cpu.attention.attention_backward; attention_forward says what holds for a device.

    Precision: fp32 arithmetic, one rounding to T at the stores; by mma p and ds, too, are rounded to bf16.
    Determinism: bitwise repeatable (no atomics; the price is 7 products instead of 5).
    Workspace: delta, (B, H, T) fp32.
    """
    batch, length, heads, head_dim = out.shape
    kv_heads = (qkv.shape[2] - heads) // 2
    (delta,) = device.workspace(((batch, heads, length), FLOAT))
    rows, vector = batch * length * heads, 16 // out.dtype.itemsize
    device.launch(
        _DELTA, (out.dtype, vector if head_dim % vector == 0 else 1), -(-rows * _DELTA_LANES // _DELTA_BLOCK), _DELTA_BLOCK,
        delta=delta, dout=dout, out=out, rows=rows, length=length, heads=heads, head_dim=head_dim,
    )  # fmt: skip
    given = {"dqkv": dqkv, "delta": delta, "dout": dout, "lse": lse, "qkv": qkv, "start": start}
    if takes_tensor_cores(device, qkv.dtype, head_dim):
        _launch_mma(device, _MMA_BACKWARD_QUERY, _BACKWARD_QUERY[head_dim], heads, 2, 0, given, out, qkv)
        _launch_mma(device, _MMA_BACKWARD_KEY, _BACKWARD_KEY[head_dim], kv_heads, 2, 12, given, out, qkv)
    else:
        _launch_scalar(device, _SCALAR_BACKWARD_QUERY, heads, 4, given, out, qkv)
        _launch_scalar(device, _SCALAR_BACKWARD_KEY, kv_heads, 4, given, out, qkv)


def takes_tensor_cores(device: Device, dtype: Any, head_dim: int) -> bool:
    """Whether arrays of this type and head width go to attention_mma.cu."""
    return device.attention == "mma" and dtype == BF16 and head_dim in _HEAD_DIMS


def _launch_scalar(device: Device, kernel: Kernel, heads: int, tiles: int, given: dict[str, Any], out: Array, qkv: Array) -> None:
    """Blocks own tiles of rows of `heads` heads; `tiles` of them, and the weights, are in asked-for shared memory."""
    batch, length, _, head_dim = out.shape
    assert head_dim <= LARGEST_HEAD_DIM, f"attention: head dim {head_dim} is over {LARGEST_HEAD_DIM}"
    rounded = next(size for size in _HEAD_DIMS if head_dim <= size)
    shared = 4 * _SCALAR_TILE * (tiles * (rounded + 4) + _SCALAR_TILE) if tiles else 0
    device.launch(
        kernel, (qkv.dtype, rounded), (-(-length // _SCALAR_TILE), heads, batch), _BLOCK, shared_bytes=shared,
        **given, **_sizes(out, qkv), head_dim=head_dim,
    )  # fmt: skip


def _launch_mma(
    device: Device, kernel: Kernel, template: tuple[int, ...], heads: int, own: int, word_bytes: int, given: dict[str, Any],
    out: Array, qkv: Array,
) -> None:  # fmt: skip
    """Blocks own rows of `heads` heads, `own` tiles of them; of the other side two tiles come in two stages.

    `word_bytes` are kept of each row of a stage besides.
    """
    batch, length, _, head_dim = out.shape
    rows, columns = 64 * template[1], 64 if head_dim <= 64 else 32  # columns: COLUMNS of attention_tile.cuh
    shared = 2 * (head_dim + 8) * (own * rows + 4 * columns) + 2 * columns * word_bytes
    device.launch(kernel, template, (-(-length // rows), heads, batch), _BLOCK, shared_bytes=shared, **given, **_sizes(out, qkv))


def _sizes(out: Array, qkv: Array) -> dict[str, Any]:
    _, length, heads, head_dim = out.shape
    return {"length": length, "heads": heads, "kv_heads": (qkv.shape[2] - heads) // 2, "scale": 1 / sqrt(head_dim)}
