"""The L2 norm of the whole gradient, for clipping."""

from typing import Any

import numpy as np
from numba import prange

from kernels.cpu.jit import pjit

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]

# Elements per chunk. A chunk is summed in the gradient's precision, the chunks in fp64.
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
