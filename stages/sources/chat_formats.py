"""Conversations from records of several shapes: lists of messages {"role", "content"}.

    messages            {"messages": [{"role": "user", "content": ...}, {"role": "assistant", ...}, ...]}
    sharegpt            {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...},
    ...]}
    prompt_completion   {"prompt": ..., "completion": ...}: texts, or lists of messages
    alpaca              {"instruction": ..., "input": ..., "output": ...}: input, if any, is appended after an
    empty line
    auto                one of these four, detected from the row's keys
    play                Markdown of a play: successive speeches of a scene, see `play_conversations`
    chatterbot          YAML of chatterbot-corpus: lists of lines by two alternating speakers

A conversation is an optional system message, then alternating user and assistant messages. Rules for a row's
messages:

    role names          developer = system; human = user; gpt and similar = assistant
    tool messages       left out and counted, as are assistant messages that only call tools
    same role twice     joined, with an empty line between
    assistant first     left out, up to the first user message
    empty exchange      left out, if the question or the answer is empty
    end                 cut after the last answer

Any other row is a bad row. It is left out and counted, or ends the run (`conversations.on_bad_row`).
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

from stages.sources.corpus import Document, Source
from stages.sources.plays import scenes
from stages.sources.rows import InputRecord

ROW_KEYS = ("messages", "conversations", "prompt", "completion", "instruction", "input", "output")
# The keys that identify each shape, in the order of the tests.
SHAPES = {
    "messages": {"messages"},
    "sharegpt": {"conversations"},
    "prompt_completion": {"prompt", "completion"},
    "alpaca": {"instruction", "output"},
}
TOOL = "tool"  # the role of a message that is left out
ROLES = {
    **{name: "system" for name in ("system", "developer")},
    **{name: "user" for name in ("user", "human")},
    **{name: "assistant" for name in ("assistant", "gpt", "chatgpt", "bot", "model")},
    **{
        name: TOOL
        for name in ("tool", "function", "function_call", "function_response", "observation", "ipython")
    },
}

Turn = tuple[str, str]  # role and content


@dataclass(frozen=True)
class Conversation(Document):
    """A conversation as a document. `text` is its first question, which decides the split; `size` is its
    bytes.
    """

    messages: tuple[Turn, ...]

    @property
    def chars(self) -> int:
        """Characters of all messages together."""
        return sum(len(content) for _, content in self.messages)

    def row(self) -> dict[str, Any]:
        """The conversation as a row of the output."""
        return {"messages": [{"role": role, "content": content} for role, content in self.messages]}


@dataclass
class LeftOut:
    """Counts of what was left out. The first bad rows are printed to standard error.

    Args:
        on_bad_row: "error" ends the run at the first bad row.
        named: number of bad rows to print.
    """

    on_bad_row: Literal["leave_out", "error"] = "error"
    named: int = 3
    empty: int = 0
    tool_messages: int = 0
    bad_rows: int = 0
    first_reason: str = field(default="", repr=False)

    def bad_row(self, error: ValueError) -> None:
        """Counts a bad row, or raises its error if on_bad_row is "error"."""
        if self.on_bad_row == "error":
            raise error
        self.bad_rows += 1
        self.first_reason = self.first_reason or str(error)
        if self.bad_rows <= self.named:
            print(f"left out: {error}", file=sys.stderr)


def parse_conversations(
    source: Source, records: Iterator[InputRecord], max_chars: int | None, left_out: LeftOut
) -> Iterator[Conversation]:
    """Conversations of a source's records in order. Too long ones are included; the caller counts them.

    Raises:
        ValueError: a bad row, if on_bad_row is "error"; or the source's format does not apply to such
            records.
    """
    for record in records:
        for turns in _turns(source, record, max_chars, left_out):
            try:
                messages = _conversation(turns, record.where, left_out)
            except ValueError as error:
                left_out.bad_row(error)
                continue
            if messages:
                size = sum(len(content.encode()) for _, content in messages)
                first = next(content for role, content in messages if role == "user")
                yield Conversation(record.name, first, size, messages)
            else:
                left_out.empty += 1


def _turns(
    source: Source, record: InputRecord, max_chars: int | None, left_out: LeftOut
) -> Iterator[Sequence[tuple[Any, Any]]]:
    if isinstance(record.value, ValueError):
        left_out.bad_row(record.value)
    elif isinstance(record.value, dict):
        if source.format in ("play", "chatterbot"):
            raise ValueError(
                f"{record.where}: the format {source.format} is read from whole texts, not from rows; set "
                "format: auto"
            )
        try:
            yield _row_turns(record.value, source.format, record.where)
        except ValueError as error:
            left_out.bad_row(error)
    elif source.format == "play":
        yield from play_conversations(record.value, source.max_exchanges, max_chars)
    elif source.format == "chatterbot":
        yield from _chatterbot_conversations(record.value, source.max_exchanges, record.where)
    else:
        kinds = ".json, .jsonl or .parquet"
        raise ValueError(f"{record.where}: conversations of the format {source.format} are rows of {kinds}; "
                         "leave this file out of files")  # fmt: skip


def _row_turns(row: dict[str, Any], shape: str, where: str) -> list[tuple[Any, Any]]:
    """The messages of a row as pairs (role, content), unchecked."""
    if shape == "auto":
        shape = _shape(row, where)
    try:
        if shape in ("messages", "sharegpt"):
            return _listed(row["messages" if shape == "messages" else "conversations"])
        if shape == "prompt_completion":
            return [*_listed(row["prompt"], "user"), *_listed(row["completion"], "assistant")]
        question = f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]
        return [("user", question), ("assistant", row["output"])]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: not of the shape {shape} ({type(error).__name__}: {error})") from None


def _listed(value: Any, role: str = "") -> list[tuple[Any, Any]]:
    """Pairs (role, content) of a list of messages, by either pair of keys. With `role`, a text is one message
    of that role.
    """
    if (value is None or isinstance(value, str)) and role:
        return [(role, value)]
    if not isinstance(value, list):
        raise TypeError(f"expected a list of messages, got {type(value).__name__}")
    found = []
    for message in value:
        calls = message.get("tool_calls") or message.get("function_call")
        content = message["content"] if "content" in message or "value" not in message else message["value"]
        found.append((message["role"] if "role" in message else message["from"], content))
        if calls and not content:
            found[-1] = (TOOL, "")
    return found


def _shape(row: dict[str, Any], where: str) -> str:
    filled = {key for key in row if row[key] is not None}
    for present in (filled, row.keys()):  # filled keys first: a table has every column, empty ones too
        for shape, keys in SHAPES.items():
            if keys <= present:
                return shape
    raise ValueError(f"{where}: expected messages, conversations, prompt and completion, or instruction and "
                     "output; "
                     f"got the keys {', '.join(sorted(row)) or 'of an empty object'}")  # fmt: skip


def _conversation(turns: Sequence[tuple[Any, Any]], where: str, left_out: LeftOut) -> tuple[Turn, ...]:
    """The turns as a conversation. Empty if no question has an answer; ValueError if a turn is malformed."""
    read = [_turn(role, content, where) for role, content in turns]
    spoken = [turn for turn in read if turn[0] != TOOL]
    left_out.tool_messages += len(read) - len(spoken)
    joined = [
        (role, "\n\n".join(text for _, text in group))
        for role, group in groupby(spoken, key=lambda turn: turn[0])
    ]
    system = joined[:1] if joined and joined[0][0] == "system" else []
    rest = joined[len(system) :]
    if any(role == "system" for role, _ in rest):
        roles = ", ".join(role for role, _ in joined)
        raise ValueError(f"{where}: expected a system message only before all others, got {roles}")
    if rest and rest[0][0] == "assistant":
        rest = rest[1:]
    # The roles alternate; an unanswered last question is dropped.
    exchanges = zip(rest[::2], rest[1::2], strict=False)
    kept = [exchange for exchange in exchanges if all(content.strip() for _, content in exchange)]
    if system and not system[0][1].strip():
        system = []
    return tuple([*system, *(turn for exchange in kept for turn in exchange)]) if kept else ()


def _turn(role: Any, content: Any, where: str) -> Turn:
    """One message with our name of its role. ValueError if the role is unknown or the content is no text."""
    name = ROLES.get(role.lower()) if isinstance(role, str) else None
    if name is None:
        raise ValueError(f"{where}: expected a role among {', '.join(sorted(ROLES))}, got {role!r:.60}")
    if name == TOOL:
        return TOOL, ""
    if content is None:
        return name, ""
    if isinstance(content, list):
        content = "".join(_part(part, where) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{where}: expected a text as content of {role}, got {type(content).__name__}")
    try:
        content.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{where}: a message holds half a character (a lone surrogate), not valid in UTF-8; remove it"
        ) from None
    return name, content


def _part(part: Any, where: str) -> str:
    """The text of one part of a message whose content is a list."""
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ValueError(f"{where}: expected parts of the type text, got one of {kind!r:.60}")


def play_conversations(
    markdown: str, max_exchanges: int, max_chars: int | None
) -> Iterator[list[tuple[str, str]]]:
    """Conversations from successive speeches of a scene, alternately the user's and the assistant's.

    Names and stage directions are left out. A conversation is one exchange. It grows up to max_exchanges
    while the same two persons alternate and its length stays within max_chars. The next conversation starts
    with the last answer, so every speech is an answer at most once.
    """
    for scene in scenes(markdown):
        start = 0
        while start + 1 < len(scene):
            end = _conversation_end(scene, start, max_exchanges, max_chars)
            turns = zip(("user", "assistant") * max_exchanges, scene[start:end], strict=False)
            yield [(role, speech) for role, (_, speech) in turns]
            start = end - 1


def _conversation_end(
    scene: list[tuple[str, str]], start: int, max_exchanges: int, max_chars: int | None
) -> int:
    """End (exclusive) of the conversation that starts at `start`: one exchange, or more as persons and length
    allow.
    """
    persons = [speaker for speaker, _ in scene[start : start + 2]]
    chars = [len(speech) for _, speech in scene]
    end = start + 2
    for stop in range(end + 2, min(start + 2 * max_exchanges, len(scene)) + 1, 2):
        same = [speaker for speaker, _ in scene[stop - 2 : stop]] == persons
        if not same or (max_chars is not None and sum(chars[start:stop]) > max_chars):
            break
        end = stop
    return end


def _chatterbot_conversations(text: str, max_exchanges: int, where: str) -> Iterator[list[tuple[str, str]]]:
    """Lists of lines, cut to max_exchanges. In many files the third line is a second answer to the first."""
    import yaml

    try:
        entries = yaml.safe_load(text)["conversations"]
    except (yaml.YAMLError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{where}: expected YAML with the list conversations ({reason})") from None
    for entry in entries:
        if isinstance(entry, list) and len(entry) > 1:  # a few entries of the package have only one line
            lines = [" ".join(str(line).split()) for line in entry]
            yield list(zip(("user", "assistant") * max_exchanges, lines, strict=False))
