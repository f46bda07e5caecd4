"""GELU, in GPT-2's tanh form."""

import math
from typing import Any

import numpy as np
from numba import prange

from kernels.cpu.exponential import exp
from kernels.cpu.jit import pjit

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]

SCALE = math.sqrt(2 / math.pi)
CUBIC = 0.044715


def gelu_forward(out: Array, inp: Array) -> None:
    """out = x / 2 * (1 + tanh(u)) = x * sigmoid(2 u), with u = sqrt(2 / pi) * (x + 0.044715 x^3).

    Args:
        out: (rows, F), overwritten.
        inp: (rows, F), saved for the backward pass.

    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.
    """
    _forward(out, inp)


@pjit
def _forward(out, inp):  # type: ignore[no-untyped-def]
    one, scale, cubic = inp.dtype.type(1), inp.dtype.type(2 * SCALE), inp.dtype.type(CUBIC)
    for row in prange(inp.shape[0]):
        for i in range(inp.shape[1]):
            x = inp[row, i]
            out[row, i] = x / (one + exp(-(scale * (x + cubic * x * x * x))))


def gelu_backward(dinp: Array, dout: Array, inp: Array) -> None:
    """Gradient of GELU. With s = sigmoid(2 u) and u' = sqrt(2 / pi) * (1 + 3 * 0.044715 x^2):

        dinp = dout * (s + x * s * (1 - s) * 2 u')

    Args:
        dinp: (rows, F), overwritten; may alias dout.
        dout: (rows, F).
        inp:  (rows, F), as in the forward pass.
    """
    _backward(dinp, dout, inp)


@pjit
def _backward(dinp, dout, inp):  # type: ignore[no-untyped-def]
    one, three = inp.dtype.type(1), inp.dtype.type(3)
    scale, cubic = inp.dtype.type(2 * SCALE), inp.dtype.type(CUBIC)
    for row in prange(inp.shape[0]):
        for i in range(inp.shape[1]):
            x = inp[row, i]
            s = one / (one + exp(-(scale * (x + cubic * x * x * x))))
            slope = scale * (one + three * cubic * x * x)
            dinp[row, i] = dout[row, i] * (s + x * s * (one - s) * slope)
