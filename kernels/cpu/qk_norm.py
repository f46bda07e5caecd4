"""QK-norm: RMSNorm of each query and key head, fused with the rotation (RoPE) that follows it."""

from typing import Any

import numpy as np
from numba import prange

from kernels.cpu.bias import GROUPS
from kernels.cpu.jit import pjit

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]
Ids = np.ndarray[Any, np.dtype[np.int32]]


def qk_norm_forward(
    qkv: Array,
    rstd: Array,
    start: Ids,
    table: Array | None,
    query_weight: Array | None,
    key_weight: Array | None,
    *,
    kv_heads: int,
    eps: float,
) -> None:
    """Normalise each query and key head x, then rotate it, in place.

        rstd = 1 / sqrt(mean(x^2) + eps)        x = rope(x * rstd * weight)

    Args:
        qkv:   (B, T, H + 2 KV, D), the query and key heads overwritten; saved for the backward pass.
        rstd:  (B * T, H + KV), overwritten; saved for the backward pass.
        start: (B, T) int32, the index at which the token's document begins.
        table: (context, 2, D / 2), from rope_table. None: no rotation.
        query_weight, key_weight: (D,), shared by the heads. None: no weight.
        kv_heads: KV.
        eps:   added to the mean square.

    Source: Henry et al. 2020, arXiv:2010.04245; with RMSNorm, Dehghani et al. 2023, arXiv:2302.05442.
    """
    normed = qkv.shape[2] - kv_heads
    weights = _weights(qkv, query_weight, key_weight, kv_heads)
    by_head = rstd.reshape(*qkv.shape[:2], normed)
    _forward(qkv, by_head, start, *_rotation(qkv, table), weights, qkv.dtype.type(eps))


def _rotation(qkv: Array, table: Array | None) -> tuple[Array, int]:
    """A table, and the factor of positions in it. Without rotation all rows read the angle 0."""
    if table is not None:
        return table, 1
    cos_and_sin = np.stack((np.ones(qkv.shape[3] // 2), np.zeros(qkv.shape[3] // 2)))
    return cos_and_sin[None].astype(qkv.dtype), 0


def _weights(qkv: Array, query_weight: Array | None, key_weight: Array | None, kv_heads: int) -> Array:
    """(H + KV, D), the weight of each head; ones if there is none."""
    weights = np.ones((qkv.shape[2] - kv_heads, qkv.shape[3]), qkv.dtype)
    if query_weight is not None and key_weight is not None:
        weights[:-kv_heads], weights[-kv_heads:] = query_weight, key_weight
    return weights


@pjit
def _forward(qkv, rstd, start, table, rotates, weights, eps):  # type: ignore[no-untyped-def]
    batch, length, _, head_dim = qkv.shape
    half, one, width = head_dim // 2, qkv.dtype.type(1), qkv.dtype.type(head_dim)
    for row in prange(batch * length):
        b, t = row // length, row % length
        position = (t - start[b, t]) * rotates
        for head in range(weights.shape[0]):
            square_sum = qkv.dtype.type(0)
            for i in range(head_dim):
                square_sum += qkv[b, t, head, i] * qkv[b, t, head, i]
            r = one / np.sqrt(square_sum / width + eps)
            rstd[b, t, head] = r
            for i in range(half):
                cos, sin = table[position, 0, i], table[position, 1, i]
                first = qkv[b, t, head, i] * r * weights[head, i]
                second = qkv[b, t, head, i + half] * r * weights[head, i + half]
                qkv[b, t, head, i] = first * cos - second * sin
                qkv[b, t, head, i + half] = first * sin + second * cos


def qk_norm_backward(
    dqkv: Array,
    dquery_weight: Array | None,
    dkey_weight: Array | None,
    qkv: Array,
    rstd: Array,
    start: Ids,
    table: Array | None,
    query_weight: Array | None,
    key_weight: Array | None,
    *,
    kv_heads: int,
) -> None:
    """Gradient of QK-norm, in place. The forward pass kept only its result, from which xhat is recovered.

        dy = rotated back dqkv,  xhat = rotated back qkv / weight,  g = dy * weight
        dx       = rstd * (g - xhat * mean(g * xhat))
        dweight += sum over rows and heads of dy * xhat

    Where a weight is exactly 0, xhat is lost. It counts as 0 there, and the weight gets no gradient.

    Args:
        dqkv: (B, T, H + 2 KV, D), the gradients of query and key heads overwritten.
        dquery_weight, dkey_weight: (D,), accumulated. None without weights.
        qkv, rstd, start, table, query_weight, key_weight, kv_heads: as the forward pass left them.

    Source: dividing by the weight, as "memory efficient" norms of NVIDIA Apex do.
    """
    weights, shape = _weights(qkv, query_weight, key_weight, kv_heads), qkv.shape[:2]
    dweights = np.zeros((GROUPS, *weights.shape), qkv.dtype)
    _backward(dqkv, dweights, qkv, rstd.reshape(*shape, -1), start, *_rotation(qkv, table), weights)
    if dquery_weight is not None and dkey_weight is not None:
        head_sums = dweights.sum(axis=0)
        dquery_weight += head_sums[:-kv_heads].sum(axis=0)
        dkey_weight += head_sums[-kv_heads:].sum(axis=0)


@pjit
def _backward(dqkv, dweights, qkv, rstd, start, table, rotates, weights):  # type: ignore[no-untyped-def]
    batch, length, _, head_dim = qkv.shape
    half, zero, width = head_dim // 2, qkv.dtype.type(0), qkv.dtype.type(head_dim)
    rows = batch * length
    for group in prange(GROUPS):
        dy, xhat = np.empty(head_dim, qkv.dtype), np.empty(head_dim, qkv.dtype)
        for row in range(rows * group // GROUPS, rows * (group + 1) // GROUPS):
            b, t = row // length, row % length
            position = (t - start[b, t]) * rotates
            for head in range(weights.shape[0]):
                dot = zero  # of g and xhat, which is that of dqkv and qkv
                for i in range(half):
                    cos, sin = table[position, 0, i], table[position, 1, i]
                    dfirst, dsecond = dqkv[b, t, head, i], dqkv[b, t, head, i + half]
                    dy[i], dy[i + half] = dfirst * cos + dsecond * sin, dsecond * cos - dfirst * sin
                    first, second = qkv[b, t, head, i], qkv[b, t, head, i + half]
                    xhat[i], xhat[i + half] = first * cos + second * sin, second * cos - first * sin
                    dot += dfirst * first + dsecond * second
                mean = dot / width
                for i in range(head_dim):
                    weight = weights[head, i]
                    xhat[i] = xhat[i] / weight if weight != zero else zero
                    dweights[group, head, i] += dy[i] * xhat[i]
                    dqkv[b, t, head, i] = rstd[b, t, head] * (dy[i] * weight - xhat[i] * mean)
