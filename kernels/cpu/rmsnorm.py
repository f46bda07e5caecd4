"""RMSNorm, alone or fused with the residual addition before it."""

from typing import Any

import numpy as np
from numba import prange

from kernels.cpu.bias import GROUPS, bias_backward, bias_forward
from kernels.cpu.jit import pjit

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]


def rmsnorm_forward(out: Array, rstd: Array, inp: Array, weight: Array, *, eps: float) -> None:
    """Scale each row to a root mean square of 1, then by weight.

        rstd = 1 / sqrt(mean(inp^2) + eps)
        out  = inp * rstd * weight

    Args:
        out:    (rows, C), overwritten.
        rstd:   (rows,), overwritten; saved for the backward pass.
        inp:    (rows, C).
        weight: (C,).

    Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.
    """
    _forward(out, rstd, inp, weight, inp.dtype.type(eps))


@pjit
def _forward(out, rstd, inp, weight, eps):  # type: ignore[no-untyped-def]
    rows, dim = inp.shape
    one, width = inp.dtype.type(1), inp.dtype.type(dim)
    for row in prange(rows):
        square_sum = inp.dtype.type(0)
        for i in range(dim):
            square_sum += inp[row, i] * inp[row, i]
        r = one / np.sqrt(square_sum / width + eps)
        rstd[row] = r
        for i in range(dim):
            out[row, i] = inp[row, i] * r * weight[i]


def rmsnorm_backward(
    dinp: Array, dweight: Array, dout: Array, inp: Array, weight: Array, rstd: Array
) -> None:
    """Gradient of RMSNorm. With xhat = inp * rstd and g = dout * weight:

        dinp     = rstd * (g - xhat * mean(g * xhat))
        dweight += sum over rows of dout * xhat

    Args:
        dinp:    (rows, C), overwritten; may alias dout.
        dweight: (C,), accumulated.
        dout:    (rows, C).
        inp, weight, rstd: as in the forward pass.
    """
    _backward(dinp, dweight, dinp, dout, inp, weight, rstd, False)


@pjit
def _backward(dinp, dweight, dresidual, dout, inp, weight, rstd, add):  # type: ignore[no-untyped-def]
    rows, dim = inp.shape
    width = inp.dtype.type(dim)
    partial = np.zeros((GROUPS, dim), inp.dtype)
    for group in prange(GROUPS):
        for row in range(rows * group // GROUPS, rows * (group + 1) // GROUPS):
            r = rstd[row]
            dot = inp.dtype.type(0)
            for i in range(dim):
                dot += dout[row, i] * weight[i] * inp[row, i]
            projection = dot * r * r * r / width
            for i in range(dim):
                partial[group, i] += dout[row, i] * inp[row, i] * r
            if add:
                for i in range(dim):
                    d = dout[row, i] * weight[i] * r - inp[row, i] * projection
                    dinp[row, i] = dresidual[row, i] + d
            else:
                for i in range(dim):
                    dinp[row, i] = dout[row, i] * weight[i] * r - inp[row, i] * projection
    for group in range(GROUPS):
        for i in range(dim):
            dweight[i] += partial[group, i]


def residual_rmsnorm_forward(
    residual_out: Array,
    out: Array,
    rstd: Array,
    residual: Array,
    branch: Array,
    branch_bias: Array | None,
    weight: Array,
    *,
    eps: float,
) -> None:
    """Add a branch to the residual stream (one Euler step), and normalise the sum for the next branch.

        residual_out = residual + branch (+ branch_bias)
        out          = rmsnorm(residual_out)

    Args:
        residual_out: (rows, C), overwritten; saved for the backward pass.
        out, rstd:    as in rmsnorm_forward.
        residual:     (rows, C), the stream before the step.
        branch:       (rows, C), the output of attention or of the MLP.
        branch_bias:  (C,), the bias of the branch's last linear layer, or None.
    """
    if branch_bias is not None:
        bias_forward(residual_out, branch, branch_bias)
        branch = residual_out
    _residual_forward(residual_out, out, rstd, residual, branch, weight, branch.dtype.type(eps))


@pjit
def _residual_forward(residual_out, out, rstd, residual, branch, weight, eps):  # type: ignore[no-untyped-def]
    rows, dim = branch.shape
    one, width = branch.dtype.type(1), branch.dtype.type(dim)
    for row in prange(rows):
        square_sum = branch.dtype.type(0)
        for i in range(dim):
            x = residual[row, i] + branch[row, i]
            residual_out[row, i] = x
            square_sum += x * x
        r = one / np.sqrt(square_sum / width + eps)
        rstd[row] = r
        for i in range(dim):
            out[row, i] = residual_out[row, i] * r * weight[i]


def residual_rmsnorm_backward(
    dinp: Array,
    dweight: Array,
    dbranch_bias: Array | None,
    dresidual_out: Array | None,
    dout: Array,
    residual_out: Array,
    weight: Array,
    rstd: Array,
) -> None:
    """Gradient of residual_rmsnorm. residual_out is a sum, so residual and branch both get dinp.

        dinp          = dresidual_out + rmsnorm_backward's dinp at residual_out
        dbranch_bias += sum over rows of dinp

    Args:
        dinp:          (rows, C), overwritten; may alias dresidual_out.
        dweight:       (C,), accumulated.
        dbranch_bias:  (C,), accumulated, or None.
        dresidual_out: (rows, C), the gradient that arrives along the stream, or None.
        dout:          (rows, C), the gradient of the normalised output.
        residual_out, weight, rstd: as in the forward pass.
    """
    if dresidual_out is None:
        rmsnorm_backward(dinp, dweight, dout, residual_out, weight, rstd)
    else:
        _backward(dinp, dweight, dresidual_out, dout, residual_out, weight, rstd, True)
    if dbranch_bias is not None:
        bias_backward(dbranch_bias, dinp)
