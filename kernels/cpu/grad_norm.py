"""The L2 norm of the whole gradient, for clipping."""

from typing import Any

import numpy as np
from numba import prange

from kernels.cpu.jit import pjit

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]

# Elements per chunk. A chunk is summed in the gradient's precision, the chunks in fp64.
CHUNK = 4096


def square_sums(out: Array, grads: Array) -> None:
    """out[i] = the sum of grads^2 over chunk i.

    Args:
        out:   (chunks,), overwritten.
        grads: (n,), n at most chunks * CHUNK.
    """
    _square_sums(out, grads)


@pjit
def _square_sums(out, grads):  # type: ignore[no-untyped-def]
    for chunk in prange(out.size):
        total = grads.dtype.type(0)
        for i in range(chunk * CHUNK, min(grads.size, (chunk + 1) * CHUNK)):
            total += grads[i] * grads[i]
        out[chunk] = total


def grad_norm(out: Array, sums: Array) -> None:
    """out = sqrt(sum of sums), in fp64: the norm of the flat gradient of all parameters.

    Args:
        out:  () fp64, overwritten.
        sums: (chunks,), from square_sums.
    """
    out[...] = np.sqrt(_sum(sums.astype(np.float64)))


@pjit
def _sum(values):  # type: ignore[no-untyped-def]
    return values.sum()
