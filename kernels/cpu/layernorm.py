"""LayerNorm, alone or fused with the residual addition before it."""

from typing import Any

import numpy as np
from numba import prange

from kernels.cpu.bias import GROUPS, bias_backward, bias_forward
from kernels.cpu.jit import pjit

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]


def layernorm_forward(
    out: Array, mean: Array, rstd: Array, inp: Array, weight: Array, bias: Array, *, eps: float
) -> None:
    """Normalise each row to mean 0 and variance 1, then scale by weight and add bias.

        mean = mean(inp)        rstd = 1 / sqrt(mean((inp - mean)^2) + eps)
        out  = (inp - mean) * rstd * weight + bias

    Args:
        out:        (rows, C), overwritten.
        mean, rstd: (rows,), overwritten; saved for the backward pass.
        inp:        (rows, C).
        weight, bias: (C,).

    Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450, equation 4.
    """
    _forward(inp, out, mean, rstd, inp, inp, weight, bias, inp.dtype.type(eps), False)


@pjit
def _forward(  # type: ignore[no-untyped-def]
    residual_out, out, mean, rstd, residual, branch, weight, bias, eps, add
):
    rows, dim = branch.shape
    one, width = branch.dtype.type(1), branch.dtype.type(dim)
    for row in prange(rows):
        if add:
            for i in range(dim):
                residual_out[row, i] = residual[row, i] + branch[row, i]
        total = branch.dtype.type(0)
        for i in range(dim):
            total += residual_out[row, i]
        m = total / width
        square_sum = branch.dtype.type(0)
        for i in range(dim):
            square_sum += (residual_out[row, i] - m) * (residual_out[row, i] - m)
        r = one / np.sqrt(square_sum / width + eps)
        mean[row] = m
        rstd[row] = r
        for i in range(dim):
            out[row, i] = (residual_out[row, i] - m) * r * weight[i] + bias[i]


def layernorm_backward(
    dinp: Array,
    dweight: Array,
    dbias: Array,
    dout: Array,
    inp: Array,
    weight: Array,
    mean: Array,
    rstd: Array,
) -> None:
    """Gradient of LayerNorm. With xhat = (inp - mean) * rstd and g = dout * weight:

        dinp     = rstd * (g - mean(g) - xhat * mean(g * xhat))
        dweight += sum over rows of dout * xhat
        dbias   += sum over rows of dout

    Args:
        dinp:           (rows, C), overwritten; may alias dout.
        dweight, dbias: (C,), accumulated.
        dout:           (rows, C).
        inp, weight, mean, rstd: as in the forward pass.
    """
    _backward(dinp, dweight, dbias, dinp, dout, inp, weight, mean, rstd, False)


@pjit
def _backward(  # type: ignore[no-untyped-def]
    dinp, dweight, dbias, dresidual, dout, inp, weight, mean, rstd, add
):
    rows, dim = inp.shape
    width = inp.dtype.type(dim)
    partial_weight = np.zeros((GROUPS, dim), inp.dtype)
    partial_bias = np.zeros((GROUPS, dim), inp.dtype)
    for group in prange(GROUPS):
        for row in range(rows * group // GROUPS, rows * (group + 1) // GROUPS):
            m, r = mean[row], rstd[row]
            total, dot = inp.dtype.type(0), inp.dtype.type(0)
            for i in range(dim):
                g = dout[row, i] * weight[i]
                total += g
                dot += g * (inp[row, i] - m) * r
            total /= width
            dot /= width
            for i in range(dim):
                partial_weight[group, i] += dout[row, i] * (inp[row, i] - m) * r
                partial_bias[group, i] += dout[row, i]
            if add:
                for i in range(dim):
                    xhat = (inp[row, i] - m) * r
                    dinp[row, i] = dresidual[row, i] + r * (dout[row, i] * weight[i] - total - xhat * dot)
            else:
                for i in range(dim):
                    xhat = (inp[row, i] - m) * r
                    dinp[row, i] = r * (dout[row, i] * weight[i] - total - xhat * dot)
    for group in range(GROUPS):
        for i in range(dim):
            dweight[i] += partial_weight[group, i]
            dbias[i] += partial_bias[group, i]


def residual_layernorm_forward(
    residual_out: Array,
    out: Array,
    mean: Array,
    rstd: Array,
    residual: Array,
    branch: Array,
    branch_bias: Array | None,
    weight: Array,
    bias: Array,
    *,
    eps: float,
) -> None:
    """Add a branch to the residual stream (one Euler step), and normalise the sum for the next branch.

        residual_out = residual + branch (+ branch_bias)
        out          = layernorm(residual_out)

    Args:
        residual_out:    (rows, C), overwritten; saved for the backward pass.
        out, mean, rstd: as in layernorm_forward.
        residual:        (rows, C), the stream before the step.
        branch:          (rows, C), the output of attention or of the MLP.
        branch_bias:     (C,), the bias of the branch's last linear layer, or None.
    """
    if branch_bias is not None:
        bias_forward(residual_out, branch, branch_bias)
        branch = residual_out
    _forward(residual_out, out, mean, rstd, residual, branch, weight, bias, branch.dtype.type(eps), True)


def residual_layernorm_backward(
    dinp: Array,
    dweight: Array,
    dbias: Array,
    dbranch_bias: Array | None,
    dresidual_out: Array | None,
    dout: Array,
    residual_out: Array,
    weight: Array,
    mean: Array,
    rstd: Array,
) -> None:
    """Gradient of residual_layernorm. residual_out is a sum, so residual and branch both get dinp.

        dinp          = dresidual_out + layernorm_backward's dinp at residual_out
        dbranch_bias += sum over rows of dinp

    Args:
        dinp:           (rows, C), overwritten; may alias dresidual_out.
        dweight, dbias: (C,), accumulated.
        dbranch_bias:   (C,), accumulated, or None.
        dresidual_out:  (rows, C), the gradient that arrives along the stream, or None.
        dout:           (rows, C), the gradient of the normalised output.
        residual_out, weight, mean, rstd: as in the forward pass.
    """
    if dresidual_out is None:
        layernorm_backward(dinp, dweight, dbias, dout, residual_out, weight, mean, rstd)
    else:
        _backward(dinp, dweight, dbias, dresidual_out, dout, residual_out, weight, mean, rstd, True)
    if dbranch_bias is not None:
        bias_backward(dbranch_bias, dinp)
