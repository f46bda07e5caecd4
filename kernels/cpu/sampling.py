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
    prefix whose probability, among those kept, reaches p. Of those that are left

        out = argmax(logits / temperature - log(-log(u))),    u in (0, 1) a hash of the row's number and the token's id,

    which is distributed as softmax(logits / temperature). At one number two distributions that are alike mostly give one token.

    Args:
        out:     (B,) int32, overwritten.
        logits:  (B, Vp); columns from vocab_size on are padding and take no part.
        uniform: (B,) fp64 in [0, 1), one independent draw a row, its number.
        vocab_size: V.
        temperature: 0 takes the likeliest token.
        top_k:   0 keeps all.
        top_p:   1 keeps all; in (0, 1].

    Source: Holtzman et al. 2020, arXiv:1904.09751 (top-p); Maddison, Tarlow and Minka 2014, arXiv:1411.0030, section 2 (the
        draw); Daliri, Musco and Suresh 2025, arXiv:2408.07978 (drafts and tokens at one number).
    """
    for row, number in enumerate(uniform):
        values = logits[row, :vocab_size]
        if temperature == 0:
            out[row] = values.argmax()
            continue
        ids = _candidates(values, temperature, top_k, top_p)
        scores = values[ids].astype(np.float64) / temperature + _gumbel(number, ids)
        out[row] = ids[scores.argmax()]


def ban(logits: Array, ids: Ids) -> None:
    """Set the logits (B, Vp) of some tokens (n,) to -infinity, so that sampling never draws them."""
    logits[:, ids] = -np.inf


def _candidates(logits: Array, temperature: float, top_k: int, top_p: float) -> NDArray[np.intp]:
    """The tokens that may be drawn."""
    if not top_k and top_p == 1:
        return np.arange(len(logits))
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    if top_p == 1:
        return order
    scaled = logits[order].astype(np.float64) / temperature
    cumulative = np.cumsum(np.exp(scaled - scaled[0]))
    # Ends just past the first token at which the sum reaches top_p of the whole.
    return order[: np.searchsorted(cumulative, top_p * cumulative[-1]) + 1]


def _gumbel(number: np.float64, ids: NDArray[np.intp]) -> NDArray[np.float64]:
    """(n,) numbers of Gumbel's distribution, for one number and id always the same.

    Source: Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195 (the hash, SplitMix).
    """
    z = number.view(np.uint64) + np.uint64(0x9E3779B97F4A7C15) * (ids.astype(np.uint64) + np.uint64(1))
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    noise: NDArray[np.float64] = -np.log(-np.log(((z >> np.uint64(12)) + 0.5) * 2.0**-52))
    return noise
