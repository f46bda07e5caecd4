"""Causal grouped-query attention, BLOCK queries at a time.

A task owns one KV head of one sequence, and all query heads that share it. So it sums dk and dv without a
lock. The documents of a sequence are separate problems, processed one after another.

Per document, keys and values are copied into the layouts that the matmuls read: (key, feature) with columns
padded to the tile width, or transposed, (feature, key). The rows of a query block are multiplied by the keys
from the document's start to the block's last query, rounded up to the tile width.
"""

from typing import Any

import numpy as np
from numba import prange

from kernels.cpu.bias import bias_backward
from kernels.cpu.exponential import exp
from kernels.cpu.jit import jit, pjit
from kernels.cpu.tile import multiply, width

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]
Ids = np.ndarray[Any, np.dtype[np.int32]]

# Queries per block, a multiple of tile.ROWS. Larger blocks read the keys less often.
# But they compute more masked scores.
BLOCK = 32


def attention_forward(out: Array, lse: Array, qkv: Array, start: Ids) -> None:
    """The softmax-weighted mean of the values. Query t sees the keys j with start[b, t] <= j <= t.

        s[t, j] = q[t] . k[j] / sqrt(D)        lse[t] = log sum_j exp(s[t, j])
        out[t]  = sum_j exp(s[t, j] - lse[t]) v[j]

    Args:
        out:   (B, T, H, D), overwritten.
        lse:   (B, H, T), overwritten; saved for the backward pass.
        qkv:   (B, T, H + 2 KV, D): H query heads, KV key heads, KV value heads.
               Query head h reads KV head h // (H / KV).
        start: (B, T) int32, the index at which the token's document begins.

    Source: Vaswani et al. 2017, arXiv:1706.03762; Ainslie et al. 2023, arXiv:2305.13245 (grouped queries).
    """
    _forward(out, lse, qkv, start, width(qkv.itemsize))


def attention_backward(
    dqkv: Array, dout: Array, out: Array, lse: Array, qkv: Array, start: Ids, dbias: Array | None = None
) -> None:
    """Gradient of attention. The probabilities are recomputed from lse.

        p[t, j]  = exp(s[t, j] - lse[t])           delta[t] = dout[t] . out[t]
        ds[t, j] = p[t, j] * (dout[t] . v[j] - delta[t])
        dq[t] = sum_j ds[t, j] k[j] / sqrt(D)        dk[j] = sum_t ds[t, j] q[t] / sqrt(D)
        dv[j] = sum_t p[t, j] dout[t]
        dbias += sum over positions of dqkv

    Args:
        dqkv: (B, T, H + 2 KV, D), overwritten. dk and dv sum over the query heads of their KV head.
        dout: (B, T, H, D).
        out, lse, qkv, start: as in the forward pass.
        dbias: ((H + 2 KV) * D,), accumulated: the bias gradient of the layer that computed qkv.
               None without a bias, or if RoPE came between.

    Source: Dao et al. 2022, arXiv:2205.14135, appendix B.
    """
    _backward(dqkv, dout, out, lse, qkv, start, width(qkv.itemsize))
    if dbias is not None:
        bias_backward(dbias, dqkv.reshape(-1, dbias.size))


@jit
def _round_up(count, step):  # type: ignore[no-untyped-def]
    return (count + step - 1) // step * step


@jit
def _document_end(start, b, begin):  # type: ignore[no-untyped-def]
    """The end of the document that begins at `begin`: one past its last position."""
    end = begin + 1
    while end < start.shape[1] and start[b, end] == begin:
        end += 1
    return end


@jit
def _copy(rows, source, scale):  # type: ignore[no-untyped-def]
    """Copy source (n, D) * scale to the first n rows and D columns of `rows`."""
    for j in range(source.shape[0]):
        for d in range(source.shape[1]):
            rows[j, d] = source[j, d] * scale


@jit
def _softmax(scores, visible):  # type: ignore[no-untyped-def]
    """Replace the visible scores by exp(scores - row_max), the others by 0. Return row_max and the sum."""
    row_max = scores[0]
    for j in range(1, visible):
        row_max = max(row_max, scores[j])
    total = scores.dtype.type(0)
    for j in range(visible):
        weight = exp(scores[j] - row_max)
        scores[j] = weight
        total += weight
    scores[visible:] = 0
    return row_max, total


@pjit
def _forward(out, lse, qkv, start, tile_width):  # type: ignore[no-untyped-def]
    batch, length, heads, head_dim = out.shape
    kv_heads = (qkv.shape[2] - heads) // 2
    group, dtype = heads // kv_heads, qkv.dtype
    padded, padded_dim = _round_up(length, tile_width), _round_up(head_dim, tile_width)
    one = dtype.type(1)
    scale = one / np.sqrt(dtype.type(head_dim))
    for task in prange(batch * kv_heads):
        b, kv_head = task // kv_heads, task % kv_heads
        key_columns, values = np.zeros((head_dim, padded), dtype), np.zeros((length, padded_dim), dtype)
        queries, out_block = np.zeros((BLOCK, head_dim), dtype), np.empty((BLOCK, padded_dim), dtype)
        scores, inv_sum = np.zeros((BLOCK, padded), dtype), np.empty(BLOCK, dtype)
        begin = 0
        while begin < length:
            end = _document_end(start, b, begin)
            _copy(key_columns.T, qkv[b, begin:end, heads + kv_head], one)
            _copy(values, qkv[b, begin:end, heads + kv_heads + kv_head], one)
            for head in range(kv_head * group, (kv_head + 1) * group):
                for first in range(begin, end, BLOCK):
                    stop = min(first + BLOCK, end)
                    visible_keys = stop - begin
                    block_scores = scores[:, : _round_up(visible_keys, tile_width)]
                    _copy(queries, qkv[b, first:stop, head], scale)
                    multiply(block_scores, queries, key_columns, False)
                    for t in range(first, stop):
                        row_max, total = _softmax(block_scores[t - first], t + 1 - begin)
                        lse[b, head, t] = row_max + np.log(total)
                        inv_sum[t - first] = one / total
                    multiply(out_block, scores[:, :visible_keys], values, False)
                    for t in range(first, stop):
                        for d in range(head_dim):
                            out[b, t, head, d] = out_block[t - first, d] * inv_sum[t - first]
            begin = end


@jit
def _score_gradient(p, ds, lse, delta, visible):  # type: ignore[no-untyped-def]
    """For one query, in place: p holds the scores and becomes p, ds holds dout . v and becomes ds.

    Masked elements become 0. The factor 1 / sqrt(D) is applied to q and to dq.

    In exact arithmetic sum_j p[j] (dout . v[j] - delta) is zero. If one key has nearly all the weight, the
    sum's rounding error is larger than the gradient. This error, `excess`, is the same for all keys, and is
    subtracted from each.
    """
    excess = p.dtype.type(0)
    for j in range(visible):
        weight, difference = exp(p[j] - lse), ds[j] - delta
        p[j] = weight
        ds[j] = difference
        excess += weight * difference
    for j in range(visible):
        ds[j] = p[j] * (ds[j] - excess)
    p[visible:] = 0
    ds[visible:] = 0


@pjit
def _backward(dqkv, dout, out, lse, qkv, start, tile_width):  # type: ignore[no-untyped-def]
    batch, length, heads, head_dim = out.shape
    kv_heads = (qkv.shape[2] - heads) // 2
    group, dtype = heads // kv_heads, qkv.dtype
    padded, padded_dim = _round_up(length, tile_width), _round_up(head_dim, tile_width)
    one = dtype.type(1)
    scale = one / np.sqrt(dtype.type(head_dim))
    for task in prange(batch * kv_heads):
        b, kv_head = task // kv_heads, task % kv_heads
        key_columns, value_columns = np.zeros((head_dim, padded), dtype), np.zeros((head_dim, padded), dtype)
        keys, dkeys = np.zeros((length, padded_dim), dtype), np.empty((padded, padded_dim), dtype)
        dvalues = np.empty((padded, padded_dim), dtype)
        p, ds = np.zeros((BLOCK, padded), dtype), np.zeros((BLOCK, padded), dtype)
        queries, douts = np.zeros((BLOCK, padded_dim), dtype), np.zeros((BLOCK, padded_dim), dtype)
        dqueries = np.empty((BLOCK, padded_dim), dtype)
        begin = 0
        while begin < length:
            end = _document_end(start, b, begin)
            _copy(keys, qkv[b, begin:end, heads + kv_head], one)
            _copy(key_columns.T, qkv[b, begin:end, heads + kv_head], one)
            _copy(value_columns.T, qkv[b, begin:end, heads + kv_heads + kv_head], one)
            dkeys[: _round_up(end - begin, tile_width)] = 0
            dvalues[: _round_up(end - begin, tile_width)] = 0
            for head in range(kv_head * group, (kv_head + 1) * group):
                for first in range(begin, end, BLOCK):
                    stop = min(first + BLOCK, end)
                    count, visible_keys = stop - first, stop - begin
                    padded_keys = _round_up(visible_keys, tile_width)
                    _copy(queries, qkv[b, first:stop, head], scale)
                    _copy(douts, dout[b, first:stop, head], one)
                    multiply(p[:, :padded_keys], queries[:, :head_dim], key_columns, False)
                    multiply(ds[:, :padded_keys], douts[:, :head_dim], value_columns, False)
                    for t in range(first, stop):
                        delta = dtype.type(0)
                        for d in range(head_dim):
                            delta += dout[b, t, head, d] * out[b, t, head, d]
                        r = t - first
                        _score_gradient(
                            p[r, :padded_keys], ds[r, :padded_keys], lse[b, head, t], delta, t + 1 - begin
                        )
                    multiply(dqueries, ds[:, :visible_keys], keys, False)
                    multiply(dkeys[:padded_keys], ds[:count, :padded_keys].T, queries, True)
                    multiply(dvalues[:padded_keys], p[:count, :padded_keys].T, douts, True)
                    for t in range(first, stop):
                        for d in range(head_dim):
                            dqkv[b, t, head, d] = dqueries[t - first, d] * scale
            for t in range(begin, end):
                for d in range(head_dim):
                    dqkv[b, t, heads + kv_head, d] = dkeys[t - begin, d]
                    dqkv[b, t, heads + kv_heads + kv_head, d] = dvalues[t - begin, d]
            begin = end
