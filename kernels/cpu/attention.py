"""Causal grouped-query attention, BLOCK queries at a time.

A task owns one key/value head of one sequence and all query heads that share it, so dk and dv are summed without a lock; the
documents of the sequence are separate problems one after the other. What a product reads along its rows is copied once a
document: keys and values as rows of features, zeros up to the tile's width, or as rows of keys, one a feature. A block of
queries is multiplied by the keys up to its last query, rounded up to the tile's width, and no others.
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

# Queries taken together, a multiple of tile.ROWS: more of them read the keys less often, and multiply more unseen ones.
BLOCK = 32


def attention_forward(out: Array, lse: Array, qkv: Array, start: Ids) -> None:
    """Softmax-weighted mean of the values of the keys that a query may see: start[b, t] <= j <= t.

        s[t, j] = q[t] . k[j] / sqrt(D)        lse[t] = log sum_j exp(s[t, j])
        out[t]  = sum_j exp(s[t, j] - lse[t]) v[j]

    Args:
        out:   (B, T, H, D), overwritten.
        lse:   (B, H, T), overwritten; saved for the backward pass.
        qkv:   (B, T, H + 2 KV, D): H query heads, then KV key heads, then KV value heads; query head h reads key head
               h // (H / KV).
        start: (B, T) int32, the index at which the token's document begins.

    Source: Vaswani et al. 2017, arXiv:1706.03762; Ainslie et al. 2023, arXiv:2305.13245 (grouped queries).
    """
    _forward(out, lse, qkv, start, width(qkv.itemsize))


def attention_backward(
    dqkv: Array, dout: Array, out: Array, lse: Array, qkv: Array, start: Ids, dbias: Array | None = None
) -> None:
    """Gradient of attention, the probabilities computed again from lse.

        p[t, j]  = exp(s[t, j] - lse[t])           delta[t] = dout[t] . out[t]
        ds[t, j] = p[t, j] * (dout[t] . v[j] - delta[t]) / sqrt(D)
        dq[t] = sum_j ds[t, j] k[j]        dk[j] = sum_t ds[t, j] q[t]        dv[j] = sum_t p[t, j] dout[t]
        dbias += sum over positions of dqkv

    Args:
        dqkv: (B, T, H + 2 KV, D), overwritten; dk and dv are summed over the query heads that share them.
        dout: (B, T, H, D).
        out, lse, qkv, start: the forward pass's.
        dbias: ((H + 2 KV) * D,), accumulated: of the linear layer that made qkv, where nothing came between. Or None.

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
    """The first position after the document that begins at `begin`."""
    end = begin + 1
    while end < start.shape[1] and start[b, end] == begin:
        end += 1
    return end


@jit
def _copy(rows, source, scale):  # type: ignore[no-untyped-def]
    """Copy source (n, D) * scale to the first columns of the first rows."""
    for j in range(source.shape[0]):
        for d in range(source.shape[1]):
            rows[j, d] = source[j, d] * scale


@jit
def _softmax(score, seen):  # type: ignore[no-untyped-def]
    """Turn the first `seen` scores into exp(score - largest) and the others into 0; return the largest and the sum."""
    largest = score[0]
    for j in range(1, seen):
        largest = max(largest, score[j])
    total = score.dtype.type(0)
    for j in range(seen):
        weight = exp(score[j] - largest)
        score[j] = weight
        total += weight
    score[seen:] = 0
    return largest, total


@pjit
def _forward(out, lse, qkv, start, step):  # type: ignore[no-untyped-def]
    batch, length, heads, head_dim = out.shape
    kv_heads = (qkv.shape[2] - heads) // 2
    group, dtype = heads // kv_heads, qkv.dtype
    padded, padded_dim = _round_up(length, step), _round_up(head_dim, step)
    one = dtype.type(1)
    scale = one / np.sqrt(dtype.type(head_dim))
    for task in prange(batch * kv_heads):
        b, shared = task // kv_heads, task % kv_heads
        key_columns, values = np.zeros((head_dim, padded), dtype), np.zeros((length, padded_dim), dtype)
        queries, means = np.zeros((BLOCK, head_dim), dtype), np.empty((BLOCK, padded_dim), dtype)
        scores, share = np.zeros((BLOCK, padded), dtype), np.empty(BLOCK, dtype)
        begin = 0
        while begin < length:
            end = _document_end(start, b, begin)
            _copy(key_columns.T, qkv[b, begin:end, heads + shared], one)
            _copy(values, qkv[b, begin:end, heads + kv_heads + shared], one)
            for head in range(shared * group, (shared + 1) * group):
                for first in range(begin, end, BLOCK):
                    high = min(first + BLOCK, end)
                    keys, score = high - begin, scores[:, : _round_up(high - begin, step)]
                    _copy(queries, qkv[b, first:high, head], scale)
                    multiply(score, queries, key_columns, False)
                    for t in range(first, high):
                        largest, total = _softmax(score[t - first], t + 1 - begin)
                        lse[b, head, t] = largest + np.log(total)
                        share[t - first] = one / total
                    multiply(means, scores[:, :keys], values, False)
                    for t in range(first, high):
                        for d in range(head_dim):
                            out[b, t, head, d] = means[t - first, d] * share[t - first]
            begin = end


@jit
def _score_gradient(p, ds, lse, delta, seen):  # type: ignore[no-untyped-def]
    """From scores and dout . v of one query to p and ds, without the scale, which q and dq carry; 0 where unseen.

    sum_j p[j] (dout . v[j] - delta) is zero but for rounding. Where a query sees one key with nearly all its weight, that
    rounding is larger than the gradient, and it is the same for all keys: it is taken off.
    """
    excess = p.dtype.type(0)
    for j in range(seen):
        weight, difference = exp(p[j] - lse), ds[j] - delta
        p[j] = weight
        ds[j] = difference
        excess += weight * difference
    for j in range(seen):
        ds[j] = p[j] * (ds[j] - excess)
    p[seen:] = 0
    ds[seen:] = 0


@pjit
def _backward(dqkv, dout, out, lse, qkv, start, step):  # type: ignore[no-untyped-def]
    batch, length, heads, head_dim = out.shape
    kv_heads = (qkv.shape[2] - heads) // 2
    group, dtype = heads // kv_heads, qkv.dtype
    padded, padded_dim = _round_up(length, step), _round_up(head_dim, step)
    one = dtype.type(1)
    scale = one / np.sqrt(dtype.type(head_dim))
    for task in prange(batch * kv_heads):
        b, shared = task // kv_heads, task % kv_heads
        key_columns, value_columns = np.zeros((head_dim, padded), dtype), np.zeros((head_dim, padded), dtype)
        keys, dkeys = np.zeros((length, padded_dim), dtype), np.empty((padded, padded_dim), dtype)
        dvalues = np.empty((padded, padded_dim), dtype)
        p, ds = np.zeros((BLOCK, padded), dtype), np.zeros((BLOCK, padded), dtype)
        queries, douts = np.zeros((BLOCK, padded_dim), dtype), np.zeros((BLOCK, padded_dim), dtype)
        dqueries = np.empty((BLOCK, padded_dim), dtype)
        begin = 0
        while begin < length:
            end = _document_end(start, b, begin)
            _copy(keys, qkv[b, begin:end, heads + shared], one)
            _copy(key_columns.T, qkv[b, begin:end, heads + shared], one)
            _copy(value_columns.T, qkv[b, begin:end, heads + kv_heads + shared], one)
            dkeys[: _round_up(end - begin, step)] = 0
            dvalues[: _round_up(end - begin, step)] = 0
            for head in range(shared * group, (shared + 1) * group):
                for first in range(begin, end, BLOCK):
                    high = min(first + BLOCK, end)
                    count, seen, wide = high - first, high - begin, _round_up(high - begin, step)
                    _copy(queries, qkv[b, first:high, head], scale)
                    _copy(douts, dout[b, first:high, head], one)
                    multiply(p[:, :wide], queries[:, :head_dim], key_columns, False)
                    multiply(ds[:, :wide], douts[:, :head_dim], value_columns, False)
                    for t in range(first, high):
                        delta = dtype.type(0)
                        for d in range(head_dim):
                            delta += dout[b, t, head, d] * out[b, t, head, d]
                        r = t - first
                        _score_gradient(p[r, :wide], ds[r, :wide], lse[b, head, t], delta, t + 1 - begin)
                    multiply(dqueries, ds[:, :seen], keys, False)
                    multiply(dkeys[:wide], ds[:count, :wide].T, queries, True)
                    multiply(dvalues[:wide], p[:count, :wide].T, douts, True)
                    for t in range(first, high):
                        for d in range(head_dim):
                            dqkv[b, t, head, d] = dqueries[t - first, d] * scale
            for t in range(begin, end):
                for d in range(head_dim):
                    dqkv[b, t, heads + shared, d] = dkeys[t - begin, d]
                    dqkv[b, t, heads + kv_heads + shared, d] = dvalues[t - begin, d]
            begin = end
