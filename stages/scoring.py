"""What eval measures: of text, of conversations, of replies. All sums in float64, over fp32 values of the engine."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from kernels.batch import Batch
from kernels.engine import Engine
from kernels.generation import Sampling, generate_batch
from stages.batches import EvalWindows
from stages.conversations import Messages, Rendered, render_all, shuffle_questions
from stages.packing import EvalConversations
from stages.shard_format import ShardSet
from stages.tokenizer import Tokenizer

READ_TOKENS = 1 << 24  # of a shard at once while counting: 64 MiB


@dataclass(frozen=True)
class HeadScore:
    """One prediction head on held-out text.

    Args:
        loss: nats a token.
        accuracy: share of tokens that the head holds likeliest.
        unigram_loss: nats a token, on the same tokens, of their frequencies in the training text.
    """

    loss: float
    accuracy: float
    unigram_loss: float


@dataclass(frozen=True)
class TextScore:
    """A model on held-out text: `loss` of head 0 in nats a token, in bits per UTF-8 byte, and every head."""

    loss: float
    bits_per_byte: float
    heads: list[HeadScore]


@dataclass(frozen=True)
class AnswerScore:
    """A model on held-out answers: nats a token over the content, over the ends of turn, and over both as sft trains."""

    content_loss: float
    end_loss: float
    loss: float


@dataclass(frozen=True)
class Reply:
    """An answer: its ids without the end of turn, and whether that came by itself."""

    ids: list[int]
    ended: bool


def unigram_nats(shards: ShardSet) -> NDArray[np.float64]:
    """-log of each id's frequency in a split, (vocab_size,) nats; one is added to each count, for ids that never occur."""
    counts = np.ones(shards.vocab_size, np.int64)
    for start in range(0, shards.tokens, READ_TOKENS):
        ids = shards.read(start, min(start + READ_TOKENS, shards.tokens))
        counts += np.bincount(ids, minlength=shards.vocab_size)
    return np.log(counts.sum()) - np.log(counts)


def score_text(engine: Engine, windows: EvalWindows, unigram: NDArray[np.float64], heads: int) -> TextScore:
    """Every head over the whole of a split, once.

    Args:
        engine: the model.
        windows: the split.
        unigram: of unigram_nats.
        heads: the model's prediction heads; head k predicts the token k + 1 ahead, where that lies in window and document.
    """
    sums = np.zeros((4, heads))  # weight, nll, correct, unigram
    for index in range(len(windows)):
        batch = windows.batch(index)
        found = engine.evaluate(batch)
        for k in range(heads):
            weight = found.weight[k].astype(np.float64)
            ahead = np.roll(batch.targets, -k, axis=1)  # what wraps around has weight 0
            sums[:, k] += [np.sum(weight * of) for of in (1.0, found.nll[k], found.correct[k], unigram[ahead])]
    nats = float(sums[1, 0])
    means = sums[1:] / np.maximum(sums[0], 1)
    scores = [HeadScore(float(nll), float(correct), float(base)) for nll, correct, base in means.T]
    return TextScore(scores[0].loss, nats / math.log(2) / windows.shards.counts.bytes, scores)


def score_answers(engine: Engine, batches: Iterable[Batch], end_id: int) -> AnswerScore:
    """The held-out answers of packed conversations; end_id is the id that ends a turn."""
    content, end = np.zeros(2), np.zeros(2)  # weight, nll
    for batch in batches:
        nll, is_end = engine.score(batch), batch.targets == end_id
        for sums, part in ((content, batch.loss_weight * ~is_end), (end, batch.loss_weight * is_end)):
            sums += [np.sum(part, dtype=np.float64), np.sum(part * nll, dtype=np.float64)]
    both = content + end
    content_loss, end_loss, loss = (float(sums[1] / max(sums[0], 1)) for sums in (content, end, both))
    return AnswerScore(content_loss, end_loss, loss)


def true_and_shuffled(
    conversations: Iterable[Messages], tokenizer: Tokenizer, *, context: int, seed: int
) -> tuple[Rendered, Rendered]:
    """The same answers behind their own questions and behind others'.

    Only conversations that fit the context whole both ways take part, so both hold the same answers.

    Raises:
        ValueError: fewer than two conversations have a question and an answer, or none fits both ways.
    """
    own = [one for one in conversations if {"user", "assistant"} <= {message["role"] for message in one}]
    others = shuffle_questions(own, seed)
    unbounded = 1 << 62
    lengths = [render_all(each, tokenizer, context=unbounded, too_long="drop").lengths for each in (own, others)]
    fits = np.maximum(*lengths) <= context
    if not fits.any():
        raise ValueError(
            f"conversations.validation: none of {len(own)} conversations fits model.context = {context} both with its own "
            "question and with another's; give shorter ones, or set model.context higher"
        )
    chosen = [[one for one, ok in zip(each, fits, strict=True) if ok] for each in (own, others)]
    true, shuffled = (render_all(each, tokenizer, context=context, too_long="drop") for each in chosen)
    return true, shuffled


def eval_batches(rendered: Rendered, *, micro_batch: int, context: int, pad_id: int) -> Iterable[Batch]:
    """Packed conversations, each once."""
    windows = EvalConversations(rendered, micro_batch=micro_batch, context=context, pad_id=pad_id)
    return (windows.batch(index) for index in range(len(windows)))


def write_replies(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling, *, max_tokens: int, end_id: int
) -> list[Reply]:
    """An answer to each prompt. One ends by itself if its end of turn comes within max_tokens and within the context."""
    if not prompts:
        return []
    context = engine.config.context
    most = min(max_tokens, context - min(map(len, prompts)) + 1)  # what is drawn from a context cut anew never counts
    answers = generate_batch(engine, prompts, sampling, max_tokens=most, stop=[end_id])
    return [
        Reply(ids, len(ids) < most and len(prompt) + len(ids) <= context) for prompt, ids in zip(prompts, answers, strict=True)
    ]


def question_of(messages: Messages) -> list[Mapping[str, str]]:
    """What a conversation holds before its first answer."""
    return list(takewhile(lambda message: message["role"] != "assistant", messages))
