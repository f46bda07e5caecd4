"""Causal grouped-query attention, TILE queries at a time.

A task owns one key/value head of one sequence and all query heads that share it, so dk and dv are summed without a lock; the
documents of the sequence are separate problems one after the other. Keys and values of a document are copied once to rows of
one feature each (D, keys): every product then runs along the keys that a tile's queries may see and no others, and vectorises.
"""

from typing import Any

import numpy as np
from numba import prange

from kernels.cpu.exponential import exp
from kernels.cpu.jit import jit, pjit

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]
Ids = np.ndarray[Any, np.dtype[np.int32]]

# Queries, and features, taken together in an inner loop, where each value loaded serves TILE products. The loops below are
# written out for 4.
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
    """Copy rows (keys, D) to the first columns of (D rounded up to TILE, T); the rows that padding adds stay zero."""
    for j in range(rows.shape[0]):
        for d in range(rows.shape[1]):
            columns[d, j] = rows[j, d]


@jit
def _gather(vectors, rows, scale):  # type: ignore[no-untyped-def]
    """vectors[r] = rows[r] * scale for up to TILE rows (n, D); what is left of the tile becomes zero."""
    vectors[rows.shape[0] :] = 0
    for r in range(rows.shape[0]):
        for d in range(rows.shape[1]):
            vectors[r, d] = rows[r, d] * scale


@jit
def _project(scores, vectors, columns, keys):  # type: ignore[no-untyped-def]
    """scores[r, j] = vectors[r] . columns[:, j] for the TILE queries r and j < keys."""
    s0, s1, s2, s3 = scores[0], scores[1], scores[2], scores[3]
    scores[:, :keys] = 0
    for d in range(0, columns.shape[0], TILE):
        c0, c1, c2, c3 = columns[d], columns[d + 1], columns[d + 2], columns[d + 3]
        a0, a1, a2, a3 = vectors[0, d], vectors[0, d + 1], vectors[0, d + 2], vectors[0, d + 3]
        b0, b1, b2, b3 = vectors[1, d], vectors[1, d + 1], vectors[1, d + 2], vectors[1, d + 3]
        for j in range(keys):
            s0[j] += a0 * c0[j] + a1 * c1[j] + a2 * c2[j] + a3 * c3[j]
            s1[j] += b0 * c0[j] + b1 * c1[j] + b2 * c2[j] + b3 * c3[j]
        a0, a1, a2, a3 = vectors[2, d], vectors[2, d + 1], vectors[2, d + 2], vectors[2, d + 3]
        b0, b1, b2, b3 = vectors[3, d], vectors[3, d + 1], vectors[3, d + 2], vectors[3, d + 3]
        for j in range(keys):
            s2[j] += a0 * c0[j] + a1 * c1[j] + a2 * c2[j] + a3 * c3[j]
            s3[j] += b0 * c0[j] + b1 * c1[j] + b2 * c2[j] + b3 * c3[j]


@jit
def _combine(vectors, scores, columns, keys):  # type: ignore[no-untyped-def]
    """vectors[r, d] = sum over j < keys of scores[r, j] * columns[d, j] for the TILE queries r."""
    s0, s1, s2, s3 = scores[0], scores[1], scores[2], scores[3]
    zero = vectors.dtype.type(0)
    for d in range(0, columns.shape[0], 2):
        c0, c1 = columns[d], columns[d + 1]
        a0, a1, a2, a3 = zero, zero, zero, zero
        b0, b1, b2, b3 = zero, zero, zero, zero
        for j in range(keys):
            a0 += s0[j] * c0[j]
            a1 += s1[j] * c0[j]
            a2 += s2[j] * c0[j]
            a3 += s3[j] * c0[j]
            b0 += s0[j] * c1[j]
            b1 += s1[j] * c1[j]
            b2 += s2[j] * c1[j]
            b3 += s3[j] * c1[j]
        vectors[0, d], vectors[1, d], vectors[2, d], vectors[3, d] = a0, a1, a2, a3
        vectors[0, d + 1], vectors[1, d + 1], vectors[2, d + 1], vectors[3, d + 1] = b0, b1, b2, b3


@jit
def _scatter(columns, scores, vectors, keys):  # type: ignore[no-untyped-def]
    """columns[d, j] += sum over the TILE queries r of vectors[r, d] * scores[r, j] for j < keys."""
    s0, s1, s2, s3 = scores[0], scores[1], scores[2], scores[3]
    for d in range(columns.shape[0]):
        column = columns[d]
        a0, a1, a2, a3 = vectors[0, d], vectors[1, d], vectors[2, d], vectors[3, d]
        for j in range(keys):
            column[j] += a0 * s0[j] + a1 * s1[j] + a2 * s2[j] + a3 * s3[j]


@jit
def _softmax(score, seen, keys):  # type: ignore[no-untyped-def]
    """Turn the first `seen` scores into their softmax and the others below `keys` into 0; return log sum exp."""
    largest = score[0]
    for j in range(1, seen):
        largest = max(largest, score[j])
    total = score.dtype.type(0)
    for j in range(seen):
        weight = exp(score[j] - largest)
        score[j] = weight
        total += weight
    scale = score.dtype.type(1) / total
    for j in range(seen):
        score[j] *= scale
    score[seen:keys] = 0
    return largest + np.log(total)


@pjit
def _forward(out, lse, qkv, start):  # type: ignore[no-untyped-def]
    batch, length, heads, head_dim = out.shape
    kv_heads = (qkv.shape[2] - heads) // 2
    group, dtype = heads // kv_heads, qkv.dtype
    padded = (head_dim + TILE - 1) // TILE * TILE
    scale = dtype.type(1) / np.sqrt(dtype.type(head_dim))
    for task in prange(batch * kv_heads):
        b, shared = task // kv_heads, task % kv_heads
        keys, values = np.zeros((padded, length), dtype), np.zeros((padded, length), dtype)
        scores = np.empty((TILE, length), dtype)
        queries, means = np.zeros((TILE, padded), dtype), np.empty((TILE, padded), dtype)
        begin = 0
        while begin < length:
            end = _document_end(start, b, begin)
            _features(keys, qkv[b, begin:end, heads + shared])
            _features(values, qkv[b, begin:end, heads + kv_heads + shared])
            for head in range(shared * group, (shared + 1) * group):
                for first in range(begin, end, TILE):
                    high = min(first + TILE, end)
                    _gather(queries, qkv[b, first:high, head], scale)
                    _project(scores, queries, keys, high - begin)
                    for t in range(first, high):
                        lse[b, head, t] = _softmax(scores[t - first], t + 1 - begin, high - begin)
                    _combine(means, scores, values, high - begin)
                    for t in range(first, high):
                        for d in range(head_dim):
                            out[b, t, head, d] = means[t - first, d]
            begin = end


@jit
def _document_end(start, b, begin):  # type: ignore[no-untyped-def]
    """The first position after the document that begins at `begin`."""
    end = begin + 1
    while end < start.shape[1] and start[b, end] == begin:
        end += 1
    return end


@jit
def _score_gradient(p, ds, lse, delta, seen, keys):  # type: ignore[no-untyped-def]
    """From scores and dout . v of one query to p and ds, without the scale, which q and dq carry; 0 where unseen."""
    for j in range(seen):
        weight = exp(p[j] - lse)
        p[j] = weight
        ds[j] = weight * (ds[j] - delta)
    p[seen:keys] = 0
    ds[seen:keys] = 0


@pjit
def _backward(dqkv, dout, out, lse, qkv, start):  # type: ignore[no-untyped-def]
    batch, length, heads, head_dim = out.shape
    kv_heads = (qkv.shape[2] - heads) // 2
    group, dtype = heads // kv_heads, qkv.dtype
    padded = (head_dim + TILE - 1) // TILE * TILE
    one = dtype.type(1)
    scale = one / np.sqrt(dtype.type(head_dim))
    for task in prange(batch * kv_heads):
        b, shared = task // kv_heads, task % kv_heads
        keys, values = np.zeros((padded, length), dtype), np.zeros((padded, length), dtype)
        dkeys, dvalues = np.empty((padded, length), dtype), np.empty((padded, length), dtype)
        p, ds = np.empty((TILE, length), dtype), np.empty((TILE, length), dtype)
        queries, douts = np.zeros((TILE, padded), dtype), np.zeros((TILE, padded), dtype)
        dqueries = np.empty((TILE, padded), dtype)
        begin = 0
        while begin < length:
            end = _document_end(start, b, begin)
            _features(keys, qkv[b, begin:end, heads + shared])
            _features(values, qkv[b, begin:end, heads + kv_heads + shared])
            dkeys[:, : end - begin] = 0
            dvalues[:, : end - begin] = 0
            for head in range(shared * group, (shared + 1) * group):
                for first in range(begin, end, TILE):
                    high = min(first + TILE, end)
                    _gather(queries, qkv[b, first:high, head], scale)
                    _gather(douts, dout[b, first:high, head], one)
                    _project(p, queries, keys, high - begin)
                    _project(ds, douts, values, high - begin)
                    for t in range(first, high):
                        delta = dtype.type(0)
                        for d in range(head_dim):
                            delta += dout[b, t, head, d] * out[b, t, head, d]
                        r = t - first
                        _score_gradient(p[r], ds[r], lse[b, head, t], delta, t + 1 - begin, high - begin)
                    _combine(dqueries, ds, keys, high - begin)
                    _scatter(dkeys, ds, queries, high - begin)
                    _scatter(dvalues, p, douts, high - begin)
                    for t in range(first, high):
                        for d in range(head_dim):
                            dqkv[b, t, head, d] = dqueries[t - first, d] * scale
            for t in range(begin, end):
                for d in range(head_dim):
                    dqkv[b, t, heads + shared, d] = dkeys[d, t - begin]
                    dqkv[b, t, heads + kv_heads + shared, d] = dvalues[d, t - begin]
            begin = end
