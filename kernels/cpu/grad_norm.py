"""The length of the whole gradient, by which it is clipped."""

from typing import Any

import numpy as np
from numba import prange

from kernels.cpu.jit import pjit

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]

# Elements summed in the gradient's own precision before they join the fp64 total.
CHUNK = 4096


def grad_norm(out: Array, grads: Array) -> None:
    """out = sqrt(sum of grads^2) over the flat gradient of all parameters.

    Args:
        out:   () fp64, overwritten.
        grads: (parameters,).
    """
    out[...] = np.sqrt(_square_sum(grads))


@pjit
def _square_sum(grads):  # type: ignore[no-untyped-def]
    chunks = (grads.size + CHUNK - 1) // CHUNK
    partial = np.empty(chunks, np.float64)
    for chunk in prange(chunks):
        total = grads.dtype.type(0)
        for i in range(chunk * CHUNK, min(grads.size, (chunk + 1) * CHUNK)):
            total += grads[i] * grads[i]
        partial[chunk] = total
    return partial.sum()
