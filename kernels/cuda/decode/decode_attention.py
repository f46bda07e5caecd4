"""Launcher of decode_attention.cu; kernels.cpu.decode_attention has the mathematics and the contract."""

from math import sqrt

from kernels.config import ModelConfig
from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import BF16, FLOAT, Array, Kernel, constants

_SOURCE = "decode/decode_attention.cu"
_INSTANCES = ((FLOAT, 1), (FLOAT, 4), (BF16, 1), (BF16, 8))
_DECODE = Kernel(_SOURCE, "decode_attention", _INSTANCES, dependent_launch=True)
_THREADS, _MIN_KEYS_PER_SPLIT = (constants(_SOURCE)[name] for name in ("THREADS", "MIN_KEYS_PER_SPLIT"))
LARGEST_HEAD_DIM = _THREADS  # a thread combines one feature
_BLOCKS_PER_SM = 2  # up to so many splits in all; not tuned


def decode_attention_forward(
    device: Device, out: Array, qkv: Array, keys: Array, values: Array, length: Array
) -> None:
    """See kernels.cpu.decode_attention.decode_attention_forward; length is in device memory.

    Precision: fp32 arithmetic, one rounding to T at the store of out.
    Determinism: bitwise repeatable. The splits, and so the last bits, depend on B, n, length, context, GPU.
    Cost: reads each cached key and value H / KV times, once from DRAM and otherwise from L2. It depends on
        `length`, not on the capacity `context`.
    Workspace: 2 + D floats for each split of each token and head.
    """
    batch, count, heads, head_dim = out.shape
    context, kv_heads = keys.shape[1:3]
    assert head_dim <= LARGEST_HEAD_DIM, f"attention: head dim {head_dim} is over {LARGEST_HEAD_DIM}"
    splits = _splits(device, batch * count * heads, context)
    vector = 16 // qkv.dtype.itemsize
    (partial,) = device.workspace(((batch * count * heads, splits, 2 + head_dim), FLOAT))
    template, grid = (qkv.dtype, vector if head_dim % vector == 0 else 1), (batch * count, heads, splits)
    device.launch(
        _DECODE, template, grid, _THREADS,
        out=out, partial=partial, finished=device.block_counters, qkv=qkv, keys=keys, values=values,
        length=length, count=count, context=context, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        scale=1 / sqrt(head_dim),
    )  # fmt: skip


def _splits(device: Device, rows: int, context: int) -> int:
    """Blocks that split the keys of one token and head; rows: tokens * heads."""
    return max(1, min(_BLOCKS_PER_SM * device.sm_count // rows, context // _MIN_KEYS_PER_SPLIT))


def scratch_bytes(device: Device, config: ModelConfig, rows: int) -> int:
    """Partial results of each split of each position and head; there are several splits only if positions are
    few.
    """
    heads = max(rows * config.heads, _BLOCKS_PER_SM * device.sm_count)
    return FLOAT.itemsize * heads * (2 + config.head_dim)
