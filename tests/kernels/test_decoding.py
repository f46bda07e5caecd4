"""Decoding over a cache is the forward pass of training, whatever the pieces in which the tokens come."""

from typing import Any

import numpy as np
import pytest

from kernels.batch import Batch
from kernels.config import Numerics
from kernels.engine import Engine
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
    cache, logits, begin = engine.cache(len(tokens)), [], 0
    for count in pieces:
        logits.append(engine.decode(np.ascontiguousarray(tokens[:, begin : begin + count]), cache))
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


# Another position, mask or rotation than in training: text that drifts. decode rounds float64's logits to float32 once.
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
    first, other = engine.cache(), engine.cache()
    engine.decode(tokens[:, :4].copy(), first)
    engine.decode(60 - tokens[:, :9], other)
    engine.decode(60 - tokens[:, 4:9], first)
    first.truncate(4)
    fresh = engine.cache()
    engine.decode(tokens[:, :4].copy(), fresh)
    last = tokens[:, 4:7].copy()
    assert_same_bits({"logits": engine.decode(last, first)}, {"logits": engine.decode(last, fresh)})


# Beyond the context there is no position and no room.
def test_full_context_is_refused() -> None:
    engine, cache = make("euler"), None
    cache = engine.cache()
    engine.decode(ids(), cache)
    with pytest.raises(ValueError, match=r"^context: 11 \+ 1 tokens exceed model\.context = 11$"):
        engine.decode(np.zeros((1, 1), np.int32), cache)
    assert cache.length == CONTEXT


# Logits of padding columns would be drawn as tokens that do not exist.
def test_logits_are_the_vocabulary_in_float32() -> None:
    for kind in ({}, {"dtype": np.float64}):
        engine = make("euler", **kind)
        logits = engine.decode(ids(2), engine.cache(2))
        assert logits.shape == (2, VOCAB)
        assert logits.dtype == np.float32
