"""SwiGLU: SiLU of the gate times the linear half."""

from typing import Any

import numpy as np
from numba import prange

from kernels.cpu.exponential import exp
from kernels.cpu.jit import pjit

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]


def swiglu_forward(out: Array, inp: Array) -> None:
    """out = gate * sigmoid(gate) * up.

    Args:
        out: (rows, F), overwritten.
        inp: (rows, 2 F), gate in the first half, up in the second; saved for the backward pass.

    Source: Shazeer 2020, arXiv:2002.05202, equation 6.
    """
    _forward(out, inp)


@pjit
def _forward(out, inp):  # type: ignore[no-untyped-def]
    rows, width = out.shape
    one = inp.dtype.type(1)
    for row in prange(rows):
        for i in range(width):
            gate = inp[row, i]
            out[row, i] = gate / (one + exp(-gate)) * inp[row, i + width]


def swiglu_backward(dinp: Array, dout: Array, inp: Array) -> None:
    """Gradient of SwiGLU. With s = sigmoid(gate):

        dgate = dout * up * s * (1 + gate * (1 - s))
        dup   = dout * gate * s

    Args:
        dinp: (rows, 2 F), overwritten.
        dout: (rows, F).
        inp:  (rows, 2 F), as in the forward pass.
    """
    _backward(dinp, dout, inp)


@pjit
def _backward(dinp, dout, inp):  # type: ignore[no-untyped-def]
    rows, width = dout.shape
    one = inp.dtype.type(1)
    for row in prange(rows):
        for i in range(width):
            gate, up, d = inp[row, i], inp[row, i + width], dout[row, i]
            s = one / (one + exp(-gate))
            dinp[row, i] = d * up * s * (one + gate * (one - s))
            dinp[row, i + width] = d * gate * s
