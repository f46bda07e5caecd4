"""The product of every linear layer, by NumPy's matrix library."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]


def matmul_forward(out: Array, inp: Array, weight: Array) -> None:
    """out = inp @ weight^T.

    Args:
        out:    (rows, outputs), overwritten.
        inp:    (rows, inputs).
        weight: (outputs, inputs).
    """
    np.matmul(inp, weight.T, out=out)


def matmul_backward(
    dinp: Array, dweight: Array, dout: Array, inp: Array, weight: Array, scratch: Array, *, add_dinp: bool = False
) -> None:
    """Gradient of the product.

        dinp     = dout @ weight       (+= where add_dinp: several products of one input, as the prediction heads)
        dweight += dout^T @ inp

    Args:
        dinp:    (rows, inputs), overwritten, or accumulated with add_dinp.
        dweight: (outputs, inputs), accumulated.
        dout:    (rows, outputs).
        inp, weight: the forward pass's.
        scratch: (at least max(dweight.size, dinp.size if add_dinp),), overwritten: NumPy's product cannot accumulate.
    """
    product = scratch[: dweight.size].reshape(dweight.shape)
    np.matmul(dout.T, inp, out=product)
    np.add(dweight, product, out=dweight)
    if add_dinp:
        product = scratch[: dinp.size].reshape(dinp.shape)
        np.matmul(dout, weight, out=product)
        np.add(dinp, product, out=dinp)
    else:
        np.matmul(dout, weight, out=dinp)
