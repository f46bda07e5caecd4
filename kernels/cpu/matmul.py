"""The matmul of every linear layer.

    c (m, n) (+)= a (m, k) @ b (k, n)        b as panels of P columns, P the width of a tile

A task owns BLOCK rows and one panel of c. It reads its rows of a and its panel of b many times; both stay in
the core's caches. Each element's sum runs over k in a fixed order, so the result does not depend on the
number of threads.
"""

from typing import Any

import numpy as np
from numba import prange

from kernels.cpu.bias import bias_forward
from kernels.cpu.jit import pjit
from kernels.cpu.tile import FULL, HALF, VECTOR_BYTES, multiply

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]

# Rows of c per task, and the depth of k that a tile sums before the next tile starts.
BLOCK, DEPTH = 64, 512
# Up to this many rows, as in decoding, plain dot products are faster: tiles need a copy of the weight.
FEW = 16


def matmul_forward(out: Array, inp: Array, weight: Array, bias: Array | None = None) -> None:
    """out = inp @ weight^T (+ bias).

    Args:
        out:    (rows, outputs), overwritten.
        inp:    (rows, inputs).
        weight: (outputs, inputs).
        bias:   (outputs,), or None.
    """
    if len(inp) <= FEW:
        _dot_products(out, inp, weight)
    else:
        panels, edge = _panels(weight.T)
        _tiled_matmul(out, inp, _contiguous(panels), edge, add=False)
    if bias is not None:
        bias_forward(out, out, bias)


def matmul_backward(
    dinp: Array,
    dweight: Array,
    dout: Array,
    inp: Array,
    weight: Array,
    *,
    add_dinp: bool = False,
    add_dweight: bool = True,
) -> None:
    """Gradient of the matmul.

        dinp     = dout @ weight       (+= with add_dinp: prediction heads share their input)
        dweight += dout^T @ inp        (= without add_dweight: the first micro-batch of an update)

    Args:
        dinp:    (rows, inputs), overwritten, or accumulated with add_dinp.
        dweight: (outputs, inputs), accumulated, or overwritten without add_dweight.
        dout:    (rows, outputs).
        inp, weight: as in the forward pass.
    """
    weight_gradient(dweight, dout, inp, add_dweight)
    input_gradient(dinp, dout, weight, add_dinp)


def weight_gradient(dweight: Array, dout: Array, inp: Array, add: bool) -> None:
    """dweight = dout^T @ inp, or += with add: the first half of matmul_backward."""
    _tiled_matmul(dweight, dout.T, *_panels(inp), add=add)


def input_gradient(dinp: Array, dout: Array, weight: Array, add: bool) -> None:
    """dinp = dout @ weight, or += with add: the second half of matmul_backward."""
    _tiled_matmul(dinp, dout, *_panels(weight), add=add)


def _panels(b: Array) -> tuple[Array, Array]:
    """b (k, n) as a view of whole panels (n // P, k, P), and a zero-padded copy (k, P) of the rest."""
    panel = FULL * VECTOR_BYTES // b.itemsize
    depth, whole = b.shape[0], b.shape[1] // panel * panel
    edge = np.zeros((depth if whole < b.shape[1] else 0, panel), b.dtype)
    edge[:, : b.shape[1] - whole] = b[: len(edge), whole:]
    return b[:, :whole].reshape(depth, -1, panel).transpose(1, 0, 2), edge


@pjit
def _dot_products(out, inp, weight):  # type: ignore[no-untyped-def]
    """The matmul for few rows. A row's bits do not depend on the number of rows."""
    for output in prange(weight.shape[0]):
        for row in range(inp.shape[0]):
            total = out.dtype.type(0)
            for i in range(inp.shape[1]):
                total += inp[row, i] * weight[output, i]
            out[row, output] = total


@pjit
def _contiguous(panels):  # type: ignore[no-untyped-def]
    """A contiguous copy of the panels."""
    copy = np.empty(panels.shape, panels.dtype)
    for p in range(panels.shape[0]):
        for k in prange(panels.shape[1]):
            for j in range(panels.shape[2]):
                copy[p, k, j] = panels[p, k, j]
    return copy


@pjit
def _tiled_matmul(c, a, panels, edge, add):  # type: ignore[no-untyped-def]
    """c (+)= a @ b from _panels(b). The edge, narrower than a tile, is computed in a padded buffer."""
    (rows, columns), (count, _, panel) = c.shape, panels.shape
    blocks, tasks = (rows + BLOCK - 1) // BLOCK, count + (1 if edge.shape[0] else 0)
    unit = HALF * VECTOR_BYTES // c.itemsize
    edge_width = (columns - count * panel + unit - 1) // unit * unit
    for task in prange(blocks * tasks):
        p, first = task % tasks, task // tasks * BLOCK
        stop, first_column = min(first + BLOCK, rows), p * panel
        if p < count:
            for k in range(0, a.shape[1], DEPTH):
                terms = a[first:stop, k : k + DEPTH]
                multiply(
                    c[first:stop, first_column : first_column + panel], terms, panels[p, k:], add or k > 0
                )
        else:
            sums = np.zeros((BLOCK, edge_width), c.dtype)
            multiply(sums[: stop - first], a[first:stop], edge, False)
            for i in range(first, stop):
                for j in range(first_column, columns):
                    c[i, j] = sums[i - first, j - first_column] + (c[i, j] if add else c.dtype.type(0))
