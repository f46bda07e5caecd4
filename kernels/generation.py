"""Text from a model: token after token, drawn from the logits that follow the keys and values in a cache.

When the context is full, its last half is kept and read anew, and generation goes on from there; a prompt longer than the
context is cut to that half likewise.

A model whose prediction heads draft can write several tokens a pass: head k guesses the token k + 1 ahead, and one pass over
the guesses tells how many of them head 0 draws itself.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.engine import Engine

LEAST_TEMPERATURE = 1e-6  # logits divided by less could overflow


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Args:
        temperature: logits are divided by it, from 1e-6 on; 0 takes the likeliest token.
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
            (
                "temperature",
                self.temperature == 0 or LEAST_TEMPERATURE <= self.temperature < math.inf,
                f"0 (the likeliest token) or a finite number from {LEAST_TEMPERATURE} on",
            ),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "more than 0 and at most 1 (off)"),
            ("seed", self.seed >= 0, "0 or more"),
        ):
            if not fits:
                raise ValueError(f"{name}: expected {expected}, got {getattr(self, name)}")


@dataclass
class Speculation:
    """Drafting by the prediction heads beyond the first, and how it went: counts over all that was generated with it.

    Args:
        mtp_heads: of the model.
        passes:    of the model, the reading of prompts among them.
        drafted:   tokens that heads 1 .. mtp_heads - 1 guessed.
        accepted:  those of them that were taken.

    Raises:
        ValueError: there is no head to draft with.
    """

    mtp_heads: int
    passes: int = 0
    drafted: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        if self.mtp_heads < 2:
            raise ValueError(
                f"speculative: expected a model with model.mtp_heads of at least 2, got {self.mtp_heads}"
            )

    def describe(self) -> str:
        """The counts, in a line."""
        rate, tokens = self.accepted / max(1, self.drafted), 1 + self.accepted / max(1, self.passes)
        return (
            f"{tokens:.2f} tokens a pass, {self.accepted} of {self.drafted} drafted tokens ({rate:.0%}) taken"
        )


def generate(
    engine: Engine,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    max_tokens: int,
    stop: Collection[int] = (),
    banned: Collection[int] = (),
    speculation: Speculation | None = None,
) -> Iterator[int]:
    """The ids that follow a prompt, each as soon as it is drawn.

    Args:
        engine: the model.
        prompt: ids, at least one.
        sampling: how each is drawn.
        max_tokens: most ids drawn, one of `stop` among them; fewer came if and only if the model ended by itself.
        stop: ids that end it; never in the result.
        banned: ids that are never drawn.
        speculation: where it is given, the heads draft, and it counts. The ids stay the same, where no draw is so near to a
            border that a product of more rows rounds it to the other side.

    Raises:
        ValueError: the prompt is empty or holds an id that the model doesn't know, or max_tokens is below 1.
    """
    windows, draws = _windows(engine, [prompt], max_tokens), _uniforms(sampling, 0)
    tokens: Iterator[int]
    if speculation is None:
        tokens = (int(column[0]) for column in _columns(engine, windows, sampling, [draws], banned))
    else:
        tokens = _speculative(engine, windows[0], sampling, draws, banned, speculation)
    return takewhile(lambda token: token not in stop, islice(tokens, max_tokens))


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
    order = sorted(
        range(len(windows)), key=lambda row: len(windows[row])
    )  # rows of like length wait less for each other
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
            raise ValueError(
                f"prompt: expected ids 0 to {vocab_size - 1}, got {min(prompt)} to {max(prompt)}"
            )
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
    settings: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
    }
    forbidden, context = np.array(sorted(set(banned)), np.int32), engine.config.context
    cache, read, count = engine.decoder.cache(len(rows)), 0, min(map(len, rows))
    while len({len(row) for row in rows}) > 1:
        due = [place for place, row in enumerate(rows) if len(row) == read + count]
        uniform = np.zeros(len(rows))
        uniform[due] = [draws[place].random() for place in due]
        fed = np.array([row[read : read + count] for row in rows], np.int32)
        drawn = engine.decoder.draw(fed, cache, uniform, forbidden, **settings)[due]
        read, count = read + count, 1
        for place, token in zip(due, drawn.tolist(), strict=True):
            rows[place].append(token)
        column = np.full(len(rows), -1, np.int32)
        column[due] = drawn
        yield column
    while True:
        fed = np.array([row[read:] for row in rows], np.int32)
        uniforms = (np.array([row.random() for row in draws]) for _ in range(len(rows[0]), context + 1))
        for column in engine.decoder.draws(fed, cache, uniforms, forbidden, **settings):
            for row, token in zip(rows, column.tolist(), strict=True):
                row.append(token)
            yield column
        read, rows = (
            0,
            [row[-_half(engine) :] for row in rows],
        )  # every prompt is shorter, so what each row ends with was drawn
        cache.truncate(0)


def _speculative(
    engine: Engine,
    row: list[int],
    sampling: Sampling,
    draws: np.random.Generator,
    banned: Collection[int],
    speculation: Speculation,
) -> Iterator[int]:
    """Without end, the tokens drawn after a row, those of a pass together.

    A pass reads the last token drawn, whose place in the cache is still empty, and a draft of every head for those after it; it
    draws a token after each, at the number at which plain decoding would draw it. So the first of these is plain decoding's, and
    as long as the drafts are what was drawn, the next. Each draft is drawn at its token's number, too, so that the two are
    often the same where the distributions are alike.

    Where the context has no room for all drafts none is read, so that each token follows the window that it has without them, and
    a GPU sees few shapes.

    Source: Stern et al. 2018, arXiv:1811.03115, section 3, whose criterion is the likeliest token.
    """
    forbidden, heads = np.array(sorted(set(banned)), np.int32), engine.config.mtp_heads
    settings: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
    }
    cache, context = engine.decoder.cache(), engine.config.context
    drafts: list[int] = []
    uniform = np.empty(0)  # at which the tokens to come are drawn
    while True:
        if cache.length == context:
            row, drafts = row[-_half(engine) :], []
            cache.truncate(0)
        if len(row) + len(drafts) > context:
            drafts = []
        count = 1 + len(drafts)
        uniform = np.append(uniform, draws.random(max(0, count + heads - 1 - len(uniform))))
        fed = np.array([row[cache.length :] + drafts], np.int32)
        drawn = engine.decoder.draw(fed, cache, uniform[:count], forbidden, last=count, **settings).tolist()
        taken = next((i for i, draft in enumerate(drafts) if draft != drawn[i]), len(drafts))
        speculation.passes += 1
        speculation.drafted += len(drafts)
        speculation.accepted += taken
        uniform = uniform[1 + taken :]
        cache.truncate(len(row) + taken)
        row = row + drawn[: 1 + taken]
        drafts = engine.decoder.draft(taken, cache, uniform[: heads - 1], forbidden, **settings).tolist()
        yield from drawn[: 1 + taken]
