"""The measurements of eval: text, conversations and replies. Sums are float64 over the fp32 values of the
engine.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from kernels.engine import Engine
from kernels.generation import Sampling, generate_batch
from stages.batches import EvalWindows
from stages.chat_template import Messages, Rendered, render_all, shuffle_questions
from stages.packing import EvalConversations
from stages.shard_format import ShardSet
from stages.tokenizer import Tokenizer

READ_TOKENS = 1 << 24  # of a shard read at once while counting: 64 MiB


@dataclass(frozen=True)
class HeadScore:
    """One prediction head on held-out text.

    Args:
        loss: nats per token.
        accuracy: share of tokens to which the head gives the highest probability.
        unigram_loss: nats per token of the unigram model (token frequencies of the training text) on the same
            tokens.
    """

    loss: float
    accuracy: float
    unigram_loss: float


@dataclass(frozen=True)
class TextScore:
    """A model on held-out text: loss of head 0 in nats per token and in bits per UTF-8 byte, and all
    heads.
    """

    loss: float
    bits_per_byte: float
    heads: list[HeadScore]


@dataclass(frozen=True)
class AnswerScore:
    """A model on held-out answers: nats per token of the contents, of the end-of-turn tokens, and of both, as
    sft trains.
    """

    content_loss: float
    end_loss: float
    loss: float


@dataclass(frozen=True)
class Reply:
    """An answer: its ids without the end-of-turn token, and whether the model wrote that token itself."""

    ids: list[int]
    ended: bool


def unigram_nats(shards: ShardSet) -> NDArray[np.float64]:
    """-log of the frequency of each id in a split, (vocab_size,) nats. Add-one smoothing covers ids that
    never occur.
    """
    counts = np.ones(shards.vocab_size, np.int64)
    for start in range(0, shards.tokens, READ_TOKENS):
        ids = shards.read(start, min(start + READ_TOKENS, shards.tokens))
        counts += np.bincount(ids, minlength=shards.vocab_size)
    return np.log(counts.sum()) - np.log(counts)


def score_text(engine: Engine, windows: EvalWindows, unigram: NDArray[np.float64], heads: int) -> TextScore:
    """Scores every prediction head on a whole split.

    Args:
        engine: the model.
        windows: the split.
        unigram: from unigram_nats.
        heads: number of prediction heads. Head k predicts the token k + 1 ahead, if it is in the same window
            and document.
    """

    def measure(index: int) -> NDArray[np.float64]:
        batch, sums = windows.batch(index), np.zeros((4, heads))
        found = engine.evaluate(batch)
        for k in range(heads):
            weight = found.weight[k].astype(np.float64)
            ahead = np.roll(batch.targets, -k, axis=1)  # wrapped targets have weight 0
            sums[:, k] = [np.sum(weight * of) for of in (1.0, found.nll[k], found.correct[k], unigram[ahead])]
        return sums

    sums = np.zeros((4, heads))  # weight, nll, correct, unigram
    for of_batch in engine.ranks.spread(len(windows), measure):
        sums += of_batch
    nats = float(sums[1, 0])
    means = sums[1:] / np.maximum(sums[0], 1)
    scores = [HeadScore(float(nll), float(correct), float(base)) for nll, correct, base in means.T]
    return TextScore(scores[0].loss, nats / math.log(2) / windows.shards.counts.bytes, scores)


def score_answers(engine: Engine, held_out: EvalConversations, end_id: int) -> AnswerScore:
    """Scores the answers of packed conversations; end_id is the id of the end-of-turn token."""

    def measure(index: int) -> NDArray[np.float64]:
        batch = held_out.batch(index)
        nll, is_end = engine.score(batch), batch.targets == end_id
        weights = batch.loss_weight * ~is_end, batch.loss_weight * is_end
        return np.array([[np.sum(x, dtype=np.float64) for x in (w, w * nll)] for w in weights])

    content, end = np.zeros((2, 2))  # weight, nll
    for of_content, of_end in engine.ranks.spread(len(held_out), measure):
        content += of_content
        end += of_end
    both = content + end
    content_loss, end_loss, loss = (float(sums[1] / max(sums[0], 1)) for sums in (content, end, both))
    return AnswerScore(content_loss, end_loss, loss)


@dataclass(frozen=True)
class HeldOutAnswers:
    """The same answers after their own questions and after shuffled ones.

    Args:
        true:     answers after their own questions; None if no conversation fits the context.
        shuffled: the same answers after questions of other conversations; None if questions cannot be
            exchanged.
        missing:  the reason for each metric that cannot be computed, by its name in metrics.json.
    """

    true: Rendered | None
    shuffled: Rendered | None
    missing: Mapping[str, str]

    @property
    def count(self) -> int:
        """Number of conversations that are scored."""
        return 0 if self.true is None else len(self.true)


ANSWER_METRICS = ("answer_loss", "end_of_turn_loss", "sft_loss")
SHUFFLED_METRIC = "answer_loss_shuffled"


def held_out_answers(
    conversations: Iterable[Messages], tokenizer: Tokenizer, *, context: int, seed: int
) -> HeldOutAnswers:
    """Renders the held-out answers after their own questions and after shuffled ones.

    If questions can be exchanged, only conversations that fit the context both ways are scored. So both
    contain the same answers. A metric that cannot be computed is named in `missing`; it is not an error.
    """
    own = [one for one in conversations if {"user", "assistant"} <= {message["role"] for message in one}]
    fits_own = _lengths(own, tokenizer) <= context
    if not fits_own.any():
        reason = (
            f"none of {len(own)} held-out conversations with a question and an answer fits "
            f"model.context = {context}"
        )
        return HeldOutAnswers(None, None, dict.fromkeys((*ANSWER_METRICS, SHUFFLED_METRIC), reason))
    if len(own) < 2:
        reason = "there is only one held-out conversation: no other question to exchange"
        return HeldOutAnswers(_chosen(own, fits_own, tokenizer, context), None, {SHUFFLED_METRIC: reason})
    exchanged = shuffle_questions(own, seed)
    fits = fits_own & (_lengths(exchanged, tokenizer) <= context)
    if not fits.any():
        reason = (
            f"none of {len(own)} held-out conversations fits model.context = {context} with "
            "another's question"
        )
        return HeldOutAnswers(_chosen(own, fits_own, tokenizer, context), None, {SHUFFLED_METRIC: reason})
    return HeldOutAnswers(
        _chosen(own, fits, tokenizer, context), _chosen(exchanged, fits, tokenizer, context), {}
    )


def _lengths(conversations: Sequence[Messages], tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Number of tokens of each conversation, (n,)."""
    if not conversations:
        return np.empty(0, np.int64)
    return render_all(conversations, tokenizer, context=1 << 62, overflow="drop").lengths


def _chosen(
    conversations: Sequence[Messages], chosen: NDArray[np.bool_], tokenizer: Tokenizer, context: int
) -> Rendered:
    """Renders the chosen conversations; each of them fits the context."""
    kept = [one for one, is_chosen in zip(conversations, chosen, strict=True) if is_chosen]
    return render_all(kept, tokenizer, context=context, overflow="drop")


def write_replies(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling, *, max_tokens: int, end_id: int
) -> list[Reply]:
    """An answer to each prompt. It ends by itself if its end-of-turn token comes within max_tokens and within
    the context.
    """
    if not prompts:
        return []
    context = engine.config.context
    # When the context is full, generation drops half of it and goes on. Such a reply never counts as ended.
    limit = min(max_tokens, context - min(map(len, prompts)) + 1)
    answers = generate_batch(engine, prompts, sampling, max_tokens=limit, stop=[end_id])
    return [
        Reply(ids, len(ids) < limit and len(prompt) + len(ids) <= context)
        for prompt, ids in zip(prompts, answers, strict=True)
    ]


def question_of(messages: Messages) -> list[Mapping[str, str]]:
    """The messages before the first answer."""
    return list(takewhile(lambda message: message["role"] != "assistant", messages))
