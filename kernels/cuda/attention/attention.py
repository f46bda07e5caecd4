"""Launchers of the attention kernels; the mathematics and the contracts are those of kernels.cpu.attention.

Which kernel: `device.attention` "hopper" takes attention_hopper.cu on such a GPU where the arrays are bf16 and the head dim is 64
or 128. Otherwise it is as "mma": attention_mma.cu where the arrays are bf16, or fp32 and `device.precision` is "tf32", and the
head dim is 32, 64, 96 or 128. Everything else, and all of "scalar", takes attention_scalar.cu. So "fp32" is computed in fp32.
"""

from math import sqrt
from typing import Any, cast

import numpy as np

from kernels.cuda.bias import bias_backward
from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import BF16, FLOAT, Array, Kernel
from kernels.cuda.sum_rows import add_rows

LARGEST_HEAD_DIM = 128
_HEAD_DIMS = (32, 64, 96, 128)
_BLOCK = 128  # threads, of all but delta

_SCALAR = tuple((dtype, head_dim) for dtype in (FLOAT, BF16) for head_dim in _HEAD_DIMS)
_SCALAR_FORWARD = Kernel("attention/attention_scalar.cu", "attention_forward", _SCALAR)
_SCALAR_BACKWARD_QUERY = Kernel("attention/attention_scalar.cu", "attention_backward_query", _SCALAR)
_SCALAR_BACKWARD_KEY = Kernel("attention/attention_scalar.cu", "attention_backward_key", _SCALAR)
_SCALAR_TILE = 32

_DELTA = Kernel(
    "attention/attention_scalar.cu", "attention_delta", ((FLOAT, 1), (FLOAT, 4), (BF16, 1), (BF16, 8))
)
_DELTA_BLOCK, _DELTA_LANES = 256, 8  # the block is not tuned

# T, HEAD_DIM, ROW_TILES, and backward SUBTILE, IN_REGISTERS. Those of which no register is spilled; not tuned.
_FORWARD = (
    (BF16, 32, 2), (BF16, 64, 2), (BF16, 96, 2), (BF16, 128, 2),
    (FLOAT, 32, 2), (FLOAT, 64, 2), (FLOAT, 96, 1), (FLOAT, 128, 1),
)  # fmt: skip
_BACKWARD_QUERY = (
    (BF16, 32, 2, 32, True), (BF16, 64, 2, 32, True), (BF16, 96, 1, 32, True), (BF16, 128, 1, 32, True),
    (FLOAT, 32, 2, 32, True), (FLOAT, 64, 1, 32, True), (FLOAT, 96, 1, 16, True), (FLOAT, 128, 1, 16, True),
)  # fmt: skip
_BACKWARD_KEY = (
    (BF16, 32, 2, 32, True), (BF16, 64, 1, 32, True), (BF16, 96, 1, 32, True), (BF16, 128, 1, 32, False),
    (FLOAT, 32, 2, 32, True), (FLOAT, 64, 1, 32, True), (FLOAT, 96, 1, 16, True), (FLOAT, 128, 1, 16, False),
)  # fmt: skip
_MMA_FORWARD = Kernel("attention/attention_mma.cu", "attention_forward", _FORWARD)
_MMA_BACKWARD_QUERY = Kernel(
    "attention/attention_mma_backward.cu", "attention_backward_query", _BACKWARD_QUERY
)
_MMA_BACKWARD_KEY = Kernel("attention/attention_mma_backward.cu", "attention_backward_key", _BACKWARD_KEY)

# By head dim: HEAD_DIM, and forward STAGES: at 64 3 and 2 were slower (NOTES.md, 2026-11-30), at 128 no more fit.
_HOPPER = {64: (64, 4), 128: (128, 2)}
_HOPPER_FORWARD = Kernel(
    "attention/attention_hopper.cu", "attention_forward", tuple(_HOPPER.values()), hopper=True
)
_HOPPER_BACKWARD = Kernel(
    "attention/attention_hopper_backward.cu", "attention_backward", tuple((d,) for d in _HOPPER), hopper=True
)
_HOPPER_ROWS, _HOPPER_BLOCK = 128, 3 * 128  # KEY_TILE, also the forward pass's QUERY_TILE; three warpgroups
_HOPPER_BARRIERS = 256  # bytes, enough for mbarriers and work tiles
_HOPPER_L2_BYTES = 16 * 2**20  # K and V of a scheduling section; 8 and 32 MiB were no faster (NOTES.md, 2026-11-30)


def attention_forward(device: Device, out: Array, lse: Array, qkv: Array, start: Array) -> None:
    """See kernels.cpu.attention.attention_forward.

    Args:
        device: its `attention` is "hopper", "mma" or "scalar", and its `precision` says how fp32 is multiplied, see above. The
            head dim is 128 at most.

    Precision: fp32 arithmetic, one rounding to T at the store of out; on tensor cores p, too, is rounded to bf16, or q, k, v
        and p to tf32, as factors.
    Determinism: bitwise repeatable (no atomics; hopper's decide only which block does what).
    """
    given = {"out": out, "lse": lse, "qkv": qkv, "start": start}
    heads, head_dim = out.shape[2:]
    which = attention_kernel(device, qkv.dtype, head_dim)
    if which == "hopper":
        _launch_hopper_forward(device, out, lse, qkv, start)
    elif which == "mma":
        _launch_mma(device, _MMA_FORWARD, heads, 1, 2, 0, given, out, qkv)
    else:
        _launch_scalar(device, _SCALAR_FORWARD, heads, 0, given, out, qkv)


def attention_backward(
    device: Device,
    dqkv: Array,
    dout: Array,
    out: Array,
    lse: Array,
    qkv: Array,
    start: Array,
    dbias: Array | None = None,
) -> None:
    """See kernels.cpu.attention.attention_backward; attention_forward says what holds for a device.

    Precision: fp32 arithmetic, one rounding to T at the stores; on tensor cores p and ds, too, are rounded to bf16, or these,
        q, k, v and dout to tf32, as factors; delta is computed from dout as it is. dbias is fp32, of dqkv as it is stored; by
        hopper, which does not read dqkv again for it, of dq before that is rounded.
    Determinism: bitwise repeatable (hopper: blocks add to dq in a fixed order, unless numerics.deterministic is false; else 7
        products instead of 5, and no atomics).
    Workspace: attention_workspace_bytes.
    """
    batch, length, heads, head_dim = out.shape
    kv_heads = (qkv.shape[2] - heads) // 2
    which = attention_kernel(device, qkv.dtype, head_dim)
    delta, *of_hopper = device.workspace(*_workspace(which, batch, length, heads, kv_heads, head_dim))
    rows, vector = batch * length * heads, 16 // out.dtype.itemsize
    device.launch(
        _DELTA, (out.dtype, vector if head_dim % vector == 0 else 1), -(-rows * _DELTA_LANES // _DELTA_BLOCK), _DELTA_BLOCK,
        delta=delta, dout=dout, out=out, rows=rows, length=length, heads=heads, head_dim=head_dim,
    )  # fmt: skip
    given = {"dqkv": dqkv, "delta": delta, "dout": dout, "lse": lse, "qkv": qkv, "start": start}
    if which == "hopper":
        _launch_hopper_backward(device, given, dbias, *of_hopper)
    elif which == "mma":
        stages = 2 if head_dim * qkv.dtype.itemsize <= 384 else 1  # BACKWARD_STAGES of attention_tile.cuh
        _launch_mma(device, _MMA_BACKWARD_QUERY, heads, 2, stages, 0, given, out, qkv)
        _launch_mma(device, _MMA_BACKWARD_KEY, kv_heads, 2, stages, 12, given, out, qkv)
    else:
        _launch_scalar(device, _SCALAR_BACKWARD_QUERY, heads, 4, given, out, qkv)
        _launch_scalar(device, _SCALAR_BACKWARD_KEY, kv_heads, 4, given, out, qkv)
    if dbias is not None and which != "hopper":
        bias_backward(device, dbias, dqkv.reshape(batch * length, -1))


def attention_kernel(device: Device, dtype: Any, head_dim: int) -> str:
    """Which kernels take arrays of this type and head width: "hopper", "mma" or "scalar"."""
    if device.attention == "scalar" or head_dim not in _HEAD_DIMS:
        return "scalar"
    if dtype == FLOAT:
        return "mma" if device.precision == "tf32" else "scalar"
    return (
        "hopper" if device.attention == "hopper" and device.arch == "sm_90" and head_dim in _HOPPER else "mma"
    )


def attention_workspace_bytes(
    device: Device, dtype: Any, batch: int, length: int, heads: int, kv_heads: int, head_dim: int
) -> int:
    """Workspace of attention_backward, without bias_backward's: delta; hopper adds fp32 sums of dq and semaphores."""
    parts = _workspace(attention_kernel(device, dtype, head_dim), batch, length, heads, kv_heads, head_dim)
    return sum(int(np.prod(shape)) * np.dtype(dtype).itemsize + 256 for shape, dtype in parts)


def _workspace(
    which: str, batch: int, length: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[tuple[tuple[int, ...], Any], ...]:
    """Shapes and dtypes: delta; for hopper also dq_sum, tile_counter with dq_semaphore, and dbias's partial sums."""
    delta = (batch, heads, length), FLOAT
    if which != "hopper":
        return (delta,)
    parts = batch, heads, -(-length // _backward_queries(head_dim)), 2  # two warpgroups' of each tile
    partial = (
        1,
        batch * -(-length // _HOPPER_ROWS) * 2,
        (heads + 2 * kv_heads) * head_dim,
    )  # two rows a tile of keys
    return delta, ((*parts, 64 * 64), FLOAT), ((1 + int(np.prod(parts)),), np.int32), (partial, FLOAT)


def _backward_queries(head_dim: int) -> int:
    """QUERY_TILE of attention_hopper_backward.cuh."""
    return 128 if head_dim == 64 else 64


def _launch_hopper_forward(device: Device, out: Array, lse: Array, qkv: Array, start: Array) -> None:
    """Persistent blocks, one per SM. Shared memory: q of two work tiles, out of one, and STAGES tiles of k and v."""
    batch, length, heads, head_dim = out.shape
    sizes, tile_bytes = _sizes(out, qkv), _HOPPER_ROWS * head_dim * BF16.itemsize
    pairs, one = batch * heads, 2 * length * head_dim * BF16.itemsize  # one head's keys and values
    section = min(pairs, max(1, _HOPPER_L2_BYTES // one) * (heads // sizes["kv_heads"]))
    device.launch(
        _HOPPER_FORWARD, _HOPPER[head_dim], min(device.processors, -(-length // _HOPPER_ROWS) * pairs), _HOPPER_BLOCK,
        shared_bytes=(3 + 2 * _HOPPER[head_dim][1]) * tile_bytes + _HOPPER_BARRIERS, out_map=device.heads_map(out),
        qkv_map=device.heads_map(qkv), lse=lse, start=start, counts=device.finished[:2], batch=batch, section=section,
        **sizes,
    )  # fmt: skip


def _launch_hopper_backward(
    device: Device, given: dict[str, Any], dbias: Array | None, dq_sum: Array, counts: Array, partial: Array
) -> None:
    """Persistent blocks. Shared memory: a tile of k and v, two of q, dout and ds, and dq's contributions and sums."""
    batch, length, _, head_dim = given["dout"].shape
    sizes, queries = _sizes(given["dout"], given["qkv"]), _backward_queries(head_dim)
    tiles = 2 * _HOPPER_ROWS * (head_dim + queries) + 4 * queries * head_dim  # elements, of bf16
    rows = 2 * (2 * FLOAT.itemsize + 1) * queries  # lse, delta and a byte each
    shared = tiles * BF16.itemsize + 4 * 64 * 64 * FLOAT.itemsize + rows + _HOPPER_BARRIERS
    device.fill_zero(counts)
    maps = {f"{name}_map": device.heads_map(given[name]) for name in ("dqkv", "dout", "qkv")}
    arrays = {name: given[name] for name in ("dqkv", "delta", "lse", "start")}
    items = -(-length // _HOPPER_ROWS) * sizes["kv_heads"] * batch
    device.launch(
        _HOPPER_BACKWARD, (head_dim,), min(device.processors, items), _HOPPER_BLOCK, shared_bytes=shared, dq_sum=dq_sum,
        tile_counter=counts[:1], dq_semaphore=counts[1:], partial=None if dbias is None else partial, batch=batch,
        ordered=device.deterministic, **maps, **arrays, **sizes,
    )  # fmt: skip
    if dbias is not None:
        add_rows(device, partial, dbias)


def _launch_scalar(
    device: Device, kernel: Kernel, heads: int, tiles: int, given: dict[str, Any], out: Array, qkv: Array
) -> None:
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
    device: Device, kernel: Kernel, heads: int, own: int, stages: int, word_bytes: int, given: dict[str, Any], out: Array,
    qkv: Array,
) -> None:  # fmt: skip
    """Blocks own rows of `heads` heads, `own` tiles of them; of the other side two tiles come in each of `stages`.

    `word_bytes` are kept of each row of a stage besides.
    """
    batch, length, _, head_dim = out.shape
    template = next(one for one in kernel.instances if one[:2] == (qkv.dtype, head_dim))
    rows, row_bytes = 64 * cast(int, template[2]), head_dim * qkv.dtype.itemsize
    columns = 64 if row_bytes <= 128 else 32 if row_bytes <= 256 else 16  # STREAMED_ROWS of attention_tile.cuh
    shared = (row_bytes + 16) * (own * rows + 2 * stages * columns) + stages * columns * word_bytes
    device.launch(
        kernel,
        template,
        (-(-length // rows), heads, batch),
        _BLOCK,
        shared_bytes=shared,
        **given,
        **_sizes(out, qkv),
    )


def _sizes(out: Array, qkv: Array) -> dict[str, Any]:
    _, length, heads, head_dim = out.shape
    return {
        "length": length,
        "heads": heads,
        "kv_heads": (qkv.shape[2] - heads) // 2,
        "scale": 1 / sqrt(head_dim),
    }
