"""Decoding over a cache is the forward pass of training, whatever the pieces in which the tokens come.

Tokens drawn in a row are those drawn one by one, also where the device is asked for the next before the last
is read.
"""

from collections.abc import Callable, Generator, Hashable
from functools import partial
from typing import Any

import numpy as np
import pytest

from kernels.batch import Batch
from kernels.config import Numerics
from kernels.engine import Engine
from kernels.generation import Sampling, generate, generate_batch
from tests.compare import UNIT, Array, assert_calibrated, assert_same_bits, assert_within
from tests.gradient_check import MODELS

CONTEXT, VOCAB = 11, 61
NAMES = pytest.mark.parametrize("name", MODELS)
PIECES = {"one call": [CONTEXT], "token by token": [1] * CONTEXT, "pieces": [3, 1, 5, 2]}


def make(name: str, **kind: Any) -> Engine:
    """An engine with weights larger than at the start, where all logits are nearly equal."""
    numerics = Numerics()
    engine = Engine(MODELS[name], numerics, micro_batch=VOCAB, threads=1, seed=2, training=False, **kind)
    engine.load({key: 3 * weight for key, weight in engine.weights().items()})
    return engine


def ids(rows: int = 1) -> Array:
    """Random tokens."""
    return np.random.default_rng(rows).integers(VOCAB, size=(rows, CONTEXT), dtype=np.int32)


def cached(engine: Engine, tokens: Array, pieces: list[int]) -> Array:
    """(pieces, B, V) log-probabilities after each piece."""
    cache, logits, begin = engine.decoder.cache(len(tokens)), [], 0
    for count in pieces:
        logits.append(engine.decoder.decode(np.ascontiguousarray(tokens[:, begin : begin + count]), cache))
        begin += count
        assert cache.length == begin
    return log_softmax(np.array(logits))


def log_softmax(logits: Array) -> Array:
    """In float64."""
    shifted = logits - logits.max(axis=-1, keepdims=True).astype(np.float64)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def uncached(engine: Engine, tokens: Array) -> Array:
    """(T, 1, V) log-probabilities of one row by the forward pass of training: a row for each target."""
    rows = np.repeat(tokens, VOCAB, axis=0)
    targets = np.broadcast_to(np.arange(VOCAB, dtype=np.int32)[:, None], rows.shape).copy()
    nll = engine.score(Batch(rows, targets, np.zeros_like(rows), np.ones(rows.shape, np.float32)))
    return -nll.T[:, None].astype(np.float64)


# Another position, mask or rotation than in training: text that drifts. decode rounds float64's logits to
# float32 once.
@NAMES
@pytest.mark.parametrize("pieces", PIECES.values(), ids=list(PIECES))
def test_cached_is_uncached(name: str, pieces: list[int]) -> None:
    engine, tokens = make(name, dtype=np.float64), ids()
    expected = uncached(engine, tokens)[np.cumsum(pieces) - 1]
    tolerance = 2 * UNIT[np.dtype(np.float32)] * np.abs(expected).max()
    assert_within("log-probability", cached(engine, tokens, pieces), expected, tolerance)
    single = make(name)
    got, baseline = cached(single, tokens, pieces), uncached(single, tokens)[np.cumsum(pieces) - 1]
    assert_calibrated({"logits": got}, {"logits": expected}, {"logits": baseline}, 4)


# Rows that read each other's cache, or a row's place that matters.
@NAMES
def test_rows_decode_as_each_alone(name: str) -> None:
    engine, tokens = make(name, dtype=np.float64), ids(3)
    together = cached(engine, tokens, PIECES["pieces"])
    for row in range(3):
        alone = cached(engine, tokens[row : row + 1], PIECES["pieces"])
        # Products of few rows sum in another order: float64's rounding, then float32's.
        tolerance = 2 * UNIT[np.dtype(np.float32)] * np.abs(alone).max()
        assert_within("log-probability", together[:, row : row + 1], alone, tolerance)


# A conversation taken back: what was forgotten must not show, nor what another cache holds.
@NAMES
def test_truncated_cache_goes_on_as_if_nothing_had_been(name: str) -> None:
    engine, tokens = make(name), ids()
    first, other = engine.decoder.cache(), engine.decoder.cache()
    engine.decoder.decode(tokens[:, :4].copy(), first)
    engine.decoder.decode(60 - tokens[:, :9], other)
    engine.decoder.decode(60 - tokens[:, 4:9], first)
    first.truncate(4)
    fresh = engine.decoder.cache()
    engine.decoder.decode(tokens[:, :4].copy(), fresh)
    last = tokens[:, 4:7].copy()
    assert_same_bits(
        {"logits": engine.decoder.decode(last, first)}, {"logits": engine.decoder.decode(last, fresh)}
    )


# Beyond the context there is no position and no room.
def test_full_context_is_refused() -> None:
    engine, cache = make("euler"), None
    cache = engine.decoder.cache()
    engine.decoder.decode(ids(), cache)
    with pytest.raises(ValueError, match=r"^context: 11 \+ 1 tokens exceed model\.context = 11$"):
        engine.decoder.decode(np.zeros((1, 1), np.int32), cache)
    assert cache.length == CONTEXT


# Logits of padding columns would be drawn as tokens that do not exist.
def test_logits_are_the_vocabulary_in_float32() -> None:
    for kind in ({}, {"dtype": np.float64}):
        engine = make("euler", **kind)
        logits = engine.decoder.decode(ids(2), engine.decoder.cache(2))
        assert logits.shape == (2, VOCAB)
        assert logits.dtype == np.float32


class Asynchronous:
    """A CPU's operations as a GPU does them: in order, each once it is waited for, or, where not `late`, at
    once.

    Those of `replay` are with the arrays of the first time, as a graph has them.
    """

    asynchronous = True

    def __init__(self, ops: Any, late: bool) -> None:
        self.ops, self.late, self.done = ops, late, 0
        self.waiting: list[Callable[[], None]] = []

    def __getattr__(self, name: str) -> Any:
        op = getattr(self.ops, name)
        if not name.endswith("_forward") and name not in ("copy_rows", "suppress_tokens", "sample"):
            return op
        return lambda *arguments, **constants: self.start(partial(op, *arguments, **constants))

    def start(self, operation: Callable[[], None]) -> None:
        """Do it now or later."""
        self.waiting.append(operation)
        if not self.late:
            self.synchronize()

    def new_graphs(self) -> dict[Hashable, list[Callable[[], None]]]:
        """As Device's."""
        return {}

    def replay(self, graphs: Any, key: Hashable, work: Callable[[], None]) -> None:
        """As Device's, but recorded the first time."""
        if key not in graphs:
            recorder = Asynchronous(self.ops, True)
            start, self.start = self.start, recorder.start  # type: ignore[method-assign]
            work()
            graphs[key], self.start = recorder.waiting, start  # type: ignore[method-assign]
        for operation in graphs[key]:
            self.start(operation)

    def record_event(self) -> int:
        """How many operations there were so far."""
        return self.done + len(self.waiting)

    def synchronize(self, event: int | None = None) -> None:
        """Do what comes before the event, or all."""
        while self.waiting and (event is None or self.done < event):
            self.waiting.pop(0)()
            self.done += 1

    def download(self, array: Array) -> Array:
        """As Device's."""
        self.synchronize()
        return np.array(array)


BANNED = np.array([3, 17], np.int32)
GREEDY: dict[str, Any] = {"temperature": 0, "top_k": 0, "top_p": 1}
DRAWN: dict[str, Any] = {"temperature": 1.5, "top_k": 40, "top_p": 0.9}
EVERY_KIND = pytest.mark.parametrize("kind", ["cpu", "late", "at once"])


def make_kind(kind: str) -> Engine:
    """An engine of the CPU, or one whose operations go on after the call."""
    engine = make("euler")
    if kind != "cpu":
        operations: Any = Asynchronous(engine.ops, kind == "late")
        engine.use_ops(operations)
    return engine


def waiting_of(engine: Engine) -> list[Any]:
    """What an engine's operations have not done yet."""
    return list(getattr(engine.ops, "waiting"))  # noqa: B009 (no attribute of Ops)


def uniforms(batch: int, count: int = CONTEXT - 1) -> Array:
    """(count, B) numbers to draw at: after 2 tokens the context has room for so many."""
    return np.random.default_rng(batch).random((count, batch))


def one_by_one(tokens: Array, banned: Array, how: dict[str, Any]) -> Array:
    """What `sample_next` gives on the CPU, until the context is full."""
    engine, drawn = make("euler"), []
    cache = engine.decoder.cache(len(tokens))
    for uniform in uniforms(len(tokens), CONTEXT + 1 - tokens.shape[1]):
        drawn.append(engine.decoder.sample_next(tokens, cache, uniform, banned, **how))
        tokens = drawn[-1][:, None]
    assert cache.length == CONTEXT
    return np.array(drawn)


# One slot for what two passes have of their own, a graph with the other slot's arrays, a token read before it
# is drawn or after the next one is: all of it either where the GPU is as late or as early as it can be.
@EVERY_KIND
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("count", [1, 2, CONTEXT])
@pytest.mark.parametrize("how", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_draws_in_a_row_are_those_one_by_one(kind: str, batch: int, count: int, how: dict[str, Any]) -> None:
    engine, tokens = make_kind(kind), ids(batch)[:, :count].copy()
    for banned in (BANNED[:0], BANNED):
        cache, expected = engine.decoder.cache(batch), one_by_one(tokens, banned, how)
        for _ in range(2):  # the second time from graphs alone
            drawn = list(
                engine.decoder.sample_stream(
                    tokens, cache, iter(uniforms(batch, len(expected))), banned, **how
                )
            )
            np.testing.assert_array_equal(drawn, expected)
            assert cache.length == CONTEXT
            cache.truncate(0)
    assert list(engine.decoder.sample_stream(tokens, cache, [], BANNED, **how)) == []


# The GPU waits for the host if the next pass is launched after a token was read; the CPU computes what nobody
# may ask for if it is launched before.
def test_a_gpu_is_kept_one_pass_ahead() -> None:
    for kind, ahead in (("cpu", 0), ("late", 1)):
        engine, asked = make_kind(kind), []
        numbers = (asked.append(1) or uniform for uniform in uniforms(1))  # type: ignore[func-returns-value]
        draws = engine.decoder.sample_stream(
            ids()[:, :2].copy(), engine.decoder.cache(), numbers, BANNED, **DRAWN
        )
        for k, _ in enumerate(draws, 1):
            assert len(asked) == min(k + ahead, CONTEXT - 1)
            if kind == "late":
                assert bool(waiting_of(engine)) == (k < CONTEXT - 1)


def stopped(draws: Generator[Array], count: int, how: str) -> None:
    """Take `count` tokens and end the draws in one of the ways in which a caller may."""
    for _ in range(count):
        next(draws)
    if how == "closed":
        draws.close()
    elif how == "thrown into":
        with pytest.raises(KeyboardInterrupt):
            draws.throw(KeyboardInterrupt)


# A pass under way that nobody waits for, or one more token in the cache than the caller has: the next answer
# goes on from it.
@EVERY_KIND
@pytest.mark.parametrize("how", ["closed", "dropped", "thrown into"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_draws_that_are_stopped(kind: str, how: str, count: int) -> None:
    engine, tokens = make_kind(kind), ids()[:, :2].copy()
    cache, expected = engine.decoder.cache(), one_by_one(tokens, BANNED, DRAWN)
    stopped(engine.decoder.sample_stream(tokens, cache, uniforms(1), BANNED, **DRAWN), count, how)
    assert cache.length == 1 + count
    assert kind == "cpu" or not waiting_of(engine)
    rest = engine.decoder.sample_stream(
        expected[count - 1][:, None], cache, uniforms(1)[count:], BANNED, **DRAWN
    )
    np.testing.assert_array_equal(list(rest), expected[count:])


# Numbers or room that end in the middle leave the cache with what came.
@EVERY_KIND
def test_draws_that_fail(kind: str) -> None:
    engine = make_kind(kind)
    cache, came = engine.decoder.cache(), 0
    with pytest.raises(ValueError, match=r"^context: 11 \+ 1 tokens exceed model\.context = 11$"):
        for _ in engine.decoder.sample_stream(ids()[:, :2].copy(), cache, uniforms(1, 20), BANNED, **DRAWN):
            came += 1
    assert came == CONTEXT - 1 - (kind != "cpu")
    assert cache.length == 1 + came
    cache.truncate(0)
    assert (
        len(list(engine.decoder.sample_stream(ids()[:, :2].copy(), cache, uniforms(1), BANNED, **DRAWN)))
        == CONTEXT - 1
    )


# Two answers at once, or anything else that the engine is asked for while draws go on: a slot that they
# share.
@EVERY_KIND
def test_draws_and_other_uses_in_turns(kind: str) -> None:
    engine, one, three = make_kind(kind), ids()[:, :2].copy(), ids(3)[:, :2].copy()
    expected = [one_by_one(tokens, BANNED, DRAWN) for tokens in (one, three)]
    logits = engine.decoder.decode(one, engine.decoder.cache())
    running = [
        engine.decoder.sample_stream(
            tokens, engine.decoder.cache(len(tokens)), uniforms(len(tokens)), BANNED, **DRAWN
        )
        for tokens in (one, three)
    ]
    for pair in zip(*expected, strict=True):
        for draws, drawn in zip(running, pair, strict=True):
            np.testing.assert_array_equal(next(draws), drawn)
            assert_same_bits(
                {"logits": engine.decoder.decode(one, engine.decoder.cache())}, {"logits": logits}
            )
        cache = engine.decoder.cache()
        assert engine.decoder.sample_next(one, cache, uniforms(1)[0], BANNED, **DRAWN) == expected[0][0]
        engine.decoder.sample_drafts(0, cache, uniforms(2)[0], BANNED, **DRAWN)


# What would be written into the cache beside its draws belongs to neither.
@EVERY_KIND
def test_cache_of_draws_is_its_own(kind: str) -> None:
    engine, tokens = make_kind(kind), ids()[:, :2].copy()
    cache, expected = engine.decoder.cache(), one_by_one(tokens, BANNED, DRAWN)
    draws = engine.decoder.sample_stream(tokens, cache, uniforms(1), BANNED, **DRAWN)
    drawn = [next(draws)]
    for use in (
        lambda: engine.decoder.decode(tokens, cache),
        lambda: engine.decoder.sample_next(tokens, cache, uniforms(1)[0], BANNED, **DRAWN),
        lambda: next(engine.decoder.sample_stream(tokens, cache, uniforms(1), BANNED, **DRAWN)),
    ):
        with pytest.raises(
            ValueError, match=r"^cache: a generator of samples still uses it; exhaust or close it first$"
        ):
            use()
    np.testing.assert_array_equal([*drawn, *draws], expected)


# Texts that depend on the device's time: over the end of the context, with prompts of several lengths,
# stopped by a token, two at once, and an engine that is still busy when its text is dropped.
@pytest.mark.parametrize("kind", ["late", "at once"])
def test_generation_is_the_same_where_the_device_is_ahead(kind: str) -> None:
    (plain, engine), sampling = (
        (make_kind(which) for which in ("cpu", kind)),
        Sampling(temperature=1.5, seed=3),
    )
    whole = list(generate(plain, [1, 2], sampling, max_tokens=4 * CONTEXT))
    assert list(generate(engine, [1, 2], sampling, max_tokens=4 * CONTEXT)) == whole
    assert (
        list(generate(engine, [1, 2], sampling, max_tokens=4 * CONTEXT, stop=whole[9:10]))
        == whole[: whole.index(whole[9])]
    )
    pair = [generate(engine, [1, 2], sampling, max_tokens=4 * CONTEXT) for _ in range(2)]
    assert list(zip(*pair, strict=True)) == list(zip(whole, whole, strict=True))
    prompts = [[1, 2], [3], [4] * CONTEXT, [5] * 7]
    replies = [generate_batch(which, prompts, sampling, max_tokens=3 * CONTEXT) for which in (plain, engine)]
    assert replies[0] == replies[1]
    text = generate(engine, [1, 2], sampling, max_tokens=4 * CONTEXT)
    assert [next(text) for _ in range(5)] == whole[:5]
    del text
    assert not waiting_of(engine)
