"""Muon: momentum of a hidden matrix, with all its singular values brought near 1."""

from typing import Any

import numpy as np
from numba import prange

from kernels.cpu.jit import pjit
from kernels.cpu.matmul import input_gradient, matmul_forward, weight_gradient

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]

MOMENTUM = 0.95
# Of the polynomial that an iteration applies to each singular value: ITERATIONS take 0.0015 .. 1 to 0.67 .. 1.21.
COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5
# The root mean poly of an update's elements is about that of AdamW's, so that one learning rate and decay serve both.
SCALE = 0.2


def muon(
    params: Array,
    exp_avg: Array,
    grads: Array,
    compute_weights: Array | None,
    x: Array,
    x_next: Array,
    gram: Array,
    poly: Array,
    grad_norm: Array,
    lr: Array,
    *,
    weight_decay: float,
    grad_clip: float,
) -> None:
    """One update of matrices (m, n) with decoupled weight decay, the gradient clipped on the way.

    Where grad_norm is not finite nothing but the scratch changes. Otherwise, with mu = MOMENTUM and a, b, c = COEFFICIENTS,
    for each matrix by itself:

        g       = grads * min(1, grad_clip / grad_norm)             (no clipping where grad_clip is 0)
        exp_avg = mu * exp_avg + (1 - mu) * g
        u       = mu * exp_avg + (1 - mu) * g                       (Nesterov: where the momentum will be)
        x       = u / sqrt(sum of u^2)                              (0 where u is 0)
        x       = (a I + b G + c G^2) x,  G = x x^T                 ITERATIONS times
        params  = params * (1 - lr * weight_decay) - lr * SCALE * sqrt(max(m, n)) * x
        compute_weights    = params                                            (rounded to the compute_weights's type)

    With x = U S V^T an iteration keeps U and V and takes each singular value s to a s + b s^3 + c s^5, which leads those that
    are not tiny to 0.67 .. 1.21: x comes near U V^T, the step that is steepest where a step's spectral norm is what is limited.
    Where m > n, G = x^T x, the smaller one, multiplies from the right; that is the same.

    Args:
        params, exp_avg: (layers, count, m, n), updated; here and below layers may lie apart.
        grads:     (layers, count, m, n).
        compute_weights: (layers, count, m, n), overwritten: the weights as matmuls read them; None: they read params.
        x, x_next:  (layers * count, m, n), scratch.
        gram, poly: (layers * count, k, k), k = min(m, n), scratch.
        grad_norm: () fp64, the norm of the gradient of all parameters.
        lr:        () fp64, the learning rate of this update.

    Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon; the scale: Liu et al. 2025, arXiv:2502.16982, section 2.2.
    """
    if not np.isfinite(grad_norm):
        return
    clip = min(1.0, grad_clip / float(grad_norm)) if grad_clip > 0 and grad_norm > 0 else 1.0
    gradient = np.array([clip, MOMENTUM, 1 - MOMENTUM], x.dtype)
    step = np.array([1 - lr * weight_decay, lr * SCALE * np.sqrt(max(params.shape[2:]))], params.dtype)
    for place in np.ndindex(params.shape[:2]):
        old, new = x[0], x_next[0]  # all in the same scratch, which stays in the cache
        squares = _look_ahead(exp_avg[place], old, grads[place], gradient)
        old *= 1 / np.sqrt(squares) if squares > 0 else 0
        for _ in range(ITERATIONS):
            iterate(new, gram[0], poly[0], old)
            old, new = new, old
        _apply(params[place], old, step)
    if compute_weights is not None:
        compute_weights[...] = params


def iterate(out: Array, gram: Array, poly: Array, x: Array) -> None:
    """out = (a I + b G + c G^2) x, an iteration of Newton and Schulz's kind; gram is G afterwards, poly the polynomial."""
    tall = x.shape[0] > x.shape[1]
    if tall:
        weight_gradient(gram, x, x, add=False)  # x^T x
    else:
        matmul_forward(gram, x, x)  # x x^T
    input_gradient(
        poly, gram, gram, add=False
    )  # gram gram, without the compute_weights that matmul_forward makes
    _polynomial(poly, gram, np.array(COEFFICIENTS, x.dtype))
    left, right = (x, poly) if tall else (poly, x)
    input_gradient(out, left, right, add=False)


@pjit
def _look_ahead(exp_avg, x, grads, scalars):  # type: ignore[no-untyped-def]
    """exp_avg, and u in x; the sum of u^2, row by row, so that it does not depend on the number of threads."""
    clip, kept, new = scalars
    squares = np.empty(x.shape[0], np.float64)
    for i in prange(x.shape[0]):
        total = x.dtype.type(0)
        for j in range(x.shape[1]):
            g = new * (clip * grads[i, j])
            average = kept * exp_avg[i, j] + g
            u = kept * average + g
            exp_avg[i, j] = average
            x[i, j] = u
            total += u * u
        squares[i] = total
    return squares.sum()


@pjit
def _polynomial(poly, gram, coefficients):  # type: ignore[no-untyped-def]
    """poly = a I + b gram + c poly."""
    a, b, c = coefficients
    for i in prange(poly.shape[0]):
        for j in range(poly.shape[1]):
            poly[i, j] = b * gram[i, j] + c * poly[i, j]
        poly[i, i] += a


@pjit
def _apply(params, x, scalars):  # type: ignore[no-untyped-def]
    keep, rate = scalars
    for i in prange(params.shape[0]):
        for j in range(params.shape[1]):
            params[i, j] = params[i, j] * keep - rate * x[i, j]
