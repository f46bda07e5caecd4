"""The product of every linear layer.

    c (m, n) (+)= a (m, k) @ b (k, n)        b as panels of P columns, those of a tile

A task owns BLOCK rows and one panel of c; what it reads again and again, its rows of a and the panel of b, stays in the core's
caches. Each element's sum runs over k in one order, so the result does not depend on the number of threads.
"""

from typing import Any

import numpy as np
from numba import prange

from kernels.cpu.bias import bias_forward
from kernels.cpu.jit import pjit
from kernels.cpu.tile import FULL, HALF, VECTOR_BYTES, multiply

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]

# Rows of c in a task, and terms of its sums before the next tile's turn.
BLOCK, DEPTH = 64, 512
# Up to this many rows, as decoding has, a copy of the weight in panels would take longer than what the tiles save.
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
        _product(out, inp, _contiguous(panels), edge, False)
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
    """Gradient of the product.

        dinp     = dout @ weight       (+= where add_dinp: several products of one input, as the prediction heads)
        dweight += dout^T @ inp        (= where not add_dweight: the first of several)

    Args:
        dinp:    (rows, inputs), overwritten, or accumulated with add_dinp.
        dweight: (outputs, inputs), accumulated, or overwritten without add_dweight.
        dout:    (rows, outputs).
        inp, weight: the forward pass's.
    """
    weight_gradient(dweight, dout, inp, add_dweight)
    input_gradient(dinp, dout, weight, add_dinp)


def weight_gradient(dweight: Array, dout: Array, inp: Array, add: bool) -> None:
    """dweight = dout^T @ inp, or += where `add`: matmul_backward's first half."""
    _product(dweight, dout.T, *_panels(inp), add)


def input_gradient(dinp: Array, dout: Array, weight: Array, add: bool) -> None:
    """dinp = dout @ weight, or += where `add`: its second half."""
    _product(dinp, dout, *_panels(weight), add)


def _panels(b: Array) -> tuple[Array, Array]:
    """b (k, n) as panels (n // P, k, P) of a tile's columns, a view, and a copy (k, P) of the columns left, zeros beyond."""
    panel = FULL * VECTOR_BYTES // b.itemsize
    depth, whole = b.shape[0], b.shape[1] // panel * panel
    edge = np.zeros((depth if whole < b.shape[1] else 0, panel), b.dtype)
    edge[:, : b.shape[1] - whole] = b[: len(edge), whole:]
    return b[:, :whole].reshape(depth, -1, panel).transpose(1, 0, 2), edge


@pjit
def _dot_products(out, inp, weight):  # type: ignore[no-untyped-def]
    """For few rows; each row's bits do not depend on how many there are."""
    for output in prange(weight.shape[0]):
        for row in range(inp.shape[0]):
            total = out.dtype.type(0)
            for i in range(inp.shape[1]):
                total += inp[row, i] * weight[output, i]
            out[row, output] = total


@pjit
def _contiguous(panels):  # type: ignore[no-untyped-def]
    """A copy whose rows lie one after the other."""
    copy = np.empty(panels.shape, panels.dtype)
    for p in range(panels.shape[0]):
        for k in prange(panels.shape[1]):
            for j in range(panels.shape[2]):
                copy[p, k, j] = panels[p, k, j]
    return copy


@pjit
def _product(c, a, panels, edge, add):  # type: ignore[no-untyped-def]
    """c (+)= a @ b from _panels(b); the columns of the edge, fewer than a tile's, go through memory of a tile's width."""
    (rows, columns), (count, _, panel) = c.shape, panels.shape
    blocks, tasks = (rows + BLOCK - 1) // BLOCK, count + (1 if edge.shape[0] else 0)
    unit = HALF * VECTOR_BYTES // c.itemsize
    wide = (columns - count * panel + unit - 1) // unit * unit
    for task in prange(blocks * tasks):
        p, first = task % tasks, task // tasks * BLOCK
        last, left = min(first + BLOCK, rows), p * panel
        if p < count:
            for k in range(0, a.shape[1], DEPTH):
                terms = a[first:last, k : k + DEPTH]
                multiply(c[first:last, left : left + panel], terms, panels[p, k:], add or k > 0)
        else:
            sums = np.zeros((BLOCK, wide), c.dtype)
            multiply(sums[: last - first], a[first:last], edge, False)
            for i in range(first, last):
                for j in range(left, columns):
                    c[i, j] = sums[i - first, j - left] + (c[i, j] if add else c.dtype.type(0))
