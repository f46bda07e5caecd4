"""Launchers of the attention kernels. Mathematics and contracts: kernels/cpu/attention.py.

numerics.attention, the arrays' type and the head dim select the kernels:

    hopper   attention_hopper*.cu: Hopper GPUs, bf16, head dim 64 or 128
    mma      attention_mma*.cu, tensor cores: bf16, or fp32 with precision tf32; head dim 32, 64, 96 or 128
    scalar   attention_scalar.cu: everything else, so precision fp32 is computed in fp32

If a kernel does not support the arrays, the next one in this list runs.
"""

import math
from typing import Any, NamedTuple, cast

import numpy as np

from kernels.config import ModelConfig
from kernels.cuda.bias import bias_backward
from kernels.cuda.runtime.device import Device, Request, request_bytes
from kernels.cuda.runtime.launch import BF16, FLOAT, Array, Kernel, constants
from kernels.cuda.sum_rows import add_rows

MAX_HEAD_DIM = 128
_HEAD_DIMS = (32, 64, 96, 128)
_BLOCK = 128  # threads of the mma and scalar kernels, except delta

_SCALAR = tuple((dtype, head_dim) for dtype in (FLOAT, BF16) for head_dim in _HEAD_DIMS)
_SCALAR_FORWARD = Kernel("attention/attention_scalar.cu", "attention_forward", _SCALAR)
_SCALAR_BACKWARD_QUERY = Kernel("attention/attention_scalar.cu", "attention_backward_query", _SCALAR)
_SCALAR_BACKWARD_KEY = Kernel("attention/attention_scalar.cu", "attention_backward_key", _SCALAR)
_SCALAR_TILE = 32

_DELTA = Kernel(
    "attention/attention_scalar.cu", "attention_delta", ((FLOAT, 1), (FLOAT, 4), (BF16, 1), (BF16, 8))
)
_DELTA_BLOCK, _DELTA_LANES = 256, 8  # block size not tuned

# T, HEAD_DIM, ROW_TILES; backward also SUBTILE, IN_REGISTERS. The largest values without spills; not tuned.
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

# By head dim: HEAD_DIM and forward STAGES. At 64, 2 and 3 stages were slower. At 128, no more than 2 stages
# fit.
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
_HOPPER_ROWS = _HOPPER_CONSTANTS[64]["KEY_TILE"]  # also the query rows per forward work item
_HOPPER_BLOCK = 3 * _HOPPER_CONSTANTS[64]["WARPGROUP"]
_HOPPER_BARRIERS = 256  # bytes, enough for the mbarriers and the work queue
_HOPPER_L2_BYTES = 16 * 2**20  # keys and values in use at a time; 8 and 32 MiB were no faster


def attention_forward(device: Device, out: Array, lse: Array, qkv: Array, start: Array) -> None:
    """See kernels/cpu/attention.py.

    Args:
        device: `attention` is "hopper", "mma" or "scalar". `precision` selects how fp32 is multiplied, see
            above.
        out: the head dim is 128 at most.

    Precision: fp32 arithmetic, one rounding to T at the store of out. In bf16 on tensor cores, the
        operand p is rounded to bf16. With tf32, the operands q, k, v and p are rounded to tf32.
    Determinism: bitwise repeatable. Only hopper uses atomics, to assign work items to blocks.
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
    """See kernels/cpu/attention.py. For the device, see attention_forward.

    Precision: fp32 arithmetic, one rounding to T at each store. In bf16 on tensor cores, the operands p
        and ds are rounded to bf16. With tf32, the operands p, ds, q, k, v and dout are rounded to tf32. delta
        is computed from the unrounded dout. dbias is the fp32 sum of dqkv as stored. hopper sums dq before it
        is rounded, because it does not read dqkv again.
    Determinism: bitwise repeatable. hopper's blocks add to dq in a fixed order, unless numerics.deterministic
        is false. The other kernels use no atomics, and compute 7 matmuls instead of 5.
    Scratch memory: scratch_bytes.
    """
    batch, length, heads, head_dim = out.shape
    kv_heads = (qkv.shape[2] - heads) // 2
    which = attention_kernel(device, qkv.dtype, head_dim)
    delta, *hopper_scratch = device.workspace(*_scratch(which, batch, length, heads, kv_heads, head_dim))
    rows, vector = batch * length * heads, 16 // out.dtype.itemsize
    device.launch(
        _DELTA, (out.dtype, vector if head_dim % vector == 0 else 1),
        -(-rows * _DELTA_LANES // _DELTA_BLOCK), _DELTA_BLOCK,
        delta=delta, dout=dout, out=out, rows=rows, length=length, heads=heads, head_dim=head_dim,
    )  # fmt: skip
    given = {"dqkv": dqkv, "delta": delta, "dout": dout, "lse": lse, "qkv": qkv, "start": start}
    if which == "hopper":
        _launch_hopper_backward(device, given, dbias, *hopper_scratch)
    elif which == "mma":
        _launch_mma(device, _MMA_BACKWARD_QUERY, given, out, qkv, heads=heads)
        _launch_mma(device, _MMA_BACKWARD_KEY, given, out, qkv, heads=kv_heads)
    else:
        _launch_scalar(device, _SCALAR_BACKWARD_QUERY, given, out, qkv, heads=heads, shared_tiles=4)
        _launch_scalar(device, _SCALAR_BACKWARD_KEY, given, out, qkv, heads=kv_heads, shared_tiles=4)
    if dbias is not None and which != "hopper":
        bias_backward(device, dbias, dqkv.reshape(batch * length, -1))


def attention_kernel(device: Device, dtype: Any, head_dim: int) -> str:
    """The kernels for arrays of this type and head dim: "hopper", "mma" or "scalar"."""
    if device.attention == "scalar" or head_dim not in _HEAD_DIMS:
        return "scalar"
    if dtype == FLOAT:
        return "mma" if device.precision == "tf32" else "scalar"
    return (
        "hopper" if device.attention == "hopper" and device.arch == "sm_90" and head_dim in _HOPPER else "mma"
    )


def scratch_bytes(device: Device, config: ModelConfig, rows: int) -> int:
    """Scratch memory of attention_backward, without bias_backward.

    Raises:
        ValueError: the head dim is too large.
    """
    c = config
    if c.head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"model.dim / model.heads: attention on the GPU takes heads of at most {MAX_HEAD_DIM}, "
            f"got {c.head_dim}; set more model.heads, or runtime.device to cpu"
        )
    which = attention_kernel(device, device.storage, c.head_dim)
    return request_bytes(*_scratch(which, -(-rows // c.context), c.context, c.heads, c.kv_heads, c.head_dim))


def _scratch(
    which: str, batch: int, length: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[Request, ...]:
    """delta. For hopper also the fp32 sums of dq, the counters, and the partial sums of dbias."""
    delta = (batch, heads, length), FLOAT
    if which != "hopper":
        return (delta,)
    query_tiles = -(-length // _HOPPER_CONSTANTS[head_dim]["QUERY_TILE"])
    halves = batch, heads, query_tiles, 2  # each consumer warpgroup owns half a query tile
    dq_sum = (*halves, 64 * 64), FLOAT
    counters = (1 + math.prod(halves),), np.int32
    partial = (1, batch * -(-length // _HOPPER_ROWS) * 2, (heads + 2 * kv_heads) * head_dim), FLOAT
    return delta, dq_sum, counters, partial


def _launch_hopper_forward(device: Device, out: Array, lse: Array, qkv: Array, start: Array) -> None:
    """Persistent blocks. Shared memory: two q tiles, one out tile, and STAGES tiles of k and v."""
    batch, length, heads, head_dim = out.shape
    sizes, tile_bytes = _sizes(out, qkv), _HOPPER_ROWS * head_dim * BF16.itemsize
    pairs, kv_bytes = batch * heads, 2 * length * head_dim * BF16.itemsize  # keys and values of one KV head
    section = min(pairs, max(1, _HOPPER_L2_BYTES // kv_bytes) * (heads // sizes["kv_heads"]))
    blocks = min(device.sm_count, -(-length // _HOPPER_ROWS) * pairs)
    device.launch(
        _HOPPER_FORWARD, _HOPPER[head_dim], blocks, _HOPPER_BLOCK,
        shared_bytes=(3 + 2 * _HOPPER[head_dim][1]) * tile_bytes + _HOPPER_BARRIERS,
        out_map=device.heads_map(out), qkv_map=device.heads_map(qkv), lse=lse, start=start,
        counts=device.block_counters[:2], batch=batch, section=section, **sizes,
    )  # fmt: skip


def _launch_hopper_backward(
    device: Device, given: dict[str, Any], dbias: Array | None, dq_sum: Array, counts: Array, partial: Array
) -> None:
    """Persistent blocks.

    Shared memory: one tile of k and v, two of q, dout and ds, and the partial and total sums of dq.
    """
    batch, length, _, head_dim = given["dout"].shape
    sizes = _sizes(given["dout"], given["qkv"])
    tile_bytes = _HOPPER_CONSTANTS[head_dim]
    tiles = 2 * tile_bytes["K_BYTES"] + 4 * tile_bytes["Q_BYTES"] + 2 * tile_bytes["DS_BYTES"]
    rows = 2 * (2 * FLOAT.itemsize + 1) * tile_bytes["QUERY_TILE"]  # two stages of lse, delta and a mask byte
    shared = tiles + 4 * tile_bytes["DQ_BYTES"] + rows + _HOPPER_BARRIERS
    device.fill_zero(counts)
    maps = {f"{name}_map": device.heads_map(given[name]) for name in ("dqkv", "dout", "qkv")}
    arrays = {name: given[name] for name in ("dqkv", "delta", "lse", "start")}
    items = -(-length // _HOPPER_ROWS) * sizes["kv_heads"] * batch
    device.launch(
        _HOPPER_BACKWARD, (head_dim,), min(device.sm_count, items), _HOPPER_BLOCK, shared_bytes=shared,
        dq_sum=dq_sum, tile_counter=counts[:1], dq_semaphore=counts[1:],
        partial=None if dbias is None else partial, batch=batch, ordered=device.deterministic,
        **maps, **arrays, **sizes,
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
    """A block owns a tile of one head. Shared memory: `shared_tiles` tiles and the attention weights."""
    batch, length, _, head_dim = out.shape
    assert head_dim <= MAX_HEAD_DIM, f"attention: head dim {head_dim} is over {MAX_HEAD_DIM}"
    rounded = next(size for size in _HEAD_DIMS if head_dim <= size)
    tile_floats = shared_tiles * (rounded + 4) + _SCALAR_TILE
    shared = FLOAT.itemsize * _SCALAR_TILE * tile_floats if shared_tiles else 0
    device.launch(
        kernel, (qkv.dtype, rounded), (-(-length // _SCALAR_TILE), heads, batch), _BLOCK, shared_bytes=shared,
        **given, **_sizes(out, qkv), head_dim=head_dim,
    )  # fmt: skip


class _MmaTiles(NamedTuple):
    """Shared memory of an mma kernel: the tiles that a block owns, and two streamed tiles per stage.

    Args:
        owned: tiles that a block owns.
        row_bytes: bytes per streamed row in addition to the tiles, for lse, delta and start.
    """

    owned: int
    row_bytes: int


_MMA_TILES = {
    _MMA_FORWARD: _MmaTiles(owned=1, row_bytes=0),
    _MMA_BACKWARD_QUERY: _MmaTiles(owned=2, row_bytes=0),
    _MMA_BACKWARD_KEY: _MmaTiles(owned=2, row_bytes=12),
}


def _launch_mma(
    device: Device, kernel: Kernel, given: dict[str, Any], out: Array, qkv: Array, *, heads: int
) -> None:
    """A block owns a tile of one head. It loops over streamed tiles: keys for queries, queries for keys."""
    batch, length, _, head_dim = out.shape
    template = next(instance for instance in kernel.instances if instance[:2] == (qkv.dtype, head_dim))
    rows, tiles = 64 * cast(int, template[2]), _MMA_TILES[kernel]
    sizes = constants(kernel.source, T=qkv.dtype.itemsize, HEAD_DIM=head_dim)
    stages = 2 if kernel is _MMA_FORWARD else sizes["BACKWARD_STAGES"]
    streamed = sizes["STREAMED_ROWS"]
    shared = (
        sizes["STRIDE"] * (tiles.owned * rows + 2 * stages * streamed) + stages * streamed * tiles.row_bytes
    )
    grid = (-(-length // rows), heads, batch)
    device.launch(kernel, template, grid, _BLOCK, shared_bytes=shared, **given, **_sizes(out, qkv))


def _sizes(out: Array, qkv: Array) -> dict[str, Any]:
    _, length, heads, head_dim = out.shape
    return {
        "length": length,
        "heads": heads,
        "kv_heads": (qkv.shape[2] - heads) // 2,
        "scale": 1 / math.sqrt(head_dim),
    }
