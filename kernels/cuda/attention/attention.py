"""Launchers of the attention kernels; mathematics and contracts: kernels/cpu/attention.py.

Which kernel runs follows from numerics.attention, the arrays' type and the head width:

    hopper   attention_hopper*.cu, on a Hopper GPU: bf16, head width 64 or 128
    mma      attention_mma*.cu, tensor cores: bf16, or fp32 with precision tf32; head width 32, 64, 96 or 128
    scalar   attention_scalar.cu: everything else, so precision fp32 is computed in fp32

A kernel that does not support the arrays falls back to the next.
"""

import math
from typing import Any, NamedTuple, cast

import numpy as np

from kernels.config import ModelConfig
from kernels.cuda.bias import bias_backward
from kernels.cuda.runtime.device import Device, Request, request_bytes
from kernels.cuda.runtime.launch import BF16, FLOAT, Array, Kernel, constants
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

# T, HEAD_DIM, ROW_TILES, and backward SUBTILE, IN_REGISTERS: the largest without spills; not tuned.
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
_HOPPER_CONSTANTS = {
    head_dim: constants("attention/attention_hopper_backward.cu", HEAD_DIM=head_dim) for head_dim in _HOPPER
}
_HOPPER_ROWS = _HOPPER_CONSTANTS[64]["KEY_TILE"]  # also the query rows of a forward work item
_HOPPER_BLOCK = 3 * _HOPPER_CONSTANTS[64]["WARPGROUP"]
_HOPPER_BARRIERS = 256  # bytes, enough for the mbarriers and the queue of work items
_HOPPER_L2_BYTES = 16 * 2**20  # of keys and values in use at a time; 8 and 32 MiB were no faster


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
        _launch_mma(device, _MMA_FORWARD, given, out, qkv, heads=heads)
    else:
        _launch_scalar(device, _SCALAR_FORWARD, given, out, qkv, heads=heads, shared_tiles=0)


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
    Scratch memory: scratch_bytes.
    """
    batch, length, heads, head_dim = out.shape
    kv_heads = (qkv.shape[2] - heads) // 2
    which = attention_kernel(device, qkv.dtype, head_dim)
    delta, *of_hopper = device.workspace(*_scratch(which, batch, length, heads, kv_heads, head_dim))
    rows, vector = batch * length * heads, 16 // out.dtype.itemsize
    device.launch(
        _DELTA, (out.dtype, vector if head_dim % vector == 0 else 1), -(-rows * _DELTA_LANES // _DELTA_BLOCK), _DELTA_BLOCK,
        delta=delta, dout=dout, out=out, rows=rows, length=length, heads=heads, head_dim=head_dim,
    )  # fmt: skip
    given = {"dqkv": dqkv, "delta": delta, "dout": dout, "lse": lse, "qkv": qkv, "start": start}
    if which == "hopper":
        _launch_hopper_backward(device, given, dbias, *of_hopper)
    elif which == "mma":
        _launch_mma(device, _MMA_BACKWARD_QUERY, given, out, qkv, heads=heads)
        _launch_mma(device, _MMA_BACKWARD_KEY, given, out, qkv, heads=kv_heads)
    else:
        _launch_scalar(device, _SCALAR_BACKWARD_QUERY, given, out, qkv, heads=heads, shared_tiles=4)
        _launch_scalar(device, _SCALAR_BACKWARD_KEY, given, out, qkv, heads=kv_heads, shared_tiles=4)
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


def scratch_bytes(device: Device, config: ModelConfig, rows: int) -> int:
    """What attention_backward needs, apart from bias_backward.

    Raises:
        ValueError: the heads are too wide.
    """
    c = config
    if c.head_dim > LARGEST_HEAD_DIM:
        raise ValueError(
            f"model.dim / model.heads: attention on the GPU takes heads of at most {LARGEST_HEAD_DIM}, got {c.head_dim}; "
            "set more model.heads, or runtime.device to cpu"
        )
    which = attention_kernel(device, device.storage, c.head_dim)
    return request_bytes(*_scratch(which, -(-rows // c.context), c.context, c.heads, c.kv_heads, c.head_dim))


def _scratch(
    which: str, batch: int, length: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[Request, ...]:
    """delta; for hopper also the fp32 sums of dq, the counters, and the partial sums of dbias."""
    delta = (batch, heads, length), FLOAT
    if which != "hopper":
        return (delta,)
    query_tiles = -(-length // _HOPPER_CONSTANTS[head_dim]["QUERY_TILE"])
    halves = batch, heads, query_tiles, 2  # one half of a query tile per consumer warpgroup
    dq_sum = (*halves, 64 * 64), FLOAT
    counters = (1 + math.prod(halves),), np.int32
    partial = (1, batch * -(-length // _HOPPER_ROWS) * 2, (heads + 2 * kv_heads) * head_dim), FLOAT
    return delta, dq_sum, counters, partial


def _launch_hopper_forward(device: Device, out: Array, lse: Array, qkv: Array, start: Array) -> None:
    """Persistent blocks, one per SM. Shared memory: q of two work tiles, out of one, and STAGES tiles of k and v."""
    batch, length, heads, head_dim = out.shape
    sizes, tile_bytes = _sizes(out, qkv), _HOPPER_ROWS * head_dim * BF16.itemsize
    pairs, one = batch * heads, 2 * length * head_dim * BF16.itemsize  # one head's keys and values
    section = min(pairs, max(1, _HOPPER_L2_BYTES // one) * (heads // sizes["kv_heads"]))
    device.launch(
        _HOPPER_FORWARD, _HOPPER[head_dim], min(device.sm_count, -(-length // _HOPPER_ROWS) * pairs), _HOPPER_BLOCK,
        shared_bytes=(3 + 2 * _HOPPER[head_dim][1]) * tile_bytes + _HOPPER_BARRIERS, out_map=device.heads_map(out),
        qkv_map=device.heads_map(qkv), lse=lse, start=start, counts=device.block_counters[:2], batch=batch, section=section,
        **sizes,
    )  # fmt: skip


def _launch_hopper_backward(
    device: Device, given: dict[str, Any], dbias: Array | None, dq_sum: Array, counts: Array, partial: Array
) -> None:
    """Persistent blocks. Shared memory: a tile of k and v, two of q, dout and ds, and dq's contributions and sums."""
    batch, length, _, head_dim = given["dout"].shape
    sizes = _sizes(given["dout"], given["qkv"])
    bytes_of = _HOPPER_CONSTANTS[head_dim]
    tiles = 2 * bytes_of["K_BYTES"] + 4 * bytes_of["Q_BYTES"] + 2 * bytes_of["DS_BYTES"]
    rows = 2 * (2 * FLOAT.itemsize + 1) * bytes_of["QUERY_TILE"]  # lse, delta and a mask byte, in two stages
    shared = tiles + 4 * bytes_of["DQ_BYTES"] + rows + _HOPPER_BARRIERS
    device.fill_zero(counts)
    maps = {f"{name}_map": device.heads_map(given[name]) for name in ("dqkv", "dout", "qkv")}
    arrays = {name: given[name] for name in ("dqkv", "delta", "lse", "start")}
    items = -(-length // _HOPPER_ROWS) * sizes["kv_heads"] * batch
    device.launch(
        _HOPPER_BACKWARD, (head_dim,), min(device.sm_count, items), _HOPPER_BLOCK, shared_bytes=shared, dq_sum=dq_sum,
        tile_counter=counts[:1], dq_semaphore=counts[1:], partial=None if dbias is None else partial, batch=batch,
        ordered=device.deterministic, **maps, **arrays, **sizes,
    )  # fmt: skip
    if dbias is not None:
        add_rows(device, partial, dbias)


def _launch_scalar(
    device: Device,
    kernel: Kernel,
    given: dict[str, Any],
    out: Array,
    qkv: Array,
    *,
    heads: int,
    shared_tiles: int,
) -> None:
    """Blocks own a tile of one head's rows; `shared_tiles` tiles and the attention weights are in shared memory."""
    batch, length, _, head_dim = out.shape
    assert head_dim <= LARGEST_HEAD_DIM, f"attention: head dim {head_dim} is over {LARGEST_HEAD_DIM}"
    rounded = next(size for size in _HEAD_DIMS if head_dim <= size)
    tile_floats = shared_tiles * (rounded + 4) + _SCALAR_TILE
    shared = FLOAT.itemsize * _SCALAR_TILE * tile_floats if shared_tiles else 0
    device.launch(
        kernel, (qkv.dtype, rounded), (-(-length // _SCALAR_TILE), heads, batch), _BLOCK, shared_bytes=shared,
        **given, **_sizes(out, qkv), head_dim=head_dim,
    )  # fmt: skip


class _MmaTiles(NamedTuple):
    """Shared memory of an mma kernel: tiles that a block owns, and per stage two tiles of the other side.

    row_words: bytes that are kept of each of the stage's rows beside the tiles (lse, delta and start).
    """

    owned: int
    row_words: int


_MMA_TILES = {
    _MMA_FORWARD: _MmaTiles(owned=1, row_words=0),
    _MMA_BACKWARD_QUERY: _MmaTiles(owned=2, row_words=0),
    _MMA_BACKWARD_KEY: _MmaTiles(owned=2, row_words=12),
}


def _launch_mma(
    device: Device, kernel: Kernel, given: dict[str, Any], out: Array, qkv: Array, *, heads: int
) -> None:
    """Blocks own a tile of one head's rows and go over tiles of the other side."""
    batch, length, _, head_dim = out.shape
    template = next(one for one in kernel.instances if one[:2] == (qkv.dtype, head_dim))
    rows, tiles = 64 * cast(int, template[2]), _MMA_TILES[kernel]
    sizes = constants(kernel.source, T=qkv.dtype.itemsize, HEAD_DIM=head_dim)
    stages = 2 if kernel is _MMA_FORWARD else sizes["BACKWARD_STAGES"]
    streamed = sizes["STREAMED_ROWS"]
    shared = (
        sizes["STRIDE"] * (tiles.owned * rows + 2 * stages * streamed) + stages * streamed * tiles.row_words
    )
    device.launch(
        kernel, template, (-(-length // rows), heads, batch), _BLOCK, shared_bytes=shared, **given, **_sizes(out, qkv)
    )  # fmt: skip


def _sizes(out: Array, qkv: Array) -> dict[str, Any]:
    _, length, heads, head_dim = out.shape
    return {
        "length": length,
        "heads": heads,
        "kv_heads": (qkv.shape[2] - heads) // 2,
        "scale": 1 / math.sqrt(head_dim),
    }
