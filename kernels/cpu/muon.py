"""Muon: updates a hidden matrix by its orthogonalised momentum, with all singular values near 1."""

from typing import Any

import numpy as np
from numba import prange

from kernels.cpu.jit import pjit
from kernels.cpu.matmul import input_gradient, matmul_forward, weight_gradient

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]

MOMENTUM = 0.95
# The polynomial of one iteration, applied to each singular value. ITERATIONS map 0.0015 .. 1 to 0.67 .. 1.21.
COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5
# With this factor an update has about AdamW's root mean square. So both share one learning rate and decay.
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
    """One update of matrices (m, n) with decoupled weight decay and gradient clipping.

    If grad_norm is not finite, nothing but the scratch changes. Otherwise each matrix is updated by itself,
    with mu = MOMENTUM and a, b, c = COEFFICIENTS:

        g       = grads * min(1, grad_clip / grad_norm)             (grad_clip 0: no clipping)
        exp_avg = mu * exp_avg + (1 - mu) * g
        u       = mu * exp_avg + (1 - mu) * g                       (Nesterov momentum)
        x       = u / sqrt(sum of u^2)                              (0 if u is 0)
        x       = (a I + b G + c G^2) x,  G = x x^T                 ITERATIONS times
        params  = params * (1 - lr * weight_decay) - lr * SCALE * sqrt(max(m, n)) * x
        compute_weights = params                                    (rounded to its dtype)

    Let x = U S V^T. An iteration keeps U and V, and maps each singular value s to a s + b s^3 + c s^5. All
    but tiny singular values end in 0.67 .. 1.21, so x ends near U V^T. This is the direction of steepest
    descent under a limit on the step's spectral norm. If m > n, the smaller G = x^T x multiplies x from the
    right, with the same result.

    Args:
        params, exp_avg: (layers, count, m, n), updated. Here and below the layers may lie apart in memory.
        grads:     (layers, count, m, n).
        compute_weights: (layers, count, m, n), overwritten: the weights that matmuls read. Or None.
        x, x_next: (layers * count, m, n), scratch; the CPU uses the first matrix only.
        gram, poly: (layers * count, k, k), k = min(m, n), scratch; likewise.
        grad_norm: () fp64, the norm of the gradient of all parameters.
        lr:        () fp64, the learning rate of this update.

    Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon; the scale: Liu et al. 2025,
    arXiv:2502.16982, section 2.2.
    """
    if not np.isfinite(grad_norm):
        return
    clip = min(1.0, grad_clip / float(grad_norm)) if grad_clip > 0 and grad_norm > 0 else 1.0
    momentum = np.array([clip, MOMENTUM, 1 - MOMENTUM], x.dtype)
    step = np.array([1 - lr * weight_decay, lr * SCALE * np.sqrt(max(params.shape[2:]))], params.dtype)
    for matrix in np.ndindex(params.shape[:2]):
        current, following = x[0], x_next[0]  # every matrix uses the same scratch, which stays in the cache
        square_sum = _nesterov(exp_avg[matrix], current, grads[matrix], momentum)
        current *= 1 / np.sqrt(square_sum) if square_sum > 0 else 0
        for _ in range(ITERATIONS):
            iterate(following, gram[0], poly[0], current)
            current, following = following, current
        _apply(params[matrix], current, step)
    if compute_weights is not None:
        compute_weights[...] = params


def iterate(out: Array, gram: Array, poly: Array, x: Array) -> None:
    """One Newton-Schulz iteration: out = (a I + b G + c G^2) x. gram becomes G, and poly the polynomial."""
    tall = x.shape[0] > x.shape[1]
    if tall:
        weight_gradient(gram, x, x, add=False)  # x^T x
    else:
        matmul_forward(gram, x, x)  # x x^T
    input_gradient(poly, gram, gram, add=False)  # gram @ gram, without matmul_forward's copy to panels
    _polynomial(poly, gram, np.array(COEFFICIENTS, x.dtype))
    left, right = (x, poly) if tall else (poly, x)
    input_gradient(out, left, right, add=False)


@pjit
def _nesterov(exp_avg, x, grads, scalars):  # type: ignore[no-untyped-def]
    """Update exp_avg, write u to x, return the sum of u^2. Any number of threads gives the same sum."""
    clip, decay, rest = scalars
    squares = np.empty(x.shape[0], np.float64)
    for i in prange(x.shape[0]):
        total = x.dtype.type(0)
        for j in range(x.shape[1]):
            g = rest * (clip * grads[i, j])
            average = decay * exp_avg[i, j] + g
            u = decay * average + g
            exp_avg[i, j] = average
            x[i, j] = u
            total += u * u
        squares[i] = total
    return squares.sum()


@pjit
def _polynomial(poly, gram, coefficients):  # type: ignore[no-untyped-def]
    """poly = a I + b gram + c poly; poly holds gram^2 on entry."""
    a, b, c = coefficients
    for i in prange(poly.shape[0]):
        for j in range(poly.shape[1]):
            poly[i, j] = b * gram[i, j] + c * poly[i, j]
        poly[i, i] += a


@pjit
def _apply(params, x, scalars):  # type: ignore[no-untyped-def]
    decay_factor, step_size = scalars
    for i in prange(params.shape[0]):
        for j in range(params.shape[1]):
            params[i, j] = params[i, j] * decay_factor - step_size * x[i, j]
