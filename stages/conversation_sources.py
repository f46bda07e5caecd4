"""Where conversations come from: records of several shapes -> lists of messages {"role", "content"}.

    messages            {"messages": [{"role": "user", "content": ...}, {"role": "assistant", ...}, ...]}
    prompt_completion   {"prompt": ..., "completion": ...}
    alpaca              {"instruction": ..., "input": ..., "output": ...}: input, if any, follows after an empty line
    auto                one of these three, told by the row's keys
    play                Markdown of a play: successive speeches of a scene, see `play_conversations`
    chatterbot          YAML of chatterbot-corpus: lists of lines that two speakers say in turn

A conversation is an optional system message, then user and assistant in turn. User messages after the last answer are
cut off, since nothing would be learnt from them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stages.corpus import Document, Source
from stages.plays import scenes
from stages.sources import Record

Messages = list[dict[str, str]]
ROW_KEYS = ("messages", "prompt", "completion", "instruction", "input", "output")
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Conversation(Document):
    """A conversation as a document: `text` is its first message, by which it is held out; `size` its bytes."""

    messages: tuple[tuple[str, str], ...]  # (role, content)

    @property
    def chars(self) -> int:
        """Characters of all messages together."""
        return sum(len(content) for _, content in self.messages)

    def row(self) -> dict[str, Any]:
        """The line of the output."""
        return {"messages": [{"role": role, "content": content} for role, content in self.messages]}


def read_conversations(source: Source, records: Iterator[Record], max_chars: int | None) -> Iterator[Conversation]:
    """Conversations of a source's records in order, also those that are too long, which the caller counts.

    Raises:
        ValueError: a record has none of the shapes above, or a message is not a role and a text; the place is named.
    """
    for record in records:
        for turns in _turns(source, record, max_chars):
            messages = _checked(turns, record.where)
            if messages:
                size = sum(len(content.encode()) for _, content in messages)
                first = next(content for role, content in messages if role == "user")
                yield Conversation(record.name, first, size, messages)


def _turns(source: Source, record: Record, max_chars: int | None) -> Iterator[list[tuple[Any, Any]]]:
    if isinstance(record.value, dict):
        if source.format in ("play", "chatterbot"):
            raise ValueError(f"{record.where}: the format {source.format} is read from whole texts, not from rows")
        yield _row_turns(record.value, source.format, record.where)
    elif source.format == "play":
        yield from play_conversations(record.value, source.max_exchanges, max_chars)
    elif source.format == "chatterbot":
        yield from _chatterbot_conversations(record.value, source.max_exchanges, record.where)
    else:
        raise ValueError(f"{record.where}: conversations of the format {source.format} are rows of .jsonl or .parquet")


def _row_turns(row: dict[str, Any], shape: str, where: str) -> list[tuple[Any, Any]]:
    if shape == "auto":
        shape = _shape(row, where)
    try:
        if shape == "messages":
            return [(message["role"], message["content"]) for message in row["messages"]]
        if shape == "prompt_completion":
            return [("user", row["prompt"]), ("assistant", row["completion"])]
        question = f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]
        return [("user", question), ("assistant", row["output"])]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{where}: not of the shape {shape} ({type(error).__name__}: {error})") from None


def _shape(row: dict[str, Any], where: str) -> str:
    for shape, keys in (
        ("messages", {"messages"}),
        ("prompt_completion", {"prompt", "completion"}),
        ("alpaca", {"instruction", "output"}),
    ):
        if all(row.get(key) is not None for key in keys):
            return shape
    raise ValueError(f"{where}: expected messages, or prompt and completion, or instruction and output; "
                     f"got the keys {', '.join(sorted(row)) or 'of an empty object'}")  # fmt: skip


def _checked(turns: list[tuple[Any, Any]], where: str) -> tuple[tuple[str, str], ...]:
    """The turns as (role, content), cut after the last answer; empty if there is none."""
    for role, content in turns:
        if role not in _ROLES or not isinstance(content, str):
            raise ValueError(f"{where}: expected a role among {', '.join(_ROLES)} and a text as content, "
                             f"got {role!r} and {type(content).__name__}")  # fmt: skip
        try:
            content.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{where}: a message holds half a character (a lone surrogate), not valid in UTF-8") from None
    spoken = [role for role, _ in turns if role != "system"]
    in_turn = all(role == ("user", "assistant")[index % 2] for index, role in enumerate(spoken))
    if not in_turn or any(role == "system" for role, _ in turns[1:]):
        raise ValueError(f"{where}: expected user and assistant in turn, a system message only before them; "
                         f"got {', '.join(str(role) for role, _ in turns)}")  # fmt: skip
    while turns and turns[-1][0] != "assistant":
        turns = turns[:-1]
    return tuple(turns)


def play_conversations(markdown: str, max_exchanges: int, max_chars: int | None) -> Iterator[list[tuple[str, str]]]:
    """Successive speeches of a scene, in turn the user's and the assistant's; names and stage directions are left out.

    A conversation is one exchange, or up to max_exchanges while the same two persons speak in turn and all of it is
    within max_chars. The next one starts with its last answer, so that every speech is an answer at most once.
    """
    for scene in scenes(markdown):
        start = 0
        while start + 1 < len(scene):
            end = _conversation_end(scene, start, max_exchanges, max_chars)
            turns = zip(("user", "assistant") * max_exchanges, scene[start:end], strict=False)
            yield [(role, words) for role, (_, words) in turns]
            start = end - 1


def _conversation_end(scene: list[tuple[str, str]], start: int, max_exchanges: int, max_chars: int | None) -> int:
    """End (exclusive) of the conversation that starts at `start`: one exchange, more while persons and length allow."""
    persons = [speaker for speaker, _ in scene[start : start + 2]]
    chars = [len(words) for _, words in scene]
    end = start + 2
    for stop in range(end + 2, min(start + 2 * max_exchanges, len(scene)) + 1, 2):
        same = [speaker for speaker, _ in scene[stop - 2 : stop]] == persons
        if not same or (max_chars is not None and sum(chars[start:stop]) > max_chars):
            break
        end = stop
    return end


def _chatterbot_conversations(text: str, max_exchanges: int, where: str) -> Iterator[list[tuple[str, str]]]:
    """Lists of lines, cut to max_exchanges: in many files the third line is another answer to the first."""
    import yaml

    try:
        entries = yaml.safe_load(text)["conversations"]
    except (yaml.YAMLError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{where}: expected YAML with the list conversations ({reason})") from None
    for entry in entries:
        if isinstance(entry, list) and len(entry) > 1:  # a few entries of the package are a lone line
            lines = [" ".join(str(line).split()) for line in entry]
            yield list(zip(("user", "assistant") * max_exchanges, lines, strict=False))
