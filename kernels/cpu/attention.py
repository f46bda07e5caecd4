"""Causal grouped-query attention, a row of scores at a time.

A task owns one key/value head of one sequence and all query heads that share it, so dk and dv are summed without a lock.
Keys and values are copied once a task to rows of one feature each (D, T): every product then runs along the sequence, over
the keys a query may see and no others, and vectorises.
"""

from typing import Any

import numpy as np
from numba import prange

from kernels.cpu.exponential import exp
from kernels.cpu.jit import jit, pjit

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]
Ids = np.ndarray[Any, np.dtype[np.int32]]

# Features, or queries, taken together in an inner loop: each score is then loaded and stored once for four products.
TILE = 4


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
    _forward(out, lse, qkv, start)


def attention_backward(dqkv: Array, dout: Array, out: Array, lse: Array, qkv: Array, start: Ids) -> None:
    """Gradient of attention, the probabilities computed again from lse.

        p[t, j]  = exp(s[t, j] - lse[t])           delta[t] = dout[t] . out[t]
        ds[t, j] = p[t, j] * (dout[t] . v[j] - delta[t]) / sqrt(D)
        dq[t] = sum_j ds[t, j] k[j]        dk[j] = sum_t ds[t, j] q[t]        dv[j] = sum_t p[t, j] dout[t]

    Args:
        dqkv: (B, T, H + 2 KV, D), overwritten; dk and dv are summed over the query heads that share them.
        dout: (B, T, H, D).
        out, lse, qkv, start: the forward pass's.

    Source: Dao et al. 2022, arXiv:2205.14135, appendix B.
    """
    _backward(dqkv, dout, out, lse, qkv, start)


@jit
def _features(columns, rows):  # type: ignore[no-untyped-def]
    """Copy rows (T, D) to columns (D rounded up to TILE, T); the rows that padding adds are zero."""
    columns[rows.shape[1] :] = 0
    for j in range(rows.shape[0]):
        for d in range(rows.shape[1]):
            columns[d, j] = rows[j, d]


@jit
def _project(score, vector, columns, low):  # type: ignore[no-untyped-def]
    """score[j] = vector . columns[:, low + j]."""
    count = score.size
    score[:] = 0
    for d in range(0, columns.shape[0], TILE):
        a0, a1, a2, a3 = vector[d], vector[d + 1], vector[d + 2], vector[d + 3]
        c0, c1 = columns[d, low : low + count], columns[d + 1, low : low + count]
        c2, c3 = columns[d + 2, low : low + count], columns[d + 3, low : low + count]
        for j in range(count):
            score[j] += a0 * c0[j] + a1 * c1[j] + a2 * c2[j] + a3 * c3[j]


@jit
def _combine(vector, score, columns, low):  # type: ignore[no-untyped-def]
    """vector[d] = sum over j of score[j] * columns[d, low + j]."""
    count, zero = score.size, vector.dtype.type(0)
    for d in range(0, columns.shape[0], TILE):
        a0, a1, a2, a3 = zero, zero, zero, zero
        c0, c1 = columns[d, low : low + count], columns[d + 1, low : low + count]
        c2, c3 = columns[d + 2, low : low + count], columns[d + 3, low : low + count]
        for j in range(count):
            a0 += score[j] * c0[j]
            a1 += score[j] * c1[j]
            a2 += score[j] * c2[j]
            a3 += score[j] * c3[j]
        vector[d], vector[d + 1], vector[d + 2], vector[d + 3] = a0, a1, a2, a3


@jit
def _scatter(columns, scores, vectors, low, high):  # type: ignore[no-untyped-def]
    """columns[d, j] += sum over the TILE queries r of vectors[r, d] * scores[r, j], for low <= j < high."""
    s0, s1, s2, s3 = scores[0, low:high], scores[1, low:high], scores[2, low:high], scores[3, low:high]
    for d in range(columns.shape[0]):
        a0, a1, a2, a3 = vectors[0, d], vectors[1, d], vectors[2, d], vectors[3, d]
        column = columns[d, low:high]
        for j in range(column.size):
            column[j] += a0 * s0[j] + a1 * s1[j] + a2 * s2[j] + a3 * s3[j]


@jit
def _softmax(score):  # type: ignore[no-untyped-def]
    """Replace scores by exp(score - largest); return (largest, sum of the exponentials)."""
    largest = score[0]
    for j in range(1, score.size):
        largest = max(largest, score[j])
    total = score.dtype.type(0)
    for j in range(score.size):
        weight = exp(score[j] - largest)
        score[j] = weight
        total += weight
    return largest, total


@pjit
def _forward(out, lse, qkv, start):  # type: ignore[no-untyped-def]
    batch, length, heads, head_dim = out.shape
    kv_heads = (qkv.shape[2] - heads) // 2
    group = heads // kv_heads
    padded = (head_dim + TILE - 1) // TILE * TILE
    scale = qkv.dtype.type(1) / np.sqrt(qkv.dtype.type(head_dim))
    for task in prange(batch * kv_heads):
        b, shared = task // kv_heads, task % kv_heads
        keys = np.empty((padded, length), qkv.dtype)
        values = np.empty((padded, length), qkv.dtype)
        score = np.empty(length, qkv.dtype)
        query, mean = np.zeros(padded, qkv.dtype), np.empty(padded, qkv.dtype)
        _features(keys, qkv[b, :, heads + shared])
        _features(values, qkv[b, :, heads + kv_heads + shared])
        for head in range(shared * group, (shared + 1) * group):
            for t in range(length):
                low = start[b, t]
                for d in range(head_dim):
                    query[d] = qkv[b, t, head, d] * scale
                seen = score[low : t + 1]
                _project(seen, query, keys, low)
                largest, total = _softmax(seen)
                _combine(mean, seen, values, low)
                for d in range(head_dim):
                    out[b, t, head, d] = mean[d] / total
                lse[b, head, t] = largest + np.log(total)


@jit
def _score_gradients(p, ds, query, dout, keys, values, lse, delta, low):  # type: ignore[no-untyped-def]
    """p and ds of one query over the keys it sees, without the scale, which q and dq carry: see attention_backward."""
    _project(p, query, keys, low)
    _project(ds, dout, values, low)
    for j in range(p.size):
        weight = exp(p[j] - lse)
        p[j] = weight
        ds[j] = weight * (ds[j] - delta)


@pjit
def _backward(dqkv, dout, out, lse, qkv, start):  # type: ignore[no-untyped-def]
    batch, length, heads, head_dim = out.shape
    kv_heads = (qkv.shape[2] - heads) // 2
    group = heads // kv_heads
    padded = (head_dim + TILE - 1) // TILE * TILE
    dtype = qkv.dtype
    scale = dtype.type(1) / np.sqrt(dtype.type(head_dim))
    for task in prange(batch * kv_heads):
        b, shared = task // kv_heads, task % kv_heads
        keys, values = np.empty((padded, length), dtype), np.empty((padded, length), dtype)
        dkeys, dvalues = np.zeros((padded, length), dtype), np.zeros((padded, length), dtype)
        p, ds = np.empty((TILE, length), dtype), np.empty((TILE, length), dtype)
        queries, douts = np.zeros((TILE, padded), dtype), np.zeros((TILE, padded), dtype)
        dquery = np.empty(padded, dtype)
        _features(keys, qkv[b, :, heads + shared])
        _features(values, qkv[b, :, heads + kv_heads + shared])
        for head in range(shared * group, (shared + 1) * group):
            for first in range(0, length, TILE):
                # The tile's queries share the range low <= j < high; what a query doesn't see of it is zero in p and ds.
                low, high = start[b, first], min(first + TILE, length)
                p[:, low:high] = 0
                ds[:, low:high] = 0
                for r in range(high - first):
                    t = first + r
                    delta = dtype.type(0)
                    for d in range(head_dim):
                        queries[r, d] = qkv[b, t, head, d] * scale
                        douts[r, d] = dout[b, t, head, d]
                        delta += dout[b, t, head, d] * out[b, t, head, d]
                    see = start[b, t]
                    seen_p, seen_ds = p[r, see : t + 1], ds[r, see : t + 1]
                    _score_gradients(seen_p, seen_ds, queries[r], douts[r], keys, values, lse[b, head, t], delta, see)
                    _combine(dquery, seen_ds, keys, see)
                    for d in range(head_dim):
                        dqkv[b, t, head, d] = dquery[d] * scale
                _scatter(dkeys, ds, queries, low, high)
                _scatter(dvalues, p, douts, low, high)
        for t in range(length):
            for d in range(head_dim):
                dqkv[b, t, heads + shared, d] = dkeys[d, t]
                dqkv[b, t, heads + kv_heads + shared, d] = dvalues[d, t]
