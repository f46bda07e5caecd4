"""Drawing the next token."""

from typing import Any

import numpy as np

from kernels.cpu.jit import jit

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]
Ids = np.ndarray[Any, np.dtype[np.int32]]


def sample(
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
        out[row] = (
            _draw(values, number.view(np.uint64), temperature, top_k, top_p)
            if temperature
            else values.argmax()
        )


def suppress_tokens(logits: Array, ids: Ids) -> None:
    """Set the logits (B, Vp) of some tokens (n,) to -infinity, so that sampling never draws them."""
    logits[:, ids] = -np.inf


@jit
def _draw(logits, number, temperature, top_k, top_p):  # type: ignore[no-untyped-def]
    ids = _likeliest(logits, top_k) if 0 < top_k < logits.size else np.arange(logits.size)
    if top_p < 1:
        ids = ids[np.argsort(-logits[ids], kind="mergesort")]  # stable, as ids rise
        weights = np.exp((logits[ids].astype(np.float64) - logits[ids[0]]) / temperature)
        target, total, kept = top_p * weights.sum(), 0.0, 0
        while (
            kept < ids.size and total < target
        ):  # ends just past the first at which the sum reaches the target
            total += weights[kept]
            kept += 1
        ids = ids[:kept]
    best, most = ids[0], -np.inf
    for token in ids:
        score = np.float64(logits[token]) / temperature + _gumbel(number, token)
        if score > most:
            best, most = token, score
    return best


@jit
def _likeliest(logits, count):  # type: ignore[no-untyped-def]
    """The first `count` of the ranking, by rising id."""
    least = np.partition(logits, logits.size - count)[logits.size - count]
    equal = count - (logits > least).sum()  # of those that equal the last
    ids, found = np.empty(count, np.int64), 0
    for token in range(logits.size):
        if logits[token] > least or (logits[token] == least and equal > 0):
            equal -= logits[token] == least
            ids[found] = token
            found += 1
    return ids


@jit
def _gumbel(number, token):  # type: ignore[no-untyped-def]
    """A number of Gumbel's distribution, for one number and token always the same.

    Source: Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195 (the hash, SplitMix).
    """
    z = number + np.uint64(0x9E3779B97F4A7C15) * np.uint64(token + 1)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return -np.log(-np.log((np.float64(z >> np.uint64(12)) + 0.5) * 2.0**-52))
