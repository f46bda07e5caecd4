"""The first linear layer of GPT-2's MLP with its GELU, as one operation. A GPU may fuse them."""

from typing import Any

import numpy as np

from kernels.cpu.bias import bias_backward
from kernels.cpu.gelu import gelu_backward, gelu_forward
from kernels.cpu.matmul import matmul_backward, matmul_forward

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]


def matmul_gelu_forward(act: Array, up: Array, inp: Array, weight: Array, bias: Array | None = None) -> None:
    """up = inp @ weight^T (+ bias), act = gelu(up).

    Args:
        act:    (rows, F), overwritten.
        up:     (rows, F), overwritten; saved for the backward pass.
        inp:    (rows, inputs).
        weight: (F, inputs).
        bias:   (F,), or None.
    """
    matmul_forward(up, inp, weight, bias)
    gelu_forward(act, up)


def matmul_gelu_backward(
    dup: Array, dweight: Array, dout: Array, act: Array, up: Array, weight: Array, dbias: Array | None = None,
    *, add_dweight: bool = True,
) -> None:  # fmt: skip
    """Gradient of the layer that reads act, out = act @ weight^T, and of the GELU before it.

        dweight += dout^T @ act                    (= without add_dweight)
        dup      = (dout @ weight) * gelu'(up)
        dbias   += sum over rows of dup

    Args:
        dup:     (rows, F), overwritten.
        dweight: (outputs, F), accumulated, or overwritten without add_dweight.
        dout:    (rows, outputs).
        act, up: (rows, F), as in the forward pass.
        weight:  (outputs, F).
        dbias:   (F,), accumulated: the bias gradient of the layer that computed up. Or None.
    """
    matmul_backward(dup, dweight, dout, act, weight, add_dweight=add_dweight)
    gelu_backward(dup, dup, up)
    if dbias is not None:
        bias_backward(dbias, dup)
