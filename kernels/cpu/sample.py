"""Drawing the next token."""

from typing import Any

import numpy as np

from kernels.cpu.jit import jit

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]
Ids = np.ndarray[Any, np.dtype[np.int32]]


def sample(
    out: Ids, logits: Array, uniform: Array, *, vocab_size: int, softcap: float, temperature: float,
    top_k: int, top_p: float,
) -> None:  # fmt: skip
    """Draw one token per row from softmax(z / temperature), cut to the likeliest tokens.

    z = softcap * tanh(logits / softcap), or logits with softcap 0. Candidates are ranked by logit, equal
    logits by rising id. top_k keeps the first k. top_p then keeps the shortest prefix whose probability
    reaches the fraction p of the kept candidates' probability. The draw is

        out = argmax over the kept candidates of z / temperature - log(-log(u))    (Gumbel-max)
        u in (0, 1) a hash of the row's uniform number and the token's id

    The draw has the distribution softmax(z / temperature) over the kept candidates. For one
    uniform number, two similar distributions mostly give the same token. Speculative decoding needs that.

    Args:
        out:     (B,) int32, overwritten.
        logits:  (B, Vp). Columns from vocab_size on are padding and are ignored.
        uniform: (B,) fp64 in [0, 1), an independent random number per row.
        vocab_size: V.
        softcap: bound of the magnitude of z; 0: none. A logit of -infinity stays.
        temperature: 0 takes the likeliest token.
        top_k:   0 keeps all candidates.
        top_p:   in (0, 1]; 1 keeps all candidates.

    Source: Holtzman et al. 2020, arXiv:1904.09751 (top-p); Maddison, Tarlow and Minka 2014, arXiv:1411.0030,
        section 2 (the draw); Daliri, Musco and Suresh 2025, arXiv:2408.07978 (drafts and tokens from one
        random number).
    """
    for row, number in enumerate(uniform):
        values = logits[row, :vocab_size]
        out[row] = (
            _draw(values, number.view(np.uint64), softcap, temperature, top_k, top_p)
            if temperature
            else values.argmax()
        )


def suppress_tokens(logits: Array, ids: Ids) -> None:
    """Set the logits (B, Vp) of the tokens ids (n,) to -infinity. Sampling then never draws them."""
    logits[:, ids] = -np.inf


@jit
def _capped(logit, softcap):  # type: ignore[no-untyped-def]
    z = np.float64(logit)
    return softcap * np.tanh(z / softcap) if softcap > 0 and z > -np.inf else z


@jit
def _draw(logits, number, softcap, temperature, top_k, top_p):  # type: ignore[no-untyped-def]
    ids = _likeliest(logits, top_k) if 0 < top_k < logits.size else np.arange(logits.size)
    if top_p < 1:
        ids = ids[np.argsort(-logits[ids], kind="mergesort")]  # stable, as ids rise
        weights = np.empty(ids.size)
        for i in range(ids.size):
            z = _capped(logits[ids[i]], softcap) - _capped(logits[ids[0]], softcap)
            weights[i] = np.exp(z / temperature)
        target, total, kept = top_p * weights.sum(), 0.0, 0
        # Afterwards ids[kept - 1] is the first candidate at which the sum reaches the target.
        while kept < ids.size and total < target:
            total += weights[kept]
            kept += 1
        ids = ids[:kept]
    best, best_score = ids[0], -np.inf
    for token in ids:
        score = _capped(logits[token], softcap) / temperature + _gumbel(number, token)
        if score > best_score:
            best, best_score = token, score
    return best


@jit
def _likeliest(logits, count):  # type: ignore[no-untyped-def]
    """The ids of the first `count` tokens of the ranking, by rising id."""
    threshold = np.partition(logits, logits.size - count)[logits.size - count]
    equal = count - (logits > threshold).sum()  # how many tokens at the threshold are kept
    ids, found = np.empty(count, np.int64), 0
    for token in range(logits.size):
        if logits[token] > threshold or (logits[token] == threshold and equal > 0):
            equal -= logits[token] == threshold
            ids[found] = token
            found += 1
    return ids


@jit
def _gumbel(number, token):  # type: ignore[no-untyped-def]
    """Gumbel noise: a function of the row's uniform number and the token alone.

    Source: Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195 (the hash, SplitMix).
    """
    z = number + np.uint64(0x9E3779B97F4A7C15) * np.uint64(token + 1)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return -np.log(-np.log((np.float64(z >> np.uint64(12)) + 0.5) * 2.0**-52))
