"""Text from a model: token after token, drawn from the logits that follow the keys and values in a cache.

When the context is full, its last half is kept and read anew, and generation goes on from there; a prompt longer than the
context is cut to that half likewise.

A model whose prediction heads draft can write several tokens a pass: head k guesses the token k + 1 ahead, and one pass over
the guesses tells how many of them head 0 would have drawn itself.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.sampling import pick, probabilities
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
            raise ValueError(f"speculative: expected a model with model.mtp_heads of at least 2, got {self.mtp_heads}")

    def describe(self) -> str:
        """The counts, in a line."""
        rate, tokens = self.accepted / max(1, self.drafted), 1 + self.accepted / max(1, self.passes)
        return f"{tokens:.2f} tokens a pass, {self.accepted} of {self.drafted} drafted tokens ({rate:.0%}) taken"


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
        speculation: where it is given, the heads draft, and it counts. At temperature 0 the ids stay the same, where no two
            logits are so near that a product of more rows rounds them apart; else their distribution does, not the draws.

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
    forbidden = np.array(sorted(set(banned)), np.int32)
    cache, read, count = engine.cache(len(rows)), 0, min(map(len, rows))
    while True:
        if read + count > engine.config.context:  # every prompt is shorter, so what each row ends with was drawn
            read, count = 0, _half(engine)
            rows = [row[-count:] for row in rows]
            cache.truncate(0)
        due = [place for place, row in enumerate(rows) if len(row) == read + count]
        uniform = np.zeros(len(rows))
        uniform[due] = [draws[place].random() for place in due]
        fed = np.array([row[read : read + count] for row in rows], np.int32)
        drawn = engine.draw(
            fed, cache, uniform, forbidden, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
        )[due]
        read, count = read + count, 1
        for place, token in zip(due, drawn.tolist(), strict=True):
            rows[place].append(token)
        column = np.full(len(rows), -1, np.int32)
        column[due] = drawn
        yield column


def _speculative(
    engine: Engine,
    row: list[int],
    sampling: Sampling,
    draws: np.random.Generator,
    banned: Collection[int],
    speculation: Speculation,
) -> Iterator[int]:
    """Without end, the tokens drawn after a row, those of a pass together.

    A pass reads the last token drawn, whose place in the cache is still empty, and a draft of every head for those after it.
    Where the context has no room for all of them it reads none, so that each token follows the window that it has without
    drafts, and a GPU sees few shapes.
    """

    def distribution(logits: NDArray[np.float32]) -> NDArray[np.float64]:
        return probabilities(logits, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)

    forbidden = np.array(sorted(banned), np.int64)
    cache, context, guessing = engine.cache(), engine.config.context, np.empty((0, 0), np.float32)
    while True:
        if cache.length == context:
            row, guessing = row[-_half(engine) :], guessing[:0]
            cache.truncate(0)
        room = context - len(row)
        guesses = [distribution(logits) for logits in guessing] if len(guessing) <= room else []
        drafts = [pick(guess, draws.random()) for guess in guesses]
        fed = np.array([row[cache.length :] + drafts], np.int32)
        logits = engine.decode_heads(fed, cache, 1 + len(drafts))
        logits[:, :, forbidden] = -np.inf
        tokens = _verified(map(distribution, logits[:, 0]), guesses, drafts, draws)
        cache.truncate(len(row) + len(tokens) - 1)
        row, guessing = row + tokens, logits[len(tokens) - 1, 1:]
        speculation.passes += 1
        speculation.drafted += len(drafts)
        speculation.accepted += len(tokens) - 1
        yield from tokens


def _verified(
    targets: Iterator[NDArray[np.float64]],
    guesses: list[NDArray[np.float64]],
    drafts: list[int],
    draws: np.random.Generator,
) -> list[int]:
    """The drafts that are taken and one token more, all distributed as if each had been drawn from its target.

    A draft x is taken with probability min(1, target[x] / guess[x]); the first that is not is replaced by a draw from what of
    the target exceeds the guess, and those after it are dropped.

    Args:
        targets: (V,) probabilities of the token in each draft's place, and of the one after the last.
        guesses: (V,) probabilities that each draft was drawn with.
        drafts:  ids.

    Source: Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318.
    """
    taken: list[int] = []
    for draft, guess, target in zip(drafts, guesses, targets, strict=False):
        if draws.random() * guess[draft] >= target[draft]:
            excess = np.maximum(target - guess, 0)
            # Equal but for rounding, the two may leave no excess.
            return [*taken, pick(excess if excess.any() else target, draws.random())]
        taken.append(draft)
    return [*taken, pick(next(targets), draws.random())]
