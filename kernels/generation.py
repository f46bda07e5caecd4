"""Generates text from a model: each token is sampled from the logits after the tokens in a KV cache.

When the context is full, its last half is kept and read again. Then generation continues. A prompt that is
longer than the context is truncated to that half, too.

Speculative decoding: the MTP heads draft several tokens per pass, and head 0 verifies them. Head k guesses
the token k + 1 ahead. The next pass reads the guesses and shows how many of them head 0 samples itself.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.engine import Engine

MIN_TEMPERATURE = 1e-6  # logits divided by a smaller number could overflow


@dataclass(frozen=True)
class Sampling:
    """The sampling settings.

    Args:
        temperature: divides the logits. At least 1e-6, or 0 for greedy decoding.
        top_k: sample from the k most likely tokens. 0 is off.
        top_p: of these, keep the fewest most likely tokens whose total probability is at least top_p. 1 is
            off.
        seed: of the random numbers, at least 0.

    Raises:
        ValueError: a value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, fits, expected in (
            (
                "temperature",
                self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < math.inf,
                f"0 (greedy decoding) or a finite number from {MIN_TEMPERATURE} on",
            ),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "more than 0 and at most 1 (off)"),
            ("seed", self.seed >= 0, "0 or more"),
        ):
            if not fits:
                raise ValueError(f"{name}: expected {expected}, got {getattr(self, name)}")


@dataclass
class SpeculativeStats:
    """Counters of speculative decoding, over all calls of `generate` that get them.

    Args:
        mtp_heads: number of MTP heads of the model.
        passes:    forward passes, including prefill.
        drafted:   tokens that heads 1 .. mtp_heads - 1 guessed.
        accepted:  drafted tokens that head 0 sampled, too.

    Raises:
        ValueError: the model has no head to draft with.
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
        """One line: tokens per pass and acceptance rate."""
        rate, tokens = self.accepted / max(1, self.drafted), 1 + self.accepted / max(1, self.passes)
        drafted = f"{self.accepted} of {self.drafted} drafted tokens ({rate:.0%}) accepted"
        return f"{tokens:.2f} tokens per pass, {drafted}"


def generate(
    engine: Engine,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    max_tokens: int,
    stop: Collection[int] = (),
    suppressed: Collection[int] = (),
    speculation: SpeculativeStats | None = None,
) -> Iterator[int]:
    """The ids that follow a prompt, each as soon as it is sampled.

    Args:
        engine: the model.
        prompt: ids, at least one.
        sampling: the sampling settings.
        max_tokens: maximum number of sampled ids, including one of `stop`. Fewer are sampled only if the
            model ends the text itself.
        stop: ids that end the text. They are not in the result.
        suppressed: ids that are never sampled.
        speculation: if given, use speculative decoding and add to these counters. The ids stay the same,
            except when rounding in a matmul with more rows changes a sample.

    Raises:
        ValueError: the prompt is empty or has an unknown id, or max_tokens is below 1.
    """
    windows, rng = _windows(engine, [prompt], max_tokens), _make_rng(sampling, 0)
    tokens: Iterator[int]
    if speculation is None:
        steps = _decode_batch(engine, windows, sampling, [rng], suppressed)
        tokens = (int(sampled[0]) for sampled in steps)
    else:
        tokens = _decode_speculative(engine, windows[0], sampling, rng, suppressed, speculation)
    return takewhile(lambda token: token not in stop, islice(tokens, max_tokens))


def generate_batch(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    max_tokens: int,
    stop: Collection[int] = (),
    suppressed: Collection[int] = (),
) -> list[list[int]]:
    """The ids that follow each prompt, computed in batches of engine.micro_batch prompts.

    Arguments as in `generate`. Prompts may differ in length. The random numbers for a prompt depend on
    sampling.seed and the prompt's index, not on other prompts. The first prompt has the same random numbers
    as in `generate`.
    """
    windows = _windows(engine, prompts, max_tokens)
    replies: list[list[int]] = [[] for _ in windows]
    # Prompts of similar length wait less for each other.
    order = sorted(range(len(windows)), key=lambda index: len(windows[index]))
    for first in range(0, len(order), engine.micro_batch):
        group = order[first : first + engine.micro_batch]
        rngs = [_make_rng(sampling, index) for index in group]
        steps = _decode_batch(engine, [windows[index] for index in group], sampling, rngs, suppressed)
        running = set(group)
        while running:
            for index, token in zip(group, next(steps).tolist(), strict=True):
                if index not in running or token < 0:
                    continue
                if token not in stop:
                    replies[index].append(token)
                if token in stop or len(replies[index]) == max_tokens:
                    running.remove(index)
    return replies


def _kept_tokens(engine: Engine) -> int:
    """The number of tokens kept when the context is full."""
    return max(1, engine.config.context // 2)


def _windows(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """The checked prompts, as lists of at most context ids."""
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
    return [list(prompt if len(prompt) <= context else prompt[-_kept_tokens(engine) :]) for prompt in prompts]


def _make_rng(sampling: Sampling, index: int) -> np.random.Generator:
    """The random number generator of one prompt."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((sampling.seed, index))))


def _decode_batch(
    engine: Engine,
    sequences: list[list[int]],
    sampling: Sampling,
    rngs: list[np.random.Generator],
    suppressed: Collection[int],
) -> Iterator[NDArray[np.int32]]:
    """Endless: the next token (B,) of each sequence, or -1 for a sequence whose prompt is not read yet.

    All sequences begin at position 0 and have the same length in the cache. While a longer prompt is still
    being read, the shorter sequences read their sampled tokens.
    """
    settings: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
    }
    suppressed_ids, context = np.array(sorted(set(suppressed)), np.int32), engine.config.context
    cache, read, count = engine.decoder.cache(len(sequences)), 0, min(map(len, sequences))
    while len({len(sequence) for sequence in sequences}) > 1:
        # Rows whose prompt ends with this pass, or has ended before.
        sampled_rows = [row for row, sequence in enumerate(sequences) if len(sequence) == read + count]
        uniform = np.zeros(len(sequences))
        uniform[sampled_rows] = [rngs[row].random() for row in sampled_rows]
        inputs = np.array([sequence[read : read + count] for sequence in sequences], np.int32)
        sampled = engine.decoder.sample_next(inputs, cache, uniform, suppressed_ids, **settings)[sampled_rows]
        read, count = read + count, 1
        for row, token in zip(sampled_rows, sampled.tolist(), strict=True):
            sequences[row].append(token)
        step = np.full(len(sequences), -1, np.int32)
        step[sampled_rows] = sampled
        yield step
    while True:
        inputs = np.array([sequence[read:] for sequence in sequences], np.int32)
        uniforms = (np.array([rng.random() for rng in rngs]) for _ in range(len(sequences[0]), context + 1))
        for step in engine.decoder.sample_stream(inputs, cache, uniforms, suppressed_ids, **settings):
            for sequence, token in zip(sequences, step.tolist(), strict=True):
                sequence.append(token)
            yield step
        # Each sequence has context + 1 tokens now.
        read, sequences = 0, [sequence[-_kept_tokens(engine) :] for sequence in sequences]
        cache.truncate(0)


def _decode_speculative(
    engine: Engine,
    sequence: list[int],
    sampling: Sampling,
    rng: np.random.Generator,
    suppressed: Collection[int],
    speculation: SpeculativeStats,
) -> Iterator[int]:
    """Endless: the tokens sampled after a sequence. The tokens of one pass come together.

    A pass reads the last sampled token, which is not in the cache yet, and one draft of each MTP head. It
    samples a token after each of them, with the same random number as plain decoding. So the first sampled
    token equals plain decoding's. The next one does, too, if the draft before it was the sampled token. A
    draft is sampled with the random number of its own token. So draft and token often agree if their
    distributions are similar.

    If the context has no room for all drafts, the pass reads none. So each token has the same context as in
    plain decoding, and a GPU captures few shapes.

    Source: Stern et al. 2018, arXiv:1811.03115, section 3. Their criterion is the most likely token.
    """
    suppressed_ids, heads = np.array(sorted(set(suppressed)), np.int32), engine.config.mtp_heads
    settings: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
    }
    cache, context = engine.decoder.cache(), engine.config.context
    drafts: list[int] = []
    uniform = np.empty(0)  # random numbers of the next tokens
    while True:
        if cache.length == context:
            sequence, drafts = sequence[-_kept_tokens(engine) :], []
            cache.truncate(0)
        if len(sequence) + len(drafts) > context:
            drafts = []
        count = 1 + len(drafts)
        uniform = np.append(uniform, rng.random(max(0, count + heads - 1 - len(uniform))))
        inputs = np.array([sequence[cache.length :] + drafts], np.int32)
        sampled = engine.decoder.sample_next(
            inputs, cache, uniform[:count], suppressed_ids, last=count, **settings
        ).tolist()
        accepted = next((i for i, draft in enumerate(drafts) if draft != sampled[i]), len(drafts))
        speculation.passes += 1
        speculation.drafted += len(drafts)
        speculation.accepted += accepted
        uniform = uniform[1 + accepted :]
        cache.truncate(len(sequence) + accepted)
        sequence = sequence + sampled[: 1 + accepted]
        drafts = engine.decoder.sample_drafts(
            accepted, cache, uniform[: heads - 1], suppressed_ids, **settings
        ).tolist()
        yield from sampled[: 1 + accepted]
