"""Generation over the cache: what is drawn, when it ends, what happens when the context is full."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels.batch import Batch
from kernels.config import ModelConfig, Numerics
from kernels.engine import Engine
from kernels.generation import Sampling, generate, generate_batch

VOCAB, CONTEXT = 40, 12
GREEDY = Sampling(temperature=0)
EULER = ModelConfig(VOCAB, 2, 4, 2, 16, 24, CONTEXT, mtp_heads=2)
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
)


def tiny(config: ModelConfig, micro_batch: int) -> Engine:
    """Untrained, its weights made larger: with those of the start all logits are nearly equal."""
    engine = Engine(config, Numerics(), micro_batch=micro_batch, seed=3, training=False)
    engine.load({name: weight * 4 for name, weight in engine.weights().items()})
    return engine


@pytest.fixture(scope="module", params=[EULER, GPT2], ids=["euler", "gpt2"])
def both(request: pytest.FixtureRequest) -> Engine:
    """One engine of each architecture, with room for a row a token of the vocabulary."""
    return tiny(request.param, VOCAB)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Three rows at once, fewer than the prompts of the tests on batches."""
    return tiny(EULER, 3)


def uncached(engine: Engine, window: list[int]) -> np.ndarray:
    """(V,) log-probabilities of the token after a window, from the forward pass of training, which has no
    cache.
    """
    shape = (VOCAB, len(window))
    targets = np.zeros(shape, np.int32)
    targets[:, -1] = np.arange(VOCAB)
    tokens = np.tile(np.array(window, np.int32), (VOCAB, 1))
    return -engine.score(Batch(tokens, targets, np.zeros(shape, np.int32), np.ones(shape, np.float32)))[:, -1]


# A cap that training applies and the draw does not: text much surer than the model.
def test_draws_are_of_capped_logits() -> None:
    drawn = []
    for softcap in (0.0, 1e-3):
        engine = tiny(replace(EULER, logit_softcap=softcap), 1)
        engine.load({name: weight * 20 for name, weight in engine.weights().items()})
        prompts = [[1]] * 40
        drawn.append(len({ids[0] for ids in generate_batch(engine, prompts, Sampling(), max_tokens=1)}))
    assert drawn[0] < 10 < 20 < drawn[1]  # nearly one token; 40 draws of 40 equal ones give some 25


# A cache that is off by a position, or holds unrotated keys, gives other tokens; so does a window that, once
# the context is full, isn't its last half read from position 0.
def test_greedy_is_the_argmax_without_a_cache(both: Engine) -> None:
    window, expected = [5, 9, 5], []
    for _ in range(3 * CONTEXT):
        if len(window) > CONTEXT:
            window = window[-CONTEXT // 2 :]
        scores = uncached(both, window)
        likeliest = int(scores.argmax())
        margin = scores[likeliest] - np.delete(scores, likeliest).max()
        assert margin > 1e-4, "a tie would make this test a matter of rounding"
        expected.append(likeliest)
        window.append(likeliest)
    assert list(generate(both, [5, 9, 5], GREEDY, max_tokens=3 * CONTEXT)) == expected


# A prompt longer than the context must be cut as a full context is, not refused and not cut elsewhere.
def test_prompt_longer_than_the_context_keeps_its_last_half(engine: Engine) -> None:
    long = np.random.default_rng(0).integers(0, VOCAB, CONTEXT + 1).tolist()
    sampling = Sampling(seed=4)
    kept = list(generate(engine, long[-CONTEXT // 2 :], sampling, max_tokens=9))
    assert list(generate(engine, long, sampling, max_tokens=9)) == kept
    assert list(generate(engine, long[1:], sampling, max_tokens=9)) != kept


# A context of one token leaves no half; 0 tokens kept would be an empty array for the engine.
def test_smallest_context() -> None:
    smallest = tiny(ModelConfig(VOCAB, 1, 1, 1, 4, 4, 1), 1)
    assert len(list(generate(smallest, [1, 2], Sampling(seed=1), max_tokens=5))) == 5


# A seed that is ignored, or a generator that all calls share, would make a sample impossible to repeat.
def test_seed_repeats_and_another_differs(engine: Engine) -> None:
    runs = [list(generate(engine, [1], Sampling(seed=seed), max_tokens=30)) for seed in (7, 7, 8)]
    assert runs[0] == runs[1] != runs[2]


# Temperature 0 that still drew, and top_k 0 that kept nothing or one token, are both old bugs of such
# programs.
def test_meaning_of_zero_and_one(engine: Engine) -> None:
    def drawn(**settings: float) -> list[int]:
        return list(generate(engine, [1], Sampling(**settings), max_tokens=30))  # type: ignore[arg-type]

    greedy = drawn(temperature=0, seed=1)
    assert greedy == drawn(temperature=0, seed=2, top_k=5, top_p=0.9) == drawn(top_k=1) == drawn(top_p=1e-9)
    assert drawn(top_k=0) == drawn(top_k=VOCAB) == drawn(top_k=VOCAB + 1) == drawn(top_p=1) != greedy


# A draw for one row that all rows share starts every sample with the same token.
def test_rows_draw_for_themselves(engine: Engine) -> None:
    replies = generate_batch(engine, [[1]] * 20, Sampling(temperature=5.0, seed=1), max_tokens=12)
    assert len({reply[0] for reply in replies}) > 5
    assert len({tuple(reply) for reply in replies}) == 20


# Prompts of other lengths in the batch, groups, or rows that have ended must not change what a row gets.
# Greedy, since a product of many rows sums in another order than that of a few.
def test_batch_gives_each_prompt_its_own_continuation(engine: Engine) -> None:
    random = np.random.default_rng(2)
    prompts = [random.integers(0, VOCAB, length).tolist() for length in (4, 1, CONTEXT, 4, 7, CONTEXT + 5, 2)]
    for stop in ((), range(VOCAB // 4)):
        alone = [list(generate(engine, prompt, GREEDY, max_tokens=20, stop=stop)) for prompt in prompts]
        assert generate_batch(engine, prompts, GREEDY, max_tokens=20, stop=stop) == alone
    assert len({len(reply) for reply in alone}) > 2, "with rows that end at different times"


# The stated draws of a batch: those of its first prompt are generate's.
def test_first_row_of_a_batch_is_generate(engine: Engine) -> None:
    sampling = Sampling(seed=11)
    first = list(generate(engine, [1, 2], sampling, max_tokens=15))
    assert generate_batch(engine, [[1, 2], [3]], sampling, max_tokens=15)[0] == first
    assert generate_batch(engine, [], sampling, max_tokens=15) == []


# A stop token that came out would be shown to the user; one not counted would make an ended answer look cut.
def test_stop_ends_it_and_does_not_come_out(engine: Engine) -> None:
    whole = list(generate(engine, [1], Sampling(seed=5), max_tokens=20))
    stop = whole[9]
    until = whole[: whole.index(stop)]
    assert list(generate(engine, [1], Sampling(seed=5), max_tokens=20, stop=[stop])) == until
    assert list(generate(engine, [1], Sampling(seed=5), max_tokens=len(until) + 1, stop=[stop])) == until
    assert generate_batch(engine, [[1]], Sampling(seed=5), max_tokens=20, stop=[stop]) == [until]


# A suppressed token, such as <|user|> in an answer, must not come even where it is the likeliest.
def test_suppressed_never_comes(engine: Engine) -> None:
    suppressed = set(range(0, VOCAB, 2))
    for sampling in (GREEDY, Sampling(temperature=50.0, seed=1)):
        assert {
            token % 2 for token in generate(engine, [1], sampling, max_tokens=40, suppressed=suppressed)
        } == {1}
    both = generate_batch(engine, [[1], [2]], Sampling(seed=1), max_tokens=20, suppressed=suppressed)
    assert {token % 2 for reply in both for token in reply} == {1}


# A token must come as soon as it is drawn, and nothing be computed for one that nobody asks for: an answer is
# streamed.
def test_tokens_come_one_by_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    forward = engine._model.forward

    def counted(tokens: np.ndarray, *arguments: Any) -> np.ndarray:
        calls.append(tokens.shape)
        return forward(tokens, *arguments)

    monkeypatch.setattr(engine._model, "forward", counted)
    tokens = generate(engine, [1, 2, 3], GREEDY, max_tokens=2)
    assert calls == []
    next(tokens)
    assert calls == [(1, 3)]
    assert len(list(tokens)) == 1
    assert calls == [(1, 3), (1, 1)]


# What a user can type wrong must be one line that names the setting, not a crash in the sampler.
@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("top_k", -1), ("top_p", 0.0),
     ("top_p", 1.1), ("top_p", math.nan), ("seed", -1)],
)  # fmt: skip
def test_sampling_is_validated(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected .*, got {value}$"):
        Sampling(**{name: value})  # type: ignore[arg-type]


# An id outside of the vocabulary reads beyond the embedding; the complaint must come at the call, not at the
# first token.
@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 1, "at least one token"),
        ([VOCAB], 1, f"ids 0 to {VOCAB - 1}"),
        ([-1], 1, "ids 0 to"),
        ([1], 0, "max_tokens"),
    ],
)
def test_arguments_are_checked_at_once(
    engine: Engine, prompt: list[int], max_tokens: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generate(engine, prompt, GREEDY, max_tokens=max_tokens)
    with pytest.raises(ValueError, match=message):
        generate_batch(engine, [prompt], GREEDY, max_tokens=max_tokens)
