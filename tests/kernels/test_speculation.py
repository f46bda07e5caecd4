"""Speculative decoding: the tokens of plain decoding, whatever the heads draft."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels.config import ModelConfig, Numerics
from kernels.engine import Engine
from kernels.generation import Sampling, SpeculativeStats, generate
from tests.cuda import gpu

VOCAB, CONTEXT = 40, 12
GREEDY, LIKELIEST = Sampling(temperature=0), Sampling(temperature=0.8, top_k=6, top_p=0.95)
EULER = ModelConfig(VOCAB, 2, 4, 2, 16, 24, CONTEXT, mtp_heads=3)
GPT2 = ModelConfig(
    VOCAB,
    2,
    2,
    2,
    16,
    24,
    CONTEXT,
    norm="layernorm",
    position="learned",
    mlp="gelu",
    bias=True,
    tied_head=True,
    mtp_heads=5,
)
SMALL = ModelConfig(8, 1, 2, 1, 8, 8, 6, mtp_heads=3)


def untrained(
    config: ModelConfig, scale: float = 4, numerics: Numerics | None = None, device: str = "cpu"
) -> Engine:
    """Random weights, larger than those of the start, where all logits are nearly equal: the heads draft at
    random.
    """
    engine = Engine(
        config, numerics or Numerics(), micro_batch=1, device=device, threads=1, seed=3, training=False
    )
    engine.load({name: weight * scale for name, weight in engine.weights().items()})
    return engine


def constant(config: ModelConfig, scale: float = 4) -> Engine:
    """Every head draws from one distribution, whatever came before, so each draft is as likely as it should
    be.
    """
    engine = untrained(config, scale)
    weights = engine.weights()
    head = weights["head.weight"]
    assert not config.tied_head
    head[1:] = head[0]
    # No block adds to the stream and all embeddings are one.
    weights = {
        name: weight * (not name.endswith(("proj.weight", "down.weight"))) for name, weight in weights.items()
    }
    weights["tok.weight"][:] = weights["tok.weight"][0]
    engine.load(weights)
    return engine


def written(
    engine: Engine, prompt: Sequence[int], how: Sampling, speculative: bool = True, **settings: Any
) -> list[int]:
    """The ids that follow a prompt."""
    speculation = SpeculativeStats(engine.config.mtp_heads) if speculative else None
    return list(generate(engine, prompt, how, speculation=speculation, **settings))


@pytest.fixture(scope="module", params=[EULER, GPT2], ids=["euler", "gpt2"])
def both(request: pytest.FixtureRequest) -> Engine:
    """One engine of each architecture."""
    return untrained(request.param)


# A head read at a wrong row, another head's weights, or a draw of the pass at another's number: each token
# and each draft is what a model of that head alone draws after the same tokens.
@pytest.mark.parametrize("how", [GREEDY, LIKELIEST])
def test_draws_and_drafts_are_their_heads(both: Engine, how: Sampling) -> None:
    heads, weights = both.config.mtp_heads, both.weights()
    rng = np.random.default_rng(0)
    tokens, uniform = rng.integers(VOCAB, size=(1, 9), dtype=np.int32), rng.random(3 + heads - 1)
    settings: dict[str, Any] = {"temperature": how.temperature, "top_k": how.top_k, "top_p": how.top_p}
    suppressed, cache = np.array([4, 7], np.int32), both.decoder.cache()
    drawn = both.decoder.sample_next(tokens, cache, uniform[:3], suppressed, last=3, **settings)
    drafts = [
        both.decoder.sample_drafts(place, cache, uniform[place + 1 : place + heads], suppressed, **settings)
        for place in (2, 0, 1)
    ]
    assert cache.length == 9
    alone = untrained(replace(both.config, mtp_heads=1, tied_head=False))
    tied = both.config.tied_head
    stacked = (
        np.concatenate([weights["tok.weight"][None], weights["head.weight"]])
        if tied
        else weights["head.weight"]
    )
    for k in range(heads):
        alone.load({**weights, "head.weight": stacked[k : k + 1]})
        for place in range(3):
            drawing = uniform[place + k : place + k + 1]
            expected = alone.decoder.sample_next(
                tokens[:, : 7 + place].copy(), alone.decoder.cache(), drawing, suppressed, **settings
            )
            got = drawn[place] if k == 0 else drafts[(1, 2, 0)[place]][k - 1]
            assert got == expected[0]
    with pytest.raises(ValueError, match=r"^context: 9 \+ 4 tokens exceed model\.context = 12$"):
        both.decoder.sample_next(tokens[:, :4].copy(), cache, uniform[:1], suppressed, **settings)


# The ids must be plain decoding's: a draft taken that was not drawn, a draw at another token's number, a row
# of the cache that a rejected draft left, a draft across the border at which the window is cut. Where a draw
# is nearer to a border than what fp32 may round, the ids may differ; the CPU rounds both ways alike.
@pytest.mark.parametrize("how", [GREEDY, LIKELIEST, Sampling(seed=7)])
@pytest.mark.parametrize("length", [1, 2, CONTEXT // 2, CONTEXT - 2, CONTEXT - 1, CONTEXT, CONTEXT + 3])
def test_ids_are_those_of_plain_decoding(both: Engine, length: int, how: Sampling) -> None:
    rng = np.random.default_rng(length)
    for _ in range(3):
        prompt = rng.integers(VOCAB, size=length).tolist()
        plain = written(both, prompt, how, speculative=False, max_tokens=4 * CONTEXT)
        assert written(both, prompt, how, max_tokens=4 * CONTEXT) == plain
        suppressed = plain[::5]
        plain = written(both, prompt, how, speculative=False, max_tokens=2 * CONTEXT, suppressed=suppressed)
        assert written(both, prompt, how, max_tokens=2 * CONTEXT, suppressed=suppressed) == plain


# The GPU's own: a pass over drafts that rounds otherwise than one token does, a number that host and device
# do not share in time.
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("how", [GREEDY, LIKELIEST, Sampling(seed=7)])
def test_ids_on_a_gpu(how: Sampling, precision: Any) -> None:
    gpu()
    engine = untrained(EULER, numerics=Numerics(precision=precision), device="cuda")
    for length in (1, CONTEXT - 2, CONTEXT + 3):
        prompt = np.random.default_rng(length).integers(VOCAB, size=length).tolist()
        plain = written(engine, prompt, how, speculative=False, max_tokens=4 * CONTEXT, suppressed=[3])
        assert written(engine, prompt, how, max_tokens=4 * CONTEXT, suppressed=[3]) == plain


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
        assert (
            written(engine, [1], Sampling(seed=5), max_tokens=60, stop=[stop]) == whole[: whole.index(stop)]
        )
    assert not {
        *written(engine, [1], Sampling(seed=5), max_tokens=60, suppressed=set(range(0, VOCAB, 2)))
    } & {*range(0, VOCAB, 2)}


# A perfect draft that is rejected, or one that is not counted. The window of 12 begins with 6 tokens read,
# which draw one; two passes of 3 fill it; the next window begins alike, and the 10 tokens asked for end in
# its second pass.
@pytest.mark.parametrize(
    "how", [GREEDY, Sampling(seed=1), Sampling(seed=1, temperature=0.7, top_k=5, top_p=0.9)]
)
def test_perfect_drafts_are_all_taken(how: Sampling) -> None:
    engine, counts = constant(EULER), SpeculativeStats(EULER.mtp_heads)
    tokens = generate(engine, [1] * (CONTEXT // 2), how, max_tokens=10, speculation=counts)
    assert len(list(tokens)) == 10
    assert counts == SpeculativeStats(3, passes=5, drafted=6, accepted=6)
    assert counts.describe() == "2.20 tokens per pass, 6 of 6 drafted tokens (100%) accepted"


# Counts that miss a pass or count a rejected draft would call a bad draft a good one. Random heads draft one
# of VOCAB tokens.
def test_bad_drafts_are_rarely_taken() -> None:
    engine, counts = untrained(EULER), SpeculativeStats(EULER.mtp_heads)
    assert len(list(generate(engine, [1], GREEDY, max_tokens=200, speculation=counts))) == 200
    assert counts.passes > 100
    assert counts.accepted < counts.drafted / 4
    assert 200 <= counts.passes + counts.accepted <= 200 + EULER.mtp_heads


# A model of one head has nothing to draft with: the message must come at once and name the setting.
def test_one_head_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^speculative: .*model\.mtp_heads of at least 2, got 1$"):
        SpeculativeStats(1)


# The checks of arguments must not wait for the first token, nor be left out with drafts.
def test_arguments_are_checked_at_once() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        generate(untrained(SMALL), [1], GREEDY, max_tokens=0, speculation=SpeculativeStats(3))
