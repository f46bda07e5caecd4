"""Attention of new tokens over a KV cache."""

from typing import Any

import numpy as np
from numba import prange

from kernels.cpu.exponential import exp
from kernels.cpu.jit import pjit

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]
Count = np.ndarray[Any, np.dtype[np.int32]]


def decode_attention_forward(out: Array, qkv: Array, keys: Array, values: Array, length: Count) -> None:
    """Append the new tokens' keys and values to the cache, then attend.

    New token t sees cache rows 0 .. length + t.

    Args:
        out:    (B, n, H, D), overwritten.
        qkv:    (B, n, H + 2 KV, D) of the n new tokens. RoPE has already been applied, if the model uses it.
        keys:   (B, context, KV, D), rows length .. length + n - 1 overwritten.
        values: as keys.
        length: 0-d int32, the number of cached tokens before the call; length + n <= context.
    """
    heads, kv_heads = out.shape[2], keys.shape[2]
    cached_len = int(length)
    new = slice(cached_len, cached_len + out.shape[1])
    keys[:, new] = qkv[:, :, heads : heads + kv_heads]
    values[:, new] = qkv[:, :, heads + kv_heads :]
    _forward(out, qkv, keys, values, cached_len)


@pjit
def _forward(out, qkv, keys, values, length):  # type: ignore[no-untyped-def]
    batch, count, heads, head_dim = out.shape
    group = heads // keys.shape[2]
    zero = out.dtype.type(0)
    scale = out.dtype.type(1) / np.sqrt(out.dtype.type(head_dim))
    for task in prange(batch * heads):
        b, head = task // heads, task % heads
        kv_head = head // group
        score = np.empty(length + count, out.dtype)
        for t in range(count):
            visible = length + t + 1
            largest = out.dtype.type(-np.inf)
            for j in range(visible):
                dot = zero
                for d in range(head_dim):
                    dot += qkv[b, t, head, d] * keys[b, j, kv_head, d]
                score[j] = dot * scale
                largest = max(largest, score[j])
            total = zero
            for j in range(visible):
                score[j] = exp(score[j] - largest)
                total += score[j]
            for d in range(head_dim):
                out[b, t, head, d] = zero
            for j in range(visible):
                weight = score[j] / total
                for d in range(head_dim):
                    out[b, t, head, d] += weight * values[b, j, kv_head, d]
