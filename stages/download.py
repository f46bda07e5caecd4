"""The stage download: sources -> documents and conversations, split into train and val. No other stage uses
the network.

Writes data/download, the manifest last. `python -m stages.download [overrides]`.
Every output appears under its name only when it is complete. The bytes depend only on the sources and the
configuration. Fetched files are kept in the user's cache folder, and checked when they are used again.
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
    hash_fraction,
    limit_bytes,
    mix,
    split_document,
)
from stages.sources.records import OpenedSource, open_source, read_source
from stages.text_files import RowWriter, atomic_file, wrap_write_errors, write_json

FOLDER = Path("data/download")
DOCUMENTS = {split: FOLDER / f"{split}.jsonl.zst" for split in SPLITS}
CONVERSATIONS = {split: FOLDER / f"conversations.{split}.jsonl.zst" for split in SPLITS}
MANIFEST = FOLDER / "manifest.json"

# `tail` is refused if it cuts at least MANY_TAILS documents and holds out fewer than SHORT_TAIL_BYTES of each
# on average.
MANY_TAILS, SHORT_TAIL_BYTES = 100, 32
_REPORT_BYTES = 100_000_000  # of text between two lines of progress


def run(settings: Settings, *, folder: Path = FOLDER) -> None:
    """Fetch the corpus and the conversations and write them to `folder`.

    Raises:
        ValueError: a source cannot be read, or a split would be empty.
    """
    manifest = folder / MANIFEST.name
    with wrap_write_errors(manifest):
        manifest.unlink(missing_ok=True)  # the files that it describes are about to be replaced
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
    """The fraction holds out no document. `smallest_hash` is the fraction above which it holds out one."""

    def __init__(self, message: str, smallest_hash: float) -> None:
        super().__init__(message)
        self.smallest_hash = smallest_hash


def write_corpus(corpus: Corpus, folder: Path) -> dict[str, Any]:
    """Write {train,val}.jsonl.zst; returns the corpus's section of the manifest."""
    try:
        return _write_corpus(corpus, folder)
    except NothingHeldOutError as error:
        return _write_corpus(
            replace(corpus, validation=_hold_out_one("corpus", corpus.validation, error.smallest_hash)),
            folder,
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
        rule = _hold_out_one("conversations", conversations.validation, error.smallest_hash)
        again = LeftOut(conversations.on_bad_row, named=0)  # the first pass printed them
        return _write_conversations(replace(conversations, validation=rule), folder, again)


def _hold_out_one(section: str, rule: HoldoutRule, smallest_hash: float) -> HoldoutRule:
    """The rule with a fraction that holds out one document, for a corpus so small that the given one holds
    out none.
    """
    print(f"{section}: validation.fraction = {rule.fraction:g} of so few holds out none, so one is held out")
    return replace(rule, fraction=math.nextafter(smallest_hash, 1.0))


def _write_conversations(conversations: Conversations, folder: Path, unparsed: LeftOut) -> dict[str, Any]:
    opened = [open_source(source, ROW_KEYS) for source in conversations.sources]
    limit, left_out = conversations.max_chars, {"too_long": 0, "repeated": 0}
    seen: set[bytes] = set()
    streams = [
        _filter(parse_conversations(source, one.records, limit, unparsed), limit, seen, left_out)
        for source, one in zip(conversations.sources, opened, strict=True)
    ]
    paths = [folder / path.name for path in CONVERSATIONS.values()]
    try:
        section = _write("conversations", conversations, opened, streams, paths)
    except ValueError as error:
        if seen or not unparsed.bad_rows:
            raise
        problem = f"{unparsed.bad_rows:,} bad rows, the first: {unparsed.first_reason}"
        raise ValueError(f"{error}; {problem}") from None
    if unparsed.bad_rows:
        print(
            f"conversations: {unparsed.bad_rows:,} bad rows left out; conversations.on_bad_row=error stops "
            "at the first",
            file=sys.stderr,
        )
    if section["val"]["count"] == 1:
        print(
            "conversations: one is held out, so eval has no answer_loss_shuffled; raise "
            "conversations.validation.fraction"
        )
    counts = {"empty": unparsed.empty, "tool_messages": unparsed.tool_messages, "bad_rows": unparsed.bad_rows}
    return section | {"left_out": left_out | counts}


def _filter(
    stream: Iterator[Conversation], max_chars: int | None, seen: set[bytes], left_out: dict[str, int]
) -> Iterator[Conversation]:
    """Conversations within max_chars, without repetitions. Counts those left out."""
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
    """Mix, split and write the streams; returns the section of the manifest. paths: one for each of
    SPLITS.
    """
    sources = settings.sources
    rules = [source.validation or settings.validation for source in sources]
    bounded = [limit_bytes(stream, source.max_bytes) for source, stream in zip(sources, streams, strict=True)]
    splits: dict[str, Any] = {split: {"count": 0, "bytes": 0} for split in SPLITS}
    tails = {"count": 0, "bytes": 0}  # parts of documents that `tail` holds out
    taken = [{"count": 0, "bytes": 0} for _ in sources]
    unmatched = {pattern for rule in rules for pattern in rule.documents}
    smallest_hash = 1.0  # of the documents that the section's rule applies to
    with ExitStack() as files:
        writers = {
            split: RowWriter(files.enter_context(atomic_file(path)))
            for split, path in zip(SPLITS, paths, strict=True)
        }
        for index, document in mix(bounded, [source.weight for source in sources]):
            rule = rules[index]
            if rule is settings.validation:
                smallest_hash = min(smallest_hash, hash_fraction(document.text))
            unmatched -= {glob for glob in rule.documents if fnmatchcase(document.name, glob)}
            for split, part in split_document(document, rule):
                writers[split].write(part.row())
                if rule.tail and split == VAL:
                    tails["count"] += 1
                    tails["bytes"] += part.size
                for count in (splits[split], taken[index]):
                    count["count"] += 1
                    count["bytes"] += part.size
            _report(section, sum(count["bytes"] for count in taken), document.size)
        if sources:  # corpus=none has none
            few = splits[TRAIN]["count"] > 1 and not splits[VAL]["count"]
            if few and settings.validation.fraction and smallest_hash < 1.0:
                raise NothingHeldOutError(f"{section}: nothing is held out", smallest_hash)
            _check_splits(section, settings, splits, unmatched)
            _check_tails(section, tails)
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


def _check_splits(
    section: str, settings: Corpus | Conversations, splits: dict[str, Any], unmatched: set[str]
) -> None:
    if unmatched:
        raise ValueError(
            f"{section}.validation.documents: no document is named like {', '.join(sorted(unmatched))}; "
            "correct it"
        )
    labels = ", ".join(source.label for source in settings.sources)
    if not any(splits[split]["count"] for split in SPLITS):
        raise ValueError(
            f"{section} {settings.name}: nothing to read in {labels}: every text is empty or left out; give "
            "it text"
        )
    for split in SPLITS:
        if not splits[split]["count"]:
            raise ValueError(f"{section} {settings.name}: the split {split} is empty: all of {labels} went "
                             "to the other split; "
                             f"change {section}.validation, or give at least two different "
                             "texts")  # fmt: skip


def _check_tails(section: str, tails: dict[str, int]) -> None:
    """Raises ValueError if the held-out ends of many documents are too short to measure a loss on."""
    if tails["count"] >= MANY_TAILS and tails["bytes"] < SHORT_TAIL_BYTES * tails["count"]:
        average = tails["bytes"] / tails["count"]
        raise ValueError(
            f"{section}.validation.tail: the held-out ends of {tails['count']:,} documents have "
            f"{average:.0f} bytes on average; "
            f"hold out whole documents: set {section}.validation.tail=0 {section}.validation.fraction=0.1"
        )


def main() -> None:
    """Runs the stage with params.yaml and the overrides of the command line."""
    stage_main("download", run)


if __name__ == "__main__":
    main()
