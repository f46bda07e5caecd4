"""AdamW over the flat arrays of parameters, gradients and moments."""

from typing import Any

import numpy as np
from numba import prange

from kernels.cpu.jit import pjit
from kernels.parameters import DECAYS, GROUP_SHIFT, MUON, ZERO_GRAD

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]
Flags = np.ndarray[Any, np.dtype[np.uint8]]


def adamw(
    params: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    grads: Array,
    compute_weights: Array | None,
    flags: Flags,
    grad_norm: Array,
    lr: Array,
    step: np.ndarray[Any, np.dtype[np.int64]],
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_clip: float,
    lr_scales: tuple[float, ...],
) -> None:
    """One update with decoupled weight decay and gradient clipping.

    If grad_norm is not finite, nothing changes. Segments flagged MUON are left to cpu/muon.py. Otherwise:

        g               = grads * min(1, grad_clip / grad_norm)           (grad_clip 0: no clipping)
        exp_avg         = beta1 * exp_avg + (1 - beta1) * g
        exp_avg_sq      = beta2 * exp_avg_sq + (1 - beta2) * g^2
        rate            = lr * lr_scales[group]                            (group: of the segment's flag)
        params         -= rate * weight_decay * params                    (segments flagged DECAYS only)
        params         -= rate * (exp_avg / (1 - beta1^step)) / (sqrt(exp_avg_sq / (1 - beta2^step)) + eps)
        compute_weights = params                                          (rounded to its dtype)
        grads           = 0                                               (segments flagged ZERO_GRAD only)

    Args:
        params, exp_avg, exp_avg_sq: (parameters,), updated.
        grads:     (parameters,), set to zero in segments flagged ZERO_GRAD.
        compute_weights: (parameters,), overwritten: the weights that matmuls read. None if they read params.
        flags:     (parameters / A,) uint8, one per segment of A elements: bits DECAYS, ZERO_GRAD and MUON of
                   kernels.parameters, and from bit GROUP_SHIFT on the index of the group.
        grad_norm: () fp64, the norm of grads.
        lr:        () fp64, the learning rate of this update.
        lr_scales: one for each of kernels.parameters.GROUPS.
        step:      () int64, 1 at the first update.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2.
    """
    if not np.isfinite(grad_norm):
        return
    clip = min(1.0, grad_clip / float(grad_norm)) if grad_clip > 0 and grad_norm > 0 else 1.0
    correction1, correction2 = 1 - beta1 ** int(step), 1 - beta2 ** int(step)
    scalars = np.array(
        [
            clip,
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            1 / correction2,
            eps,
        ],
        params.dtype,
    )
    rates = [float(lr) * scale for scale in lr_scales]
    groups = np.array([(rate / correction1, 1 - rate * weight_decay) for rate in rates], params.dtype)
    _update(params, exp_avg, exp_avg_sq, grads, flags, groups, scalars)
    if compute_weights is not None:
        np.copyto(compute_weights, params, where=np.repeat(flags & MUON == 0, params.size // flags.size))


@pjit
def _update(params, exp_avg, exp_avg_sq, grads, flags, groups, scalars):  # type: ignore[no-untyped-def]
    clip, beta1, rest1, beta2, rest2, inverse_correction2, eps = scalars
    segment = params.size // flags.size  # elements per flag
    for i in prange(flags.size):
        if flags[i] & MUON:
            continue
        step_size, decay_factor = groups[flags[i] >> GROUP_SHIFT]
        factor = decay_factor if flags[i] & DECAYS else params.dtype.type(1)
        zero_grad = flags[i] & ZERO_GRAD
        for j in range(i * segment, (i + 1) * segment):
            g = grads[j] * clip
            if zero_grad:
                grads[j] = 0
            first = beta1 * exp_avg[j] + rest1 * g
            second = beta2 * exp_avg_sq[j] + rest2 * g * g
            exp_avg[j] = first
            exp_avg_sq[j] = second
            params[j] = params[j] * factor - step_size * first / (np.sqrt(second * inverse_correction2) + eps)
