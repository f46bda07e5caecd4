"""Drawing the next token."""

from collections.abc import Sequence

import numpy as np
import pytest

from kernels.cpu.sample import sample
from tests.compare import Array, normal


def draw(
    logits: Array, uniform: Array, *, softcap: float = 0.0, temperature: float = 1.0, top_k: int = 0,
    top_p: float = 1.0,
) -> Array:  # fmt: skip
    """One token a row."""
    out = np.full(len(logits), -1, np.int32)
    sample(
        out, logits, uniform, vocab_size=logits.shape[1], softcap=softcap, temperature=temperature,
        top_k=top_k, top_p=top_p,
    )  # fmt: skip
    return out


def draws(logits: Sequence[float], count: int, **settings: float) -> Array:
    """How often each token comes, in `count` draws of one row with a fixed seed."""
    uniform = np.random.default_rng(5).random(count)
    rows = np.broadcast_to(np.array(logits, np.float32), (count, len(logits)))
    return np.bincount(draw(rows, uniform, **settings), minlength=len(logits))  # type: ignore[arg-type]


# Division by a temperature of 0, or a draw where the likeliest token was asked for.
def test_temperature_zero_takes_the_likeliest() -> None:
    logits = normal(np.random.default_rng(0), 50, 17).astype(np.float32)
    for uniform in (np.zeros(50), np.full(50, 0.999)):
        np.testing.assert_array_equal(draw(logits, uniform, temperature=0.0), logits.argmax(axis=1))


# top_k of 1 that keeps two, and a temperature so low that exp underflows or overflows.
@pytest.mark.parametrize("settings", [{"top_k": 1}, {"temperature": 1e-6}, {"top_p": 1e-9}])
def test_limits_that_leave_one_token(settings: dict[str, float]) -> None:
    logits = normal(np.random.default_rng(0), 50, 17).astype(np.float32)
    np.testing.assert_array_equal(draw(logits, np.full(50, 0.999), **settings), logits.argmax(axis=1))  # type: ignore[arg-type]


# The smaller id first among equals, so that a draw is the same on every device.
def test_ties_go_to_the_smaller_id() -> None:
    logits = [1, 3, 3, 3, 0]
    assert draw(np.array([logits], np.float32), np.array([0.9]), temperature=0.0).tolist() == [1]
    assert np.flatnonzero(draws(logits, 100, top_k=2)).tolist() == [1, 2]
    # Long and mixed enough that a sort which is not stable shows.
    mixed = np.random.default_rng(0).integers(3, size=500)
    assert (
        np.flatnonzero(draws(mixed.tolist(), 100, top_k=3)).tolist()
        == np.flatnonzero(mixed == 2)[:3].tolist()
    )


# Probabilities of softmax(logits / temperature): a temperature that multiplies, or a cumulative sum off by
# one. The statistic's 0.999 quantile for 6 degrees of freedom is 22.46.
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_distribution(temperature: float) -> None:
    logits, count = [0.3, -1.2, 1.5, 0.0, 2.0, -0.5, 1.0], 4000
    expected = np.exp(np.array(logits) / temperature)
    expected *= count / expected.sum()
    counts = draws(logits, count, temperature=temperature)
    assert ((counts - expected) ** 2 / expected).sum() < 22.46


# Logits that are drawn from uncapped, a cap after the temperature, or a banned token that the cap brings back.
@pytest.mark.parametrize("top_p", [1.0, 0.999])
def test_softcap(top_p: float) -> None:
    logits, count = [0.3, -1.2, 9.0, 0.0, 2.0, -np.inf, 1.0], 4000
    z = np.where(np.isneginf(logits), -np.inf, 1.5 * np.tanh(np.array(logits) / 1.5))
    expected = np.exp(z / 0.5)
    expected *= count / expected.sum()
    counts = draws(logits, count, softcap=1.5, temperature=0.5, top_p=top_p)
    assert counts[5] == 0
    drawn = expected > 0
    assert ((counts - expected)[drawn] ** 2 / expected[drawn]).sum() < 20.52  # 0.999 quantile, 5 degrees


# top_k of 0 must be off, not empty; k tokens are kept and their proportions too (quantile for 2 degrees of
# freedom: 13.82).
def test_top_k() -> None:
    logits = [0.3, -1.2, 1.5, 0.0, 2.0, -0.5, 1.0]
    assert (draws(logits, 4000, top_k=0) > 0).all()
    assert (draws(logits, 4000, top_k=99) > 0).all()
    counts = draws(logits, 4000, top_k=3)
    assert np.flatnonzero(counts).tolist() == [2, 4, 6]
    kept = np.exp(np.array(logits)[[2, 4, 6]])
    kept *= 4000 / kept.sum()
    assert ((counts[[2, 4, 6]] - kept) ** 2 / kept).sum() < 13.82


# Probabilities 0.4, 0.3, 0.2, 0.1: the shortest prefix that reaches p, the token that crosses it included.
@pytest.mark.parametrize(("top_p", "kept"), [(0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.95, 4), (1.0, 4)])
def test_top_p(top_p: float, kept: int) -> None:
    logits = np.log([0.2, 0.4, 0.1, 0.3]).tolist()
    assert np.flatnonzero(draws(logits, 500, top_p=top_p)).tolist() == sorted([1, 3, 0, 2][:kept])


# A prefix whose probability is exactly p reaches p: `<=` in place of `<` keeps one token more. Equal logits
# have exact sums.
@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.5, 2), (0.75, 3)])
def test_top_p_reached_exactly(top_p: float, kept: int) -> None:
    assert np.flatnonzero(draws([0.0] * 4, 500, top_p=top_p)).tolist() == list(range(kept))


# top_p counts among what top_k left: 0.4 of 0.7 is 0.57.
def test_top_p_after_top_k() -> None:
    logits = np.log([0.2, 0.4, 0.1, 0.3]).tolist()
    assert np.flatnonzero(draws(logits, 500, top_k=2, top_p=0.55)).tolist() == [1]
    assert np.flatnonzero(draws(logits, 500, top_k=2, top_p=0.6)).tolist() == [1, 3]


# One draw for the whole batch gives every row the same token.
def test_rows_draw_for_themselves() -> None:
    uniform = np.random.default_rng(1).random(8)
    together = draw(np.zeros((8, 1000), np.float32), uniform).tolist()
    assert together == [int(draw(np.zeros((1, 1000), np.float32), uniform[i : i + 1])[0]) for i in range(8)]
    assert len({*together}) == 8


# At one number like distributions must give like tokens, or drafts that are nearly right would be rejected:
# two of total variation d differ in at most 2 d / (1 + d) of the draws (Daliri, Musco and Suresh 2025,
# arXiv:2408.07978), within four standard deviations of so many.
def test_like_distributions_give_like_tokens() -> None:
    rng, count = np.random.default_rng(2), 2000
    first = 2 * normal(rng, 100)
    second = first + 0.3 * normal(rng, 100)
    p, q = (np.exp(x) / np.exp(x).sum() for x in (first, second))
    distance = np.abs(p - q).sum() / 2
    uniform = rng.random(count)
    one, other = (draw(np.tile(x.astype(np.float32), (count, 1)), uniform) for x in (first, second))
    bound = 2 * distance / (1 + distance)
    assert 0 < (one != other).mean() < bound + 4 * np.sqrt(bound * (1 - bound) / count)


# A banned token, whose logit is -infinity, must never win by what is added to it.
def test_no_token_of_probability_zero() -> None:
    rng = np.random.default_rng(3)
    logits = np.where(rng.random((500, 40)) < 0.9, -np.inf, normal(rng, 500, 40)).astype(np.float32)
    logits[:, 0] = -3
    tokens = draw(logits, rng.random(500))
    assert np.isfinite(logits[np.arange(500), tokens]).all()
