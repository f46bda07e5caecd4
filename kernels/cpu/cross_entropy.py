"""Softmax and cross-entropy over the vocabulary. The probabilities are never stored."""

from typing import Any

import numpy as np
from numba import prange

from kernels.cpu.exponential import exp
from kernels.cpu.jit import pjit

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]
Ids = np.ndarray[Any, np.dtype[np.int32]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]


def cross_entropy_forward(
    nll: Array, correct: Flags, logits: Array, targets: Ids, *, vocab_size: int
) -> None:
    """The negative log-likelihood of each target, in nats, and whether the target is the likeliest token.

        nll = log sum_v exp(logits[v]) - logits[target]

    Args:
        nll:        (rows,), overwritten.
        correct:    (rows,) bool, overwritten: true if no other token has a larger logit.
        logits:     (rows, Vp). Columns from vocab_size on are padding and are ignored.
        targets:    (rows,) int32, below vocab_size.
        vocab_size: V.
    """
    _forward(nll, correct, logits, targets, vocab_size)


@pjit
def _forward(nll, correct, logits, targets, vocab_size):  # type: ignore[no-untyped-def]
    for row in prange(logits.shape[0]):
        largest, target = logits[row, 0], logits[row, targets[row]]
        for v in range(1, vocab_size):
            largest = max(largest, logits[row, v])
        total = logits.dtype.type(0)
        for v in range(vocab_size):
            total += exp(logits[row, v] - largest)
        nll[row] = np.log(total) + (largest - target)
        correct[row] = target == largest


def cross_entropy_backward(
    dlogits: Array, nll: Array, targets: Ids, weight: Array, *, vocab_size: int
) -> None:
    """The loss and its gradient in one pass, in place of the logits: no second array of this size is needed.

        dlogits[v] = weight * (exp(logits[v]) / sum_u exp(logits[u]) - [v is the target])

    Args:
        dlogits:    (rows, Vp): the logits on entry, their gradient on return. Zero for padding.
        nll:        (rows,), overwritten with the unweighted loss, in nats.
        targets:    (rows,) int32, below vocab_size.
        weight:     (rows,), the derivative of the total loss with respect to this row's nll.
        vocab_size: V.
    """
    _backward(dlogits, nll, targets, weight, vocab_size)


@pjit
def _backward(dlogits, nll, targets, weight, vocab_size):  # type: ignore[no-untyped-def]
    for row in prange(dlogits.shape[0]):
        largest, target = dlogits[row, 0], dlogits[row, targets[row]]
        for v in range(1, vocab_size):
            largest = max(largest, dlogits[row, v])
        total = dlogits.dtype.type(0)
        for v in range(vocab_size):
            e = exp(dlogits[row, v] - largest)
            dlogits[row, v] = e
            total += e
        nll[row] = np.log(total) + (largest - target)
        scale = weight[row] / total
        for v in range(vocab_size):
            dlogits[row, v] *= scale
        dlogits[row, targets[row]] -= weight[row]
        for v in range(vocab_size, dlogits.shape[1]):
            dlogits[row, v] = 0
