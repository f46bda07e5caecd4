"""Speculative decoding: the tokens of plain greedy decoding, and samples of the same distribution, whatever the heads draft."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

from kernels.config import ModelConfig, Numerics
from kernels.cpu.sampling import pick, probabilities, sampling
from kernels.engine import Engine
from kernels.generation import Sampling, Speculation, generate
from tests.compare import assert_same_bits, assert_within

VOCAB, CONTEXT = 40, 12
GREEDY, LIKELIEST = Sampling(temperature=0), Sampling(temperature=0.8, top_k=6, top_p=0.95)
EULER = ModelConfig(VOCAB, 2, 4, 2, 16, 24, CONTEXT, mtp_heads=3)
GPT2 = ModelConfig(
    VOCAB, 2, 2, 2, 16, 24, CONTEXT, norm="layernorm", position="learned", mlp="gelu", bias=True, tied_head=True, mtp_heads=5
)
SMALL = ModelConfig(8, 1, 2, 1, 8, 8, 6, mtp_heads=3)
DRAWS = 20_000
FALSE_ALARM = 1e-6


def untrained(config: ModelConfig, scale: float = 4) -> Engine:
    """Random weights, larger than those of the start, where all logits are nearly equal: the heads draft at random."""
    engine = Engine(config, Numerics(), micro_batch=1, threads=1, seed=3, training=False)
    engine.load({name: weight * scale for name, weight in engine.weights().items()})
    return engine


def constant(config: ModelConfig, scale: float = 4) -> Engine:
    """Every head draws from one distribution, whatever came before, so each draft is as likely as it should be."""
    engine = untrained(config, scale)
    weights = engine.weights()
    head = weights["head.weight"]
    assert not config.tied_head
    head[1:] = head[0]
    # No block adds to the stream and all embeddings are one.
    weights = {name: weight * (not name.endswith(("proj.weight", "down.weight"))) for name, weight in weights.items()}
    weights["tok.weight"][:] = weights["tok.weight"][0]
    engine.load(weights)
    return engine


def written(engine: Engine, prompt: Sequence[int], how: Sampling, speculative: bool = True, **settings: Any) -> list[int]:
    """The ids that follow a prompt."""
    speculation = Speculation(engine.config.mtp_heads) if speculative else None
    return list(generate(engine, prompt, how, speculation=speculation, **settings))


@pytest.fixture(scope="module", params=[EULER, GPT2], ids=["euler", "gpt2"])
def both(request: pytest.FixtureRequest) -> Engine:
    """One engine of each architecture."""
    return untrained(request.param)


# A head read at the wrong row, a mask that lets a token see those after it, or a pass over several tokens that rounds otherwise
# than one after the other, as the CPU's does not.
def test_logits_of_heads_are_those_of_decode(both: Engine) -> None:
    tokens = np.random.default_rng(0).integers(VOCAB, size=(1, CONTEXT), dtype=np.int32)
    single, together, prompt = both.cache(), both.cache(), both.cache()
    expected = np.array([both.decode(tokens[:, t : t + 1].copy(), single)[0] for t in range(CONTEXT)])
    pieces = [both.decode_heads(tokens[:, t : t + 4].copy(), together, 4) for t in range(0, CONTEXT, 4)]
    heads = np.concatenate(pieces)
    assert heads.shape == (CONTEXT, both.config.mtp_heads, VOCAB)
    assert heads.dtype == np.float32
    assert_same_bits({"logits": heads[:, 0].copy()}, {"logits": expected})
    last = both.decode_heads(tokens, prompt, 2)
    assert together.length == prompt.length == CONTEXT
    assert_same_bits({"logits": last}, {"logits": heads[-2:].copy()})
    with pytest.raises(ValueError, match=r"^context: 12 \+ 1 tokens exceed model\.context = 12$"):
        both.decode_heads(tokens[:, :1].copy(), prompt, 1)


# Each head predicts with its own weights: head 0's in every place would be drafts of the wrong token.
def test_heads_are_in_order(both: Engine) -> None:
    weights, tokens = both.weights(), np.array([[1, 2, 3]], np.int32)
    logits = both.decode_heads(tokens, both.cache(), 1)
    head = weights["head.weight"]
    other = both.weights()
    other["head.weight"] = np.concatenate([head[:-2], head[:-3:-1]])  # the last two heads change places
    both.load(other)
    swapped = both.decode_heads(tokens, both.cache(), 1)
    both.load(weights)
    assert_same_bits({"logits": swapped[:, ::-1][:, :2].copy()}, {"logits": logits[:, -2:].copy()})
    assert (logits[0, -1] != logits[0, -2]).any()


# Greedy ids must be plain decoding's: a draft taken that is not the likeliest, a row of the cache that a rejected draft left, a
# draft across the border at which the window is cut. Where two logits are nearer than what fp32 may round, the ids may differ;
# the CPU rounds both ways alike (above).
@pytest.mark.parametrize("length", [1, 2, CONTEXT // 2, CONTEXT - 2, CONTEXT - 1, CONTEXT, CONTEXT + 3])
def test_greedy_is_plain_greedy(both: Engine, length: int) -> None:
    rng = np.random.default_rng(length)
    for _ in range(6):
        prompt = rng.integers(VOCAB, size=length).tolist()
        plain = written(both, prompt, GREEDY, speculative=False, max_tokens=4 * CONTEXT)
        assert written(both, prompt, GREEDY, max_tokens=4 * CONTEXT) == plain
        banned = plain[::5]
        plain = written(both, prompt, GREEDY, speculative=False, max_tokens=2 * CONTEXT, banned=banned)
        assert written(both, prompt, GREEDY, max_tokens=2 * CONTEXT, banned=banned) == plain


# A context smaller than the drafts leaves no room for them; 0 tokens kept of it would be an empty array.
@pytest.mark.parametrize(("context", "mtp_heads"), [(2, 2), (3, 2), (3, 3), (4, 3), (5, 3)])
def test_smallest_contexts(context: int, mtp_heads: int) -> None:
    engine = untrained(ModelConfig(VOCAB, 1, 1, 1, 4, 4, context, mtp_heads=mtp_heads))
    plain = written(engine, [1, 2], GREEDY, speculative=False, max_tokens=20)
    assert written(engine, [1, 2], GREEDY, max_tokens=20) == plain


# Tokens of a pass beyond max_tokens, or after one of `stop`, would come out since the pass had them already.
def test_ends_exactly() -> None:
    engine = constant(EULER)
    whole = written(engine, [1], Sampling(seed=5), max_tokens=60)
    for count in range(1, 12):
        assert written(engine, [1], Sampling(seed=5), max_tokens=count) == whole[:count]
    for stop in set(whole):
        assert written(engine, [1], Sampling(seed=5), max_tokens=60, stop=[stop]) == whole[: whole.index(stop)]
    assert not {*written(engine, [1], Sampling(seed=5), max_tokens=60, banned=set(range(0, VOCAB, 2)))} & {*range(0, VOCAB, 2)}


# A perfect draft that is rejected, or one that is not counted. The window of 12 begins with 6 tokens read, which draw one; two
# passes of 3 fill it; the next window begins alike, and the 10 tokens asked for end in its second pass.
@pytest.mark.parametrize("how", [GREEDY, Sampling(seed=1), Sampling(seed=1, temperature=0.7, top_k=5, top_p=0.9)])
def test_perfect_drafts_are_all_taken(how: Sampling) -> None:
    engine, counts = constant(EULER), Speculation(EULER.mtp_heads)
    tokens = generate(engine, [1] * (CONTEXT // 2), how, max_tokens=10, speculation=counts)
    assert len(list(tokens)) == 10
    assert counts == Speculation(3, passes=5, drafted=6, accepted=6)
    assert counts.describe() == "2.20 tokens a pass, 6 of 6 drafted tokens (100%) taken"


# Counts that miss a pass or count a rejected draft would call a bad draft a good one. Random heads draft one of VOCAB tokens.
def test_bad_drafts_are_rarely_taken() -> None:
    engine, counts = untrained(EULER), Speculation(EULER.mtp_heads)
    assert len(list(generate(engine, [1], GREEDY, max_tokens=200, speculation=counts))) == 200
    assert counts.passes > 100
    assert counts.accepted < counts.drafted / 4
    assert 200 <= counts.passes + counts.accepted <= 200 + EULER.mtp_heads


def joint(engine: Engine, prompt: list[int], how: Sampling, length: int) -> dict[tuple[int, ...], float]:
    """Probability of each sequence of so many tokens after a prompt, by plain decoding."""
    settings = {"temperature": how.temperature, "top_k": how.top_k, "top_p": how.top_p}
    result: dict[tuple[int, ...], float] = {}
    for ids in product(range(engine.config.vocab_size), repeat=length):
        share = 1.0
        for t in range(length):
            window = prompt + list(ids[:t])
            if len(window) > engine.config.context:
                window = window[-(engine.config.context // 2) :]
            logits = engine.decode(np.array([window], np.int32), engine.cache())[0]
            share *= probabilities(logits, **settings)[ids[t]]  # type: ignore[arg-type]
            if not share:
                break
        result[ids] = share
    return result


# Samples must be distributed as plain decoding's: a draft always taken, a rejected one replaced by a draw from the whole target,
# the guess forgotten, a temperature or cut that one of the two lacks, a draft read at a wrong row. Three tokens after the first,
# which no draft was made for, are those of one pass; with a prompt of 3 they fill the context of 6, where a rejected draft leaves
# no room for others.
#
# The bound: with n draws of a distribution over m cells, the statistic n * sum((share - p)^2 / p) over the cells with p > 0 has
# expectation m - 1 and, by the chi-square quantile's bound (Laurent and Massart 2000, lemma 1), passes
# m - 1 + 2 sqrt((m - 1) t) + 2 t with probability at most exp(-t); t = ln(1 / FALSE_ALARM). Cells of fewer than 10 expected
# draws are taken together, for which the statistic is near to chi-square.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "prompt", "how"),
    [
        (untrained, [1], Sampling()),
        (untrained, [1], LIKELIEST),
        (untrained, [2, 5, 3], Sampling()),
        (constant, [1], LIKELIEST),
    ],
    ids=["bad drafts", "bad drafts of the likeliest", "a full context", "perfect drafts"],
)
def test_samples_have_the_distribution(make: Any, prompt: list[int], how: Sampling) -> None:
    engine, length = make(SMALL, 1.5), 4  # a third of the bad drafts is taken
    expected = joint(engine, prompt, how, length)
    assert math.isclose(sum(expected.values()), 1)
    counts = dict.fromkeys(expected, 0)
    speculation = Speculation(SMALL.mtp_heads)
    for seed in range(DRAWS):
        settings = Sampling(how.temperature, how.top_k, how.top_p, seed)
        counts[tuple(generate(engine, prompt, settings, max_tokens=length, speculation=speculation))] += 1
    assert speculation.drafted > DRAWS
    cells = [(DRAWS * expected[ids], counts[ids]) for ids in expected]
    assert not any(count for share, count in cells if not share)
    rare = [cell for cell in cells if 0 < cell[0] < 10]
    cells = [cell for cell in cells if cell[0] >= 10]
    if rare:
        cells.append((sum(share for share, _ in rare), sum(count for _, count in rare)))
    statistic = sum((count - share) ** 2 / share for share, count in cells)
    freedom, t = len(cells) - 1, math.log(1 / FALSE_ALARM)
    assert statistic <= freedom + 2 * math.sqrt(freedom * t) + 2 * t


# Probabilities that are not those with which `sampling` draws would make drafts and targets another distribution than plain's.
@pytest.mark.parametrize(
    "settings",
    [{"temperature": 1.0, "top_k": 0, "top_p": 1.0}, {"temperature": 0.5, "top_k": 5, "top_p": 0.8},
     {"temperature": 0.0, "top_k": 0, "top_p": 1.0}],
)  # fmt: skip
def test_probabilities_are_those_of_the_draw(settings: dict[str, Any]) -> None:
    logits = np.random.default_rng(0).standard_normal(9).astype(np.float32)
    logits[4] = -np.inf
    grid = (np.arange(2**14) + 0.5) / 2**14
    out = np.empty(len(grid), np.int32)
    sampling(out, np.tile(logits, (len(grid), 1)), grid, vocab_size=len(logits), **settings)
    shares = np.bincount(out, minlength=9) / len(grid)
    # A token's interval holds a number of the grid's points that differs from its length by less than one.
    assert_within("probability", shares, probabilities(logits, **settings), 1 / len(grid))


# A draw of a token without weight: the last of the sum, where the product of sum and draw rounds up, or the first.
def test_pick_takes_one_with_weight() -> None:
    rng, weights = np.random.default_rng(0), np.zeros(6)
    for _ in range(200):
        weights[1:5] = rng.random(4) * [1, 0, 1, 1]
        for uniform in (0.0, 1 - 2.0**-53):
            assert weights[pick(weights, uniform)] > 0
    assert [pick(np.array([1.0, 2.0, 1.0]), u) for u in (0.0, 0.24, 0.25, 0.74, 0.75)] == [0, 0, 1, 1, 2]


# A model of one head has nothing to draft with: the message must come at once and name the setting.
def test_one_head_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^speculative: .*model\.mtp_heads of at least 2, got 1$"):
        Speculation(1)


# The checks of arguments must not wait for the first token, nor be left out with drafts.
def test_arguments_are_checked_at_once() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        generate(untrained(SMALL), [1], GREEDY, max_tokens=0, speculation=Speculation(3))
