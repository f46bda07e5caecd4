"""Launchers of qk_norm.cu. Mathematics and contracts: kernels/cpu/qk_norm.py."""

from typing import Any

from kernels.config import ModelConfig
from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import BF16, FLOAT, Array, Kernel, Template
from kernels.cuda.runtime.vectors import vector_size
from kernels.cuda.sum_rows import add_rows

_WARP, _BLOCK = 32, 256  # not tuned
_HEADS = {"forward": 4, "backward": 2}  # per lane; not tuned
_BLOCKS_PER_SM = 4  # of the backward pass with weights, whose blocks store partial sums; not tuned
# A team has at most one warp. Up to a head width of 256, only lone elements need more than one vector a lane.
_VECTORS = ((FLOAT, 4, 1), (FLOAT, 1, 1), (FLOAT, 1, 4), (BF16, 8, 1), (BF16, 1, 1), (BF16, 1, 4))
_FORWARD = Kernel(
    "qk_norm.cu", "qk_norm_forward", tuple((*template, _HEADS["forward"]) for template in _VECTORS)
)
_BACKWARD = Kernel(
    "qk_norm.cu",
    "qk_norm_backward",
    tuple((*template, _HEADS["backward"], weighted) for template in _VECTORS for weighted in (False, True)),
)


def qk_norm_forward(
    device: Device, qkv: Array, rstd: Array, start: Array, table: Array | None, query_weight: Array | None,
    key_weight: Array | None, *, kv_heads: int, eps: float,
) -> None:  # fmt: skip
    """See kernels/cpu/qk_norm.py. rstd, table and weights are fp32. Reads and writes each element once."""
    template, sizes = _sizes("forward", kv_heads, qkv, table, query_weight, key_weight)
    blocks = -(-sizes["count"] * sizes["lanes"] // _BLOCK)
    device.launch(
        _FORWARD, template, blocks, _BLOCK,
        qkv=qkv, rstd=rstd, start=start, table=table, query_weight=query_weight, key_weight=key_weight,
        eps=eps, **sizes,
    )  # fmt: skip


def qk_norm_backward(
    device: Device, dqkv: Array, dquery_weight: Array | None, dkey_weight: Array | None, qkv: Array,
    rstd: Array, start: Array, table: Array | None, query_weight: Array | None, key_weight: Array | None, *,
    kv_heads: int,
) -> None:  # fmt: skip
    """See kernels/cpu/qk_norm.py. rstd, table and weights are fp32.

    Scratch memory: with weights, two fp32 heads a block.
    """
    template, sizes = _sizes("backward", kv_heads, dqkv, qkv, table, query_weight, key_weight)
    blocks, head_dim = -(-sizes["count"] * sizes["lanes"] // _BLOCK), sizes["head_dim"]
    partial, shared_bytes = None, 0
    if dquery_weight is not None:
        blocks = min(blocks, _BLOCKS_PER_SM * device.sm_count)
        (partial,) = device.workspace(((2, blocks, head_dim), FLOAT))
        shared_bytes = _BLOCK // _WARP * 2 * head_dim * FLOAT.itemsize
    device.launch(
        _BACKWARD, (*template, partial is not None), blocks, _BLOCK, shared_bytes=shared_bytes,
        dqkv=dqkv, partial=partial, qkv=qkv, rstd=rstd, start=start, table=table, query_weight=query_weight,
        key_weight=key_weight, **sizes,
    )  # fmt: skip
    if dquery_weight is not None and partial is not None:
        add_rows(device, partial, dquery_weight, dkey_weight)


def _sizes(direction: str, kv_heads: int, qkv: Array, *arrays: Any) -> tuple[Template, dict[str, int]]:
    """The template, and the kernel's arguments that say how heads are divided among lanes."""
    batch, length, heads, head_dim = qkv.shape
    table, half, normed = arrays[-3], head_dim // 2, heads - kv_heads
    size = vector_size(half, qkv, *arrays)
    vectors = half // size
    lanes = min(1 << (vectors - 1).bit_length(), _WARP)
    groups = -(-normed // _HEADS[direction])
    template = (qkv.dtype, size, 1 if vectors <= lanes else 4, _HEADS[direction])
    return template, {
        "count": batch * length * groups, "length": length, "heads": heads, "queries": normed - kv_heads,
        "normed": normed, "head_dim": head_dim, "width": half if table is None else table.shape[2],
        "groups": groups, "lanes": lanes,
    }  # fmt: skip


def scratch_bytes(device: Device, config: ModelConfig, rows: int) -> int:
    """The partial sums of both weights' gradients."""
    return 2 * _BLOCKS_PER_SM * device.sm_count * config.head_dim * FLOAT.itemsize
