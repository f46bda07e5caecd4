"""Drawing the next token."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]
Ids = np.ndarray[Any, np.dtype[np.int32]]


def sampling(
    out: Ids, logits: Array, uniform: Array, *, vocab_size: int, temperature: float, top_k: int, top_p: float
) -> None:
    """Draw one token a row from softmax(logits / temperature), cut to the likeliest tokens.

    Candidates are ranked by logit, the smaller id first among equals. top_k keeps the k first; top_p then keeps the shortest
    prefix whose probability, among those kept, reaches p. The draw inverts the cumulative distribution at `uniform`.

    Args:
        out:     (B,) int32, overwritten.
        logits:  (B, Vp); columns from vocab_size on are padding and take no part.
        uniform: (B,) fp64 in [0, 1), one independent draw a row.
        vocab_size: V.
        temperature: 0 takes the likeliest token.
        top_k:   0 keeps all.
        top_p:   1 keeps all; in (0, 1].

    Source: Holtzman et al. 2020, arXiv:1904.09751 (top-p).
    """
    for row in range(len(out)):
        ids, weights = _candidates(logits[row, :vocab_size], temperature, top_k, top_p)
        out[row] = ids[pick(weights, float(uniform[row]))]


def ban(logits: Array, ids: Ids) -> None:
    """Set the logits (B, Vp) of some tokens (n,) to -infinity, so that sampling never draws them."""
    logits[:, ids] = -np.inf


def pick(weights: Array, uniform: float) -> int:
    """The index at which the cumulative sum of weights, not negative, passes `uniform` of the whole; one of a positive weight."""
    cumulative = np.cumsum(weights)
    place = np.searchsorted(cumulative, uniform * cumulative[-1], side="right")
    return int(min(place, np.searchsorted(cumulative, cumulative[-1])))  # the product may round up to the whole


def _candidates(logits: Array, temperature: float, top_k: int, top_p: float) -> tuple[NDArray[np.intp], Array]:
    """The tokens that may be drawn, likeliest first, and their probabilities times a constant, fp64."""
    if temperature == 0:
        return np.argmax(logits, keepdims=True), np.ones(1)
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    scaled = logits[order].astype(np.float64) / temperature
    weights = np.exp(scaled - scaled[0])
    cumulative = np.cumsum(weights)
    # Ends just past the first token at which the sum reaches top_p of the whole.
    kept = int(np.searchsorted(cumulative, top_p * cumulative[-1])) + 1 if top_p < 1 else len(order)
    return order[:kept], weights[:kept]
