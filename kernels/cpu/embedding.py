"""Token embedding, with a learned position embedding if the model has one."""

from typing import Any

import numpy as np
from numba import prange

from kernels.cpu.jit import pjit

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]
Ids = np.ndarray[Any, np.dtype[np.int32]]

# Columns per task of the backward pass. A task adds all rows of its columns in order, without a lock.
COLUMNS = 64


def embedding_forward(
    out: Array, tokens: Ids, start: Ids, weight: Array, position_weight: Array | None
) -> None:
    """Look up each token's row of weight, and add its position's row of position_weight.

        out[b, t] = weight[tokens[b, t]] + position_weight[t - start[b, t]]

    Args:
        out:      (B * T, C), overwritten.
        tokens:   (B, T) int32.
        start:    (B, T) int32, the index at which the token's document begins. Positions count from there.
        weight:   (Vp, C).
        position_weight: (context, C), or None if positions are not learned.
    """
    if position_weight is None:
        _forward(out, tokens.reshape(-1), weight)
    else:
        _forward_with_position(out, tokens, start, weight, position_weight)


@pjit
def _forward(out, tokens, weight):  # type: ignore[no-untyped-def]
    for row in prange(out.shape[0]):
        for i in range(out.shape[1]):
            out[row, i] = weight[tokens[row], i]


@pjit
def _forward_with_position(out, tokens, start, weight, position_weight):  # type: ignore[no-untyped-def]
    length = tokens.shape[1]
    for row in prange(out.shape[0]):
        b, t = row // length, row % length
        position = t - start[b, t]
        for i in range(out.shape[1]):
            out[row, i] = weight[tokens[b, t], i] + position_weight[position, i]


def embedding_backward(
    dweight: Array, dposition_weight: Array | None, dout: Array, tokens: Ids, start: Ids
) -> None:
    """Add each row's gradient to its token's row of dweight, and to its position's row of dposition_weight.

        dweight[tokens[b, t]]                += dout[b, t]
        dposition_weight[t - start[b, t]]    += dout[b, t]

    Args:
        dweight:          (Vp, C), accumulated in row order.
        dposition_weight: (context, C), accumulated in row order; or None.
        dout:             (B * T, C).
        tokens, start:    as in the forward pass.
    """
    _backward(dweight, dout, tokens.reshape(-1))
    if dposition_weight is not None:
        positions = np.arange(tokens.shape[1], dtype=np.int32) - start
        _backward(dposition_weight, dout, positions.reshape(-1))


@pjit
def _backward(dweight, dout, index):  # type: ignore[no-untyped-def]
    rows, dim = dout.shape
    for task in prange((dim + COLUMNS - 1) // COLUMNS):
        for row in range(rows):
            target = index[row]
            for i in range(task * COLUMNS, min(dim, (task + 1) * COLUMNS)):
                dweight[target, i] += dout[row, i]
