"""The bias of a linear layer."""

from typing import Any

import numpy as np
from numba import prange

from kernels.cpu.jit import pjit

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]

# Column sums add the rows in this many fixed groups. So any number of threads gives the same sums.
GROUPS = 16


def bias_forward(out: Array, inp: Array, bias: Array) -> None:
    """out = inp + bias, row by row.

    Args:
        out:  (rows, C), overwritten; may alias inp.
        inp:  (rows, C).
        bias: (C,).
    """
    _forward(out, inp, bias)


@pjit
def _forward(out, inp, bias):  # type: ignore[no-untyped-def]
    for row in prange(out.shape[0]):
        for i in range(out.shape[1]):
            out[row, i] = inp[row, i] + bias[i]


def bias_backward(dbias: Array, dout: Array) -> None:
    """dbias += sum over rows of dout. (The gradient of inp is dout itself.)

    Args:
        dbias: (C,), accumulated.
        dout:  (rows, C).
    """
    _backward(dbias, dout)


@pjit
def _backward(dbias, dout):  # type: ignore[no-untyped-def]
    rows, dim = dout.shape
    partial = np.zeros((GROUPS, dim), dout.dtype)
    for group in prange(GROUPS):
        for row in range(rows * group // GROUPS, rows * (group + 1) // GROUPS):
            for i in range(dim):
                partial[group, i] += dout[row, i]
    for group in range(GROUPS):
        for i in range(dim):
            dbias[i] += partial[group, i]
