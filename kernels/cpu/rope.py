"""Rotary position embedding of queries and keys."""

from typing import Any

import numpy as np
from numba import prange

from kernels.cpu.jit import pjit

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]
Ids = np.ndarray[Any, np.dtype[np.int32]]


def rope_table(context: int, head_dim: int, base: float) -> Array:
    """cos and sin, (context, 2, D / 2) fp64, of angle[p, i] = p * base^(-2 i / D): position p, pair i."""
    angle = np.outer(np.arange(context), base ** (-np.arange(0, head_dim, 2) / head_dim))
    return np.stack((np.cos(angle), np.sin(angle)), axis=1)


def rope_forward(qkv: Array, start: Ids, table: Array, *, rotated: int) -> None:
    """Rotate each pair (a, b) = (i, i + D/2) of the query and key heads by its position's angle, in place.

        a' = a cos - b sin        b' = a sin + b cos        position = t - start[b, t]

    Args:
        qkv:     (B, T, H + 2 KV, D), the first `rotated` heads overwritten.
        start:   (B, T) int32, the index at which the token's document begins.
        table:   (context, 2, D / 2), from rope_table.
        rotated: H + KV, the number of query and key heads. The value heads stay.

    Source: Su et al. 2021, arXiv:2104.09864, in the two-halves order of the Llama models.
    """
    _rotate(qkv, start, table, rotated, qkv.dtype.type(1))


def rope_backward(dqkv: Array, start: Ids, table: Array, *, rotated: int) -> None:
    """Gradient of RoPE: the rotation by the opposite angle, in place.

    Args:
        dqkv: (B, T, H + 2 KV, D), the first `rotated` heads overwritten.
        start, table, rotated: as in the forward pass.
    """
    _rotate(dqkv, start, table, rotated, dqkv.dtype.type(-1))


@pjit
def _rotate(qkv, start, table, rotated, direction):  # type: ignore[no-untyped-def]
    batch, length, _, head_dim = qkv.shape
    half = head_dim // 2
    for row in prange(batch * length):
        b, t = row // length, row % length
        position = t - start[b, t]
        for head in range(rotated):
            for i in range(half):
                cos, sin = table[position, 0, i], direction * table[position, 1, i]
                first, second = qkv[b, t, head, i], qkv[b, t, head, i + half]
                qkv[b, t, head, i] = first * cos - second * sin
                qkv[b, t, head, i + half] = first * sin + second * cos
