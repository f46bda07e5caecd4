"""Stage download, the only one that uses the network: sources -> documents and conversations, split and checksummed.

Every output appears under its name only when it is complete, the manifest last. The bytes depend on the sources and the
configuration alone. What was fetched is kept in the user's cache folder and checked when it is used again.
"""

import hashlib
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from stages.program import stage_main
from stages.settings import Settings
from stages.sources.chat_formats import ROW_KEYS, Conversation, LeftOut, parse_conversations
from stages.sources.corpus import (
    SPLITS,
    TRAIN,
    VAL,
    Conversations,
    Corpus,
    Document,
    HoldoutRule,
    divide,
    hash_fraction,
    limited,
    mix,
)
from stages.sources.records import OpenedSource, open_source, read_source
from stages.text_files import RowWriter, atomic_file, wrap_write_errors, write_json

FOLDER = Path("data/download")
DOCUMENTS = {split: FOLDER / f"{split}.jsonl.zst" for split in SPLITS}
CONVERSATIONS = {split: FOLDER / f"conversations.{split}.jsonl.zst" for split in SPLITS}
MANIFEST = FOLDER / "manifest.json"

MANY_TAILS, SHORT_TAIL_BYTES = (
    100,
    32,
)  # from so many documents on, ends of fewer bytes on average are refused
_REPORT_BYTES = 100_000_000  # text between two lines of progress


def run(settings: Settings, *, folder: Path = FOLDER) -> None:
    """Fetch the corpus and the conversations and write them to `folder`.

    Raises:
        ValueError: a source can't be read, or a split would be empty.
    """
    manifest = folder / MANIFEST.name
    with wrap_write_errors(manifest):
        manifest.unlink(missing_ok=True)  # what it described is about to be replaced
    sections = {
        "corpus": write_corpus(settings.corpus, folder),
        "conversations": write_conversations(settings.conversations, folder),
    }
    write_json(manifest, sections)
    for section, facts in sections.items():
        unit = "documents" if section == "corpus" else "conversations"
        parts = [
            f"{split} {facts[split]['count']:,} {unit}, {facts[split]['bytes']:,} bytes" for split in SPLITS
        ]
        print(f"{section} {facts['name']}: {'; '.join(parts)}")


class NothingHeldOutError(ValueError):
    """A fraction of a few documents that holds out none; `least` is the smallest fraction that holds out one."""

    def __init__(self, message: str, least: float) -> None:
        super().__init__(message)
        self.least = least


def write_corpus(corpus: Corpus, folder: Path) -> dict[str, Any]:
    """Write {train,val}.jsonl.zst; returns the corpus's section of the manifest."""
    try:
        return _write_corpus(corpus, folder)
    except NothingHeldOutError as error:
        return _write_corpus(
            replace(corpus, validation=_hold_out_one("corpus", corpus.validation, error.least)), folder
        )


def _write_corpus(corpus: Corpus, folder: Path) -> dict[str, Any]:
    opened = [open_source(source, (source.text_key,)) for source in corpus.sources]
    streams = [read_source(source, one.records) for source, one in zip(corpus.sources, opened, strict=True)]
    return _write("corpus", corpus, opened, streams, [folder / path.name for path in DOCUMENTS.values()])


def write_conversations(conversations: Conversations, folder: Path) -> dict[str, Any]:
    """Write conversations.{train,val}.jsonl.zst; returns the conversations' section of the manifest."""
    try:
        return _write_conversations(conversations, folder, LeftOut(conversations.on_bad_row))
    except NothingHeldOutError as error:
        more = _hold_out_one("conversations", conversations.validation, error.least)
        again = LeftOut(conversations.on_bad_row, named=0)  # their lines were printed on the first pass
        return _write_conversations(replace(conversations, validation=more), folder, again)


def _hold_out_one(section: str, validation: HoldoutRule, least: float) -> HoldoutRule:
    """The validation that holds out one document where the fraction asked for, of so few, holds out none; says so."""
    print(
        f"{section}: validation.fraction = {validation.fraction:g} of so few holds out none, so one is held out"
    )
    return replace(validation, fraction=math.nextafter(least, 1.0))


def _write_conversations(conversations: Conversations, folder: Path, unread: LeftOut) -> dict[str, Any]:
    opened = [open_source(source, ROW_KEYS) for source in conversations.sources]
    limit, left_out = conversations.max_chars, {"too_long": 0, "repeated": 0}
    seen: set[bytes] = set()
    streams = [
        _chosen(parse_conversations(source, one.records, limit, unread), limit, seen, left_out)
        for source, one in zip(conversations.sources, opened, strict=True)
    ]
    paths = [folder / path.name for path in CONVERSATIONS.values()]
    try:
        section = _write("conversations", conversations, opened, streams, paths)
    except ValueError as error:
        if seen or not unread.bad_rows:
            raise
        raise ValueError(f"{error}; {unread.bad_rows:,} bad rows, the first: {unread.first_reason}") from None
    if unread.bad_rows:
        print(
            f"conversations: {unread.bad_rows:,} bad rows left out; on_bad_row=error ends at the first",
            file=sys.stderr,
        )
    if section["val"]["count"] == 1:
        print(
            "conversations: one is held out, so eval has no answer_loss_shuffled; hold out more by validation.fraction"
        )
    counts = {"empty": unread.empty, "tool_messages": unread.tool_messages, "bad_rows": unread.bad_rows}
    return section | {"left_out": left_out | counts}


def _chosen(
    stream: Iterator[Conversation], max_chars: int | None, seen: set[bytes], left_out: dict[str, int]
) -> Iterator[Conversation]:
    """Conversations within max_chars that didn't come before; counts the others."""
    for conversation in stream:
        digest = hashlib.sha256(repr(conversation.messages).encode()).digest()
        if max_chars is not None and conversation.chars > max_chars:
            left_out["too_long"] += 1
        elif digest in seen:
            left_out["repeated"] += 1
        else:
            seen.add(digest)
            yield conversation


def _write(
    section: str,
    settings: Corpus | Conversations,
    opened: Sequence[OpenedSource],
    streams: Sequence[Iterator[Document]],
    paths: Sequence[Path],
) -> dict[str, Any]:
    """Mix, split and write the streams; returns what the manifest says of them. paths: one for each of SPLITS."""
    sources = settings.sources
    validations = [source.validation or settings.validation for source in sources]
    bounded = [limited(stream, source.max_bytes) for source, stream in zip(sources, streams, strict=True)]
    splits: dict[str, Any] = {split: {"count": 0, "bytes": 0} for split in SPLITS}
    cut = {"count": 0, "bytes": 0}  # held-out parts of documents that `tail` cut
    taken = [{"count": 0, "bytes": 0} for _ in sources]
    unmatched = {pattern for validation in validations for pattern in validation.documents}
    least = 1.0  # the smallest place of a document's hash
    with ExitStack() as files:
        writers = {
            split: RowWriter(files.enter_context(atomic_file(path)))
            for split, path in zip(SPLITS, paths, strict=True)
        }
        for index, document in mix(bounded, [source.weight for source in sources]):
            if validations[index] is settings.validation:
                least = min(least, hash_fraction(document.text))
            unmatched -= {glob for glob in validations[index].documents if fnmatchcase(document.name, glob)}
            for split, part in divide(document, validations[index]):
                writers[split].write(part.row())
                if validations[index].tail and split == VAL:
                    cut["count"] += 1
                    cut["bytes"] += part.size
                for count in (splits[split], taken[index]):
                    count["count"] += 1
                    count["bytes"] += part.size
            _report(section, sum(count["bytes"] for count in taken), document.size)
        if sources:  # else the corpus is `none`
            if (
                settings.validation.fraction
                and least < 1.0
                and splits[TRAIN]["count"] > 1
                and not splits[VAL]["count"]
            ):
                raise NothingHeldOutError(f"{section}: nothing is held out", least)
            _check(section, settings, splits, unmatched)
            _check_tails(section, cut)
        for split, writer in writers.items():
            splits[split]["sha256"] = writer.finish()
            splits[split]["text_sha256"] = writer.text_sha256
    credits = [
        {"kind": source.kind, "license": source.license, "weight": source.weight, **one.facts, **count}
        for source, one, count in zip(sources, opened, taken, strict=True)
    ]
    return {"name": settings.name, "sources": credits, **splits}


def _report(section: str, total_bytes: int, last_bytes: int) -> None:
    if total_bytes // _REPORT_BYTES > (total_bytes - last_bytes) // _REPORT_BYTES:
        print(f"{section}: {total_bytes / 1e6:,.0f} MB", file=sys.stderr, flush=True)


def _check(
    section: str, settings: Corpus | Conversations, splits: dict[str, Any], unmatched: set[str]
) -> None:
    if unmatched:
        raise ValueError(
            f"{section}.validation.documents: no document is named like {', '.join(sorted(unmatched))}"
        )
    labels = ", ".join(source.label for source in settings.sources)
    if not any(splits[split]["count"] for split in SPLITS):
        raise ValueError(
            f"{section} {settings.name}: nothing to read in {labels}: every text is empty or left out"
        )
    for split in SPLITS:
        if not splits[split]["count"]:
            raise ValueError(f"{section} {settings.name}: the split {split} is empty, all that {labels} has went to the "
                             f"other; change {section}.validation, or give two that differ in their text")  # fmt: skip


def _check_tails(section: str, cut: dict[str, int]) -> None:
    """Raises ValueError where what `tail` cut off many documents is too short to measure anything: the end of a line each."""
    if cut["count"] >= MANY_TAILS and cut["bytes"] < SHORT_TAIL_BYTES * cut["count"]:
        average = cut["bytes"] / cut["count"]
        raise ValueError(
            f"{section}.validation.tail: the held-out ends of {cut['count']:,} documents have {average:.0f} bytes on average; "
            f"hold out whole documents: set {section}.validation.tail=0 {section}.validation.fraction=0.1"
        )


def main() -> None:
    stage_main("download", run)


if __name__ == "__main__":
    main()
