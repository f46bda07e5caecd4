"""Text from a model: token after token, drawn from the logits that follow the keys and values in a cache.

When the context is full, its last half is kept and read anew, and generation goes on from there; a prompt longer than the
context is cut to that half likewise.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.sampling import sampling as draw
from kernels.engine import Engine


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Args:
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: draws among the k likeliest tokens; 0 is off.
        top_p: then among the fewest likeliest that have this share of the probability; 1 is off.
        seed: of the draws; not negative.

    Raises:
        ValueError: a value is out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, fits, expected in (
            ("temperature", 0 <= self.temperature < math.inf, "a finite number, 0 (the likeliest token) or more"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "more than 0 and at most 1 (off)"),
            ("seed", self.seed >= 0, "0 or more"),
        ):
            if not fits:
                raise ValueError(f"{name}: expected {expected}, got {getattr(self, name)}")


def generate(
    engine: Engine,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    max_tokens: int,
    stop: Collection[int] = (),
    banned: Collection[int] = (),
) -> Iterator[int]:
    """The ids that follow a prompt, each as soon as it is drawn.

    Args:
        engine: the model.
        prompt: ids, at least one.
        sampling: how each is drawn.
        max_tokens: most ids drawn, one of `stop` among them; fewer came if and only if the model ended by itself.
        stop: ids that end it; never in the result.
        banned: ids that are never drawn.

    Raises:
        ValueError: the prompt is empty or holds an id that the model doesn't know, or max_tokens is below 1.
    """
    windows, draws = _windows(engine, [prompt], max_tokens), [_uniforms(sampling, 0)]
    columns = islice(_columns(engine, windows, sampling, draws, banned), max_tokens)
    return takewhile(lambda token: token not in stop, (int(column[0]) for column in columns))


def generate_batch(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    max_tokens: int,
    stop: Collection[int] = (),
    banned: Collection[int] = (),
) -> list[list[int]]:
    """The ids that follow each of many prompts, engine.micro_batch of them computed at once.

    Arguments as of `generate`. Prompts may differ in length. The draws for a prompt depend on sampling.seed and its place
    among the prompts, not on the others; those for the first are `generate`'s.
    """
    windows = _windows(engine, prompts, max_tokens)
    replies: list[list[int]] = [[] for _ in windows]
    order = sorted(range(len(windows)), key=lambda row: len(windows[row]))  # rows of like length wait less for each other
    for first in range(0, len(order), engine.micro_batch):
        group = order[first : first + engine.micro_batch]
        draws = [_uniforms(sampling, row) for row in group]
        columns = _columns(engine, [windows[row] for row in group], sampling, draws, banned)
        running = set(group)
        while running:
            for row, token in zip(group, next(columns).tolist(), strict=True):
                if row not in running or token < 0:
                    continue
                if token not in stop:
                    replies[row].append(token)
                if token in stop or len(replies[row]) == max_tokens:
                    running.remove(row)
    return replies


def _half(engine: Engine) -> int:
    """Tokens kept when the context is full."""
    return max(1, engine.config.context // 2)


def _windows(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """The prompts, checked, as lists of at most context ids."""
    vocab_size, context = engine.config.vocab_size, engine.config.context
    if max_tokens < 1:
        raise ValueError(f"max_tokens: expected at least 1, got {max_tokens}")
    for prompt in prompts:
        if not len(prompt):
            raise ValueError("prompt: expected at least one token, got none")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise ValueError(f"prompt: expected ids 0 to {vocab_size - 1}, got {min(prompt)} to {max(prompt)}")
    return [list(prompt if len(prompt) <= context else prompt[-_half(engine) :]) for prompt in prompts]


def _uniforms(sampling: Sampling, row: int) -> np.random.Generator:
    """A row's own stream of draws."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((sampling.seed, row))))


def _columns(
    engine: Engine,
    rows: list[list[int]],
    sampling: Sampling,
    draws: list[np.random.Generator],
    banned: Collection[int],
) -> Iterator[NDArray[np.int32]]:
    """Without end, the token (B,) drawn next for each row; -1 for a row whose prompt is still being read.

    All rows begin at position 0 and are read together, so each has as many tokens in the cache: a row with a longer prompt
    reads on in it while the others are read what was drawn for them.
    """
    forbidden = np.array(sorted(banned), np.int64)
    cache, read, count = engine.cache(len(rows)), 0, min(map(len, rows))
    while True:
        if read + count > engine.config.context:  # every prompt is shorter, so what each row ends with was drawn
            read, count = 0, _half(engine)
            rows = [row[-count:] for row in rows]
            cache.truncate(0)
        logits = engine.decode(np.array([row[read : read + count] for row in rows], np.int32), cache)
        logits[:, forbidden] = -np.inf
        read, count = read + count, 1
        due = [place for place, row in enumerate(rows) if len(row) == read]
        drawn, uniform = np.empty(len(due), np.int32), np.array([draws[place].random() for place in due])
        draw(
            drawn,
            logits[due],
            uniform,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )
        for place, token in zip(due, drawn.tolist(), strict=True):
            rows[place].append(token)
        column = np.full(len(rows), -1, np.int32)
        column[due] = drawn
        yield column
