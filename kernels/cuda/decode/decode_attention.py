"""Launcher of decode_attention.cu; the mathematics and the contract are those of kernels.cpu.decode_attention."""

from math import sqrt

from kernels.config import ModelConfig
from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import BF16, FLOAT, Array, Kernel

LARGEST_HEAD_DIM = 128
_INSTANCES = ((FLOAT, 1), (FLOAT, 4), (BF16, 1), (BF16, 8))
_DECODE = Kernel("decode/decode_attention.cu", "decode_attention", _INSTANCES, dependent_launch=True)
_BLOCK = 128
# Blocks that one multiprocessor gets while there are fewer tokens and heads than that (not tuned), and the kernel's least share.
_BLOCKS_A_PROCESSOR, _SMALLEST_SHARE = 2, 32


def decode_attention_forward(
    device: Device, out: Array, qkv: Array, keys: Array, values: Array, length: Array
) -> None:
    """See kernels.cpu.decode_attention.decode_attention_forward; length is in device memory.

    Precision: fp32 arithmetic, one rounding to T at the store of out.
    Determinism: bitwise repeatable; the shares of the keys, and so the last bits, depend on B, n, length, context and GPU.
    Cost: reads the cache's rows H / KV times (from L2 all but once), whatever the context is.
    Workspace: 2 + D floats for each share of each token and head.
    """
    batch, count, heads, head_dim = out.shape
    context, kv_heads = keys.shape[1:3]
    assert head_dim <= LARGEST_HEAD_DIM, f"attention: head dim {head_dim} is over {LARGEST_HEAD_DIM}"
    splits = _splits(device, batch * count * heads, context)
    vector = 16 // qkv.dtype.itemsize
    (partial,) = device.workspace(((batch * count * heads, splits, 2 + head_dim), FLOAT))
    device.launch(
        _DECODE, (qkv.dtype, vector if head_dim % vector == 0 else 1), (batch * count, heads, splits), _BLOCK,
        out=out, partial=partial, finished=device.block_counters, qkv=qkv, keys=keys, values=values, length=length, count=count,
        context=context, heads=heads, kv_heads=kv_heads, head_dim=head_dim, scale=1 / sqrt(head_dim),
    )  # fmt: skip


def _splits(device: Device, rows: int, context: int) -> int:
    """Blocks that share the keys of one token and head."""
    return max(1, min(_BLOCKS_A_PROCESSOR * device.sm_count // rows, context // _SMALLEST_SHARE))


def scratch_bytes(device: Device, config: ModelConfig, rows: int) -> int:
    """Partial results of each split of each position and head; there are several splits only if positions are few."""
    heads = max(rows * config.heads, _BLOCKS_A_PROCESSOR * device.sm_count)
    return FLOAT.itemsize * heads * (2 + config.head_dim)
