"""Softmax and cross-entropy over the vocabulary. The probabilities are never stored."""

from typing import Any

import numpy as np
from numba import prange

from kernels.cpu.exponential import exp
from kernels.cpu.jit import jit, pjit

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]
Ids = np.ndarray[Any, np.dtype[np.int32]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]


def cross_entropy_forward(
    nll: Array, correct: Flags, logits: Array, targets: Ids, *, vocab_size: int, softcap: float
) -> None:
    """The negative log-likelihood of each target, in nats, and whether the target is the likeliest token.

        z   = softcap * tanh(logits / softcap)        (softcap 0: z = logits)
        nll = log sum_v exp(z[v]) - z[target]

    Args:
        nll:        (rows,), overwritten.
        correct:    (rows,) bool, overwritten: true if no other token has a larger logit.
        logits:     (rows, Vp). Columns from vocab_size on are padding and are ignored. With a softcap the
                    others may be overwritten.
        targets:    (rows,) int32, below vocab_size.
        vocab_size: V.
        softcap:    bound of the magnitude of z; 0: none.

    Source: the cap, Gemma Team 2024, arXiv:2408.00118, section 2.
    """
    _forward(nll, correct, logits, targets, vocab_size, logits.dtype.type(softcap))


@jit
def _capped(logit, softcap):  # type: ignore[no-untyped-def]
    return softcap * np.tanh(logit / softcap)


@pjit
def _forward(nll, correct, logits, targets, vocab_size, softcap):  # type: ignore[no-untyped-def]
    for row in prange(logits.shape[0]):
        largest, target = logits[row, 0], logits[row, targets[row]]
        for v in range(1, vocab_size):
            largest = max(largest, logits[row, v])
        correct[row] = target == largest  # the cap keeps the order
        if softcap > 0:  # a loop of its own: with tanh in it, the next one would not be vectorized
            largest, target = _capped(largest, softcap), _capped(target, softcap)
            for v in range(vocab_size):
                logits[row, v] = _capped(logits[row, v], softcap)
        total = logits.dtype.type(0)
        for v in range(vocab_size):
            total += exp(logits[row, v] - largest)
        nll[row] = np.log(total) + (largest - target)


def cross_entropy_backward(
    dlogits: Array, nll: Array, targets: Ids, weight: Array, *, vocab_size: int, softcap: float
) -> None:
    """The loss and its gradient in one pass, in place of the logits: no second array of this size is needed.

        dz[v]      = weight * (exp(z[v]) / sum_u exp(z[u]) - [v is the target])
        dlogits[v] = dz[v] * (1 - (z[v] / softcap)^2)        (softcap 0: dlogits = dz)

    Args:
        dlogits:    (rows, Vp): the logits on entry, their gradient on return. Zero for padding.
        nll:        (rows,), overwritten with the unweighted loss, in nats.
        targets:    (rows,) int32, below vocab_size.
        weight:     (rows,), the derivative of the total loss with respect to this row's nll.
        vocab_size, softcap: as in the forward pass.
    """
    _backward(dlogits, nll, targets, weight, vocab_size, dlogits.dtype.type(softcap))


@pjit
def _backward(dlogits, nll, targets, weight, vocab_size, softcap):  # type: ignore[no-untyped-def]
    one = dlogits.dtype.type(1)
    for row in prange(dlogits.shape[0]):
        if softcap > 0:
            for v in range(vocab_size):
                dlogits[row, v] = _capped(dlogits[row, v], softcap)
        largest, target = dlogits[row, 0], dlogits[row, targets[row]]
        for v in range(1, vocab_size):
            largest = max(largest, dlogits[row, v])
        target_slope = one - (target / softcap) ** 2 if softcap > 0 else one
        total = dlogits.dtype.type(0)
        for v in range(vocab_size):
            z = dlogits[row, v]
            e = exp(z - largest)
            total += e
            dlogits[row, v] = e * (one - (z / softcap) ** 2) if softcap > 0 else e
        nll[row] = np.log(total) + (largest - target)
        scale = weight[row] / total
        for v in range(vocab_size):
            dlogits[row, v] *= scale
        dlogits[row, targets[row]] -= weight[row] * target_slope
        for v in range(vocab_size, dlogits.shape[1]):
            dlogits[row, v] = 0
