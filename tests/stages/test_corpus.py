"""Sources and validation as configuration, the mixture, the held-out part, and the reader of our files."""

import re
from pathlib import Path

import pytest

from stages.documents import read_documents
from stages.sources.corpus import (
    TRAIN,
    VAL,
    Conversations,
    Corpus,
    Document,
    HoldoutRule,
    Source,
    limit_bytes,
    mix,
    split_document,
)
from stages.text_files import RowWriter, atomic_file


def documents(name: str, sizes: list[int]) -> list[Document]:
    return [Document(name, "x" * size, size) for size in sizes]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kind": "web"}, "source.kind must be one of wheel, hf, local, got 'web'"),
        ({"kind": "local"}, "source of kind local: the key files is missing"),
        (
            {"kind": "hf", "files": ("a",), "dataset": "d"},
            "source of kind hf: the key files belongs to another kind",
        ),
        ({"kind": "wheel", "package": "p", "version": "1", "files": ("a",)}, "the key sha256 is missing"),
        (
            {"kind": "local", "files": ("a",), "weight": 0.0},
            "source.weight must be a positive number, got 0.0",
        ),
        (
            {"kind": "local", "files": ("a",), "weight": float("nan")},
            "source.weight must be a positive number, got nan",
        ),
        ({"kind": "local", "files": ("a",), "max_bytes": 0}, "source.max_bytes must be at least 1, got 0"),
    ],
)
def test_source_errors(keys: dict, message: str) -> None:
    """Catches a key that is silently without effect, and a value that would fail only after hours of
    download.
    """
    with pytest.raises(ValueError, match=re.escape(message)):
        Source(**keys)


def test_section_errors() -> None:
    """Catches mixtures whose shares are undefined, a missing held-out part and a format of the other
    section.
    """
    source = Source("local", files=("a.txt",))
    weighted = Source("local", files=("a.txt",), weight=1.0)
    tenth = HoldoutRule(fraction=0.1)
    for make, message in (
        (lambda: Corpus("c", (), tenth), "corpus.sources is empty"),
        (lambda: Corpus("c", (source, weighted), tenth), "give every source a weight, or none"),
        (lambda: Corpus("c", (source,), HoldoutRule()), "corpus.validation: set one of"),
        (
            lambda: Corpus("c", (Source("local", files=("a",), format="alpaca"),), tenth),
            "format must be one of auto, play",
        ),
        (lambda: HoldoutRule(fraction=0.1, tail=0.1), "set one of documents, fraction and tail"),
        (lambda: HoldoutRule(fraction=1.0), "validation.fraction must be at least 0 and below 1, got 1.0"),
        (lambda: Conversations("c", (source,), HoldoutRule(tail=0.1)), "a conversation has no tail"),
        (
            lambda: Conversations("c", (source,), tenth, max_chars=0),
            "conversations.max_chars must be at least 1",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            make()


def test_mixture_keeps_its_shares_and_its_order() -> None:
    """Catches shares of documents instead of bytes, an order that isn't fixed, and a mixture that continues
    with one source.
    """
    books, web = documents("book", [100] * 50), documents("web", [10] * 1000)
    mixed = list(mix([iter(books), iter(web)], [0.25, 0.75]))
    assert mixed == list(mix([iter(books), iter(web)], [0.25, 0.75]))
    taken = [sum(document.size for index, document in mixed if index == source) for source in (0, 1)]
    # It ends when the source whose turn it is has no more: at any moment a source is ahead by one document at
    # most.
    assert taken[0] == 5000 or taken[1] == 10000
    assert abs(taken[0] / 0.25 - taken[1] / 0.75) <= max(100 / 0.25, 10 / 0.75)
    first = [document.name for _, document in mixed[:31]]
    assert first == ["book"] + ["web"] * 30  # a book of 100 bytes, then web pages up to 300


def test_without_weights_all_of_every_source() -> None:
    """Catches a source that is cut although no share was asked for."""
    assert [
        d.size for _, d in mix([iter(documents("a", [1, 2])), iter(documents("b", [3]))], [None, None])
    ] == [1, 2, 3]


def test_byte_limit_counts_the_document_that_reaches_it() -> None:
    """Catches a limit that is off by one document, and one that reads a document too many from the
    network.
    """
    stream = iter(documents("a", [4, 4, 4, 4]))
    assert [d.size for d in limit_bytes(stream, 8)] == [4, 4]
    assert len(list(stream)) == 2
    assert len(list(limit_bytes(iter(documents("a", [4, 4])), None))) == 2


def test_fraction_depends_on_the_text_alone() -> None:
    """Catches a choice that changes with the order, the name or the process, and copies of a text in both
    splits.
    """
    validation = HoldoutRule(fraction=0.25)
    held_out = {text for text in map(str, range(4000)) if validation.holds_out("a", text)}
    assert held_out == {text for text in map(str, reversed(range(4000))) if validation.holds_out("b", text)}
    # Binomial with p = 1/4: 5 standard deviations are 5 * sqrt(4000 * 3/16) = 137.
    assert abs(len(held_out) - 1000) < 137
    assert "9" in held_out and "1" not in held_out  # their SHA-256 begin with 19 and 6b; a quarter ends at 40


def test_documents_are_held_out_whole_by_name() -> None:
    """Catches globs over the text instead of the name."""
    validation = HoldoutRule(documents=("*/b.txt",))
    assert [split for split, _ in split_document(Document("x/b.txt", "text", 4), validation)] == [VAL]
    assert [split for split, _ in split_document(Document("x/a.txt", "x/b.txt", 7), validation)] == [TRAIN]


@pytest.mark.parametrize(
    "text", ["a\nbb\nccc\ndddd\n", "no newline at all", "é\né\né\né\né\né\né\né\né\né\n", "x"]
)
def test_tail_loses_nothing(text: str) -> None:
    """Catches a cut that drops or doubles a character, counts characters as bytes, or yields an empty
    part.
    """
    parts = list(split_document(Document("a", text, len(text.encode())), HoldoutRule(tail=0.3)))
    assert "".join(part.text for _, part in parts) == text
    assert all(part.size == len(part.text.encode()) > 0 for _, part in parts)
    assert [split for split, _ in parts] in ([TRAIN, VAL], [VAL])


def test_tail_is_cut_at_a_line() -> None:
    """Catches a validation text that begins within a word."""
    parts = dict(split_document(Document("a", "aaaa\nbbbb\ncccc\n", 15), HoldoutRule(tail=0.4)))
    assert (parts[TRAIN].text, parts[VAL].text) == ("aaaa\n", "bbbb\ncccc\n")


def test_read_documents(tmp_path: Path) -> None:
    """Catches a reader that splits a document at its own newlines, or passes a file that isn't one of
    ours.
    """
    path = tmp_path / "train.jsonl.zst"
    texts = ["two\nlines\n", "é " * 100_000, "last"]
    with atomic_file(path) as stream:
        writer = RowWriter(stream)
        for text in texts:
            writer.write({"text": text, "source": "s"})
        writer.finish()
    assert list(read_documents(path)) == texts
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"train\.jsonl\.zst: the file is cut off"):
        list(read_documents(path))
    with pytest.raises(ValueError, match=r"none\.jsonl\.zst: no such file"):
        list(read_documents(tmp_path / "none.jsonl.zst"))
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n', encoding="utf-8", newline="\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1: expected a row with the key text"):
        list(read_documents(tmp_path / "rows.jsonl"))
