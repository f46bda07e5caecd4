"""Conversations as tokens: the chat template, the loss mask, and truncation to the context.

The template, without any character between its parts:

    [<|system|> content <|end|>]  <|user|> content <|end|>  <|assistant|> content <|end|>  <|user|> ...

Each special token is one id, and encoding a text never gives such an id, whatever a user types. Supervised
tokens are the contents of the assistant and the <|end|> after each: exactly the tokens that the model will
have to write.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stages.batches import permute_indices
from stages.special_tokens import END, ROLES, opener
from stages.text_files import read_rows
from stages.tokenizer import Tokenizer

CHUNK = 4096  # conversations encoded in one call: keeps all cores busy with little memory

Messages = Sequence[Mapping[str, str]]
Overflow = Literal["drop", "truncate"]


class Part(NamedTuple):
    """One rendered message: <|role|> content <|end|>."""

    role: str
    ids: NDArray[np.int32]


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a special token; ValueError if the tokenizer lacks it."""
    if token not in tokenizer.special:
        raise ValueError(
            f"the tokenizer has no special token {token}; add it to train_bpe.special_tokens and run `make "
            "repro`"
        )
    return tokenizer.special[token]


def read_conversations(path: Path) -> Iterator[list[dict[str, str]]]:
    """Streams the messages of each line of a conversations.{train,val}.jsonl.zst, in order.

    Raises:
        ValueError: a line is not a conversation; the message names file and line.
    """
    for where, row in read_rows(path):
        try:
            validate_messages(row.get("messages"))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        yield row["messages"]


def validate_messages(messages: Any) -> None:
    """Raises ValueError if messages are not a list of {"role", "content"}, or a system message is not the
    first.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"messages: expected a list of at least one message, got {messages!r:.60}")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise ValueError(
                f'message {number}: expected {{"role": ..., "content": text}}, got {message!r:.60}'
            )
        if message.get("role") not in ROLES:
            raise ValueError(
                f"message {number}: expected a role of {', '.join(ROLES)}, got {message.get('role')!r:.60}"
            )
        if message["role"] == "system" and number > 0:
            raise ValueError(f"message {number}: expected a system message only as the first")


def render(messages: Messages, tokenizer: Tokenizer) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Renders one conversation with the chat template.

    Args:
        messages: of {"role": system | user | assistant, "content": text}.
        tokenizer: has the special tokens of the template.

    Returns:
        ids (n,) int32, and weights (n,) fp32: 1 for a supervised token (content and <|end|> of the
        assistant), else 0.

    Raises:
        ValueError: a message is malformed, or the tokenizer lacks a special token.
    """
    validate_messages(messages)
    (parts,) = _encode([messages], tokenizer)
    ids, supervised = _join(parts)
    return ids, supervised.astype(np.float32)


def render_prompt(messages: Messages, tokenizer: Tokenizer) -> NDArray[np.int32]:
    """The prompt for an answer: the conversation so far, then <|assistant|>."""
    ids, _ = render(messages, tokenizer)
    return np.append(ids, np.int32(special_id(tokenizer, opener("assistant"))))


@dataclass(frozen=True)
class Rendered:
    """Concatenated conversations, each of at most context tokens and with supervised tokens.

    Args:
        ids:        (total,) int32.
        supervised: (total,) bool, whether the token counts in the loss.
        starts:     (number + 1,) int64, start of each conversation, and the end.
        counts: number of conversations read; kept; cut (a part of kept); dropped as too_long or unanswered.
    """

    ids: NDArray[np.int32]
    supervised: NDArray[np.bool_]
    starts: NDArray[np.int64]
    counts: dict[str, int]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """ids and supervised of one conversation."""
        inside = slice(self.starts[number], self.starts[number + 1])
        return self.ids[inside], self.supervised[inside]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each conversation."""
        return np.diff(self.starts)

    def describe(self) -> str:
        """The counts in one line."""
        c = self.counts
        return (
            f"{c['kept']:,} of {c['read']:,} conversations kept, {c['cut']:,} of them cut to the context; "
            f"dropped: {c['too_long']:,} too long, {c['unanswered']:,} without an answer; "
            f"{len(self.ids):,} tokens, {int(self.supervised.sum()):,} of them supervised"
        )


def render_all(
    conversations: Iterable[Messages], tokenizer: Tokenizer, *, context: int, overflow: Overflow
) -> Rendered:
    """Renders many conversations with the chat template; those longer than the context are dropped or
    truncated.

    Messages after the last answer are removed, since none of their tokens are supervised. Conversations
    without an answer are dropped.

    Raises:
        ValueError: no conversation is left, or the tokenizer lacks a special token.
    """
    counts = dict.fromkeys(("read", "kept", "cut", "too_long", "unanswered"), 0)
    kept: list[tuple[NDArray[np.int32], NDArray[np.bool_]]] = []
    source = iter(conversations)
    while chunk := list(islice(source, CHUNK)):
        counts["read"] += len(chunk)
        for parts in _encode(chunk, tokenizer):
            answers = [number for number, part in enumerate(parts) if part.role == "assistant"]
            if not answers:
                counts["unanswered"] += 1
                continue
            whole = parts[: answers[-1] + 1]
            if _size(whole) > context:
                cut = truncate_conversation(whole, context) if overflow == "truncate" else None
                counts["too_long" if cut is None else "cut"] += 1
                if cut is None:
                    continue
                whole = cut
            kept.append(_join(whole))
    counts["kept"] = len(kept)
    if not kept:
        raise ValueError(
            f"no conversation is left of {counts['read']}: {counts['too_long']} are longer than "
            f"model.context = {context}, {counts['unanswered']} have no answer; use other conversations, or "
            "set a larger model.context or sft.overflow: truncate"
        )
    starts = np.cumsum([0, *(len(ids) for ids, _ in kept)], dtype=np.int64)
    return Rendered(
        np.concatenate([ids for ids, _ in kept]), np.concatenate([s for _, s in kept]), starts, counts
    )


def truncate_conversation(parts: list[Part], context: int) -> list[Part] | None:
    """Shortens a rendered conversation from the front until it fits. It must end with an answer; answers are
    never cut.

    Removes, in this order and as far as needed: the oldest turns (a user's message and everything up to the
    next one) except the last; the system message; the beginning of the last question. None if that does not
    suffice.
    """
    system = parts[:1] if parts[0].role == "system" else []
    rest = parts[len(system) :]
    questions = [number for number, part in enumerate(rest) if part.role == "user" and number > 0]
    for first in [0, *questions]:
        shorter = system + rest[first:]
        if _size(shorter) <= context:
            return shorter
    last = rest[questions[-1] :] if questions else rest
    excess = _size(last) - context
    if excess <= 0:
        return last
    role, ids = last[0]
    if role != "user" or excess > len(ids) - 2:  # 2: <|user|> and <|end|> stay
        return None
    return [Part(role, np.concatenate((ids[:1], ids[1 + excess :]))), *last[1:]]


def shuffle_questions(conversations: Sequence[Messages], seed: int) -> list[list[dict[str, str]]]:
    """Replaces the questions of each conversation by those of another one: shows whether a model uses the
    question.

    A seeded permutation without fixed points chooses the other conversation. Its user messages replace the
    own ones in order; if it has fewer, they repeat from the first. System and assistant messages stay. A
    conversation without a user message does not change.

    Raises:
        ValueError: fewer than two conversations have a question.
    """
    questions = [
        [message["content"] for message in one if message["role"] == "user"] for one in conversations
    ]
    asking = np.flatnonzero([len(asked) for asked in questions])
    if len(asking) < 2:
        raise ValueError(
            f"expected at least 2 conversations with a question to shuffle them, got {len(asking)}"
        )
    order = asking[permute_indices(np.arange(len(asking)), len(asking), seed)]
    donors = dict(
        zip(order.tolist(), np.roll(order, -1).tolist(), strict=True)
    )  # one cycle through all of them
    result = []
    for number, messages in enumerate(conversations):
        asked = cycle(questions[donors.get(number, number)])
        result.append(
            [
                {**message, "content": next(asked)} if message["role"] == "user" else {**message}
                for message in messages
            ]
        )
    return result


def _encode(conversations: Sequence[Messages], tokenizer: Tokenizer) -> Iterator[list[Part]]:
    """The parts of each conversation; one call encodes all contents."""
    opening = {role: [special_id(tokenizer, opener(role))] for role in ROLES}
    end = [special_id(tokenizer, END)]
    contents = iter(
        tokenizer.encode_batch([message["content"] for messages in conversations for message in messages])
    )
    for messages in conversations:
        yield [
            Part(
                message["role"],
                np.concatenate((opening[message["role"]], next(contents), end), dtype=np.int32),
            )
            for message in messages
        ]


def _size(parts: Sequence[Part]) -> int:
    return sum(len(part.ids) for part in parts)


def _join(parts: Sequence[Part]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Ids of a conversation, and which are supervised: the parts of the assistant, without <|assistant|>
    itself.
    """
    supervised = [(np.arange(len(part.ids)) > 0) & (part.role == "assistant") for part in parts]
    return np.concatenate([part.ids for part in parts]), np.concatenate(supervised)
