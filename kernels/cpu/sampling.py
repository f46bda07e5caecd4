"""Drawing the next token."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]
Ids = np.ndarray[Any, np.dtype[np.int32]]


def sampling(out: Ids, logits: Array, uniform: Array, *, temperature: float, top_k: int, top_p: float) -> None:
    """Draw one token a row from softmax(logits / temperature), cut to the likeliest tokens.

    Candidates are ranked by logit, the smaller id first among equals. top_k keeps the k first; top_p then keeps the shortest
    prefix whose probability, among those kept, reaches p. The draw inverts the cumulative distribution at `uniform`.

    Args:
        out:     (B,) int32, overwritten.
        logits:  (B, V).
        uniform: (B,) fp64 in [0, 1), one independent draw a row.
        temperature: 0 takes the likeliest token.
        top_k:   0 keeps all.
        top_p:   1 keeps all; in (0, 1].

    Source: Holtzman et al. 2020, arXiv:1904.09751 (top-p).
    """
    for row in range(len(out)):
        out[row] = _draw(logits[row], float(uniform[row]), temperature, top_k, top_p)


def _draw(logits: Array, uniform: float, temperature: float, top_k: int, top_p: float) -> int:
    if temperature == 0:
        return int(np.argmax(logits))
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    scaled = logits[order].astype(np.float64) / temperature
    cumulative = np.cumsum(np.exp(scaled - scaled[0]))
    # Ends just past the first token at which the sum reaches top_p of the whole.
    kept = int(np.searchsorted(cumulative, top_p * cumulative[-1])) + 1 if top_p < 1 else len(order)
    place = np.searchsorted(cumulative[:kept], uniform * cumulative[kept - 1], side="right")
    return int(order[min(int(place), kept - 1)])
