"""Local files of every kind: found, read; every error is one line that names the file."""

import gzip
import hashlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from stages.sources.corpus import Source
from stages.sources.records import open_source, read_source
from stages.sources.rows import InputRecord


def texts(source: Source) -> list[tuple[str, str]]:
    opened = open_source(source, (source.text_key,))
    return [(document.name, document.text) for document in read_source(source, opened.records)]


def parquet(rows: list[dict[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("suffix", ["", ".zst", ".gz"])
def test_local_files_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """Catches a kind or compression that reads other documents, an order that depends on the file system,
    empty ones.
    """
    packs: dict[str, Callable[[bytes], bytes]] = {
        "": bytes,
        ".zst": zstandard.ZstdCompressor().compress,
        ".gz": gzip.compress,
    }
    pack = packs[suffix]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for name, data in {
        "in/c.txt": b"whole\nfile\n",
        "in/b.parquet": parquet([{"text": "p1", "n": 1}, {"text": None, "n": 2}, {"text": "p3", "n": 3}]),
        "in/deep/a.jsonl": b'{"text": "j1"}\n{"text": " \\n"}\n{"text": "j3"}\n',
    }.items():
        Path(name + suffix).write_bytes(pack(data))
    found = texts(Source("local", files=("in/**/*", "in/c.txt*")))
    names = ["in/b.parquet", "in/b.parquet", "in/c.txt", "in/deep/a.jsonl", "in/deep/a.jsonl"]
    assert found == [
        (name + suffix, text)
        for name, text in zip(names, ["p1", "p3", "whole\nfile\n", "j1", "j3"], strict=True)
    ]


def test_output_does_not_tell_where_the_files_lie(tmp_path: Path) -> None:
    """Catches folders of this machine in documents and manifest, which would differ from machine to
    machine.
    """
    (tmp_path / "a.txt").write_text("text", encoding="utf-8", newline="\n")
    source = Source("local", files=(str(tmp_path / "*.txt"),))
    assert texts(source) == [("a.txt", "text")]
    digest = hashlib.sha256(b"text").hexdigest()
    assert open_source(source, ()).facts == {"files": [{"name": "a.txt", "bytes": 4, "sha256": digest}]}


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.doc", b"x", "a.doc: expected a name that ends in .txt, .md, .yml, .json, .jsonl, .parquet"),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"body": "y"}\n',
            "a.jsonl, line 2: expected the key 'text' (source.text_key), got",
        ),
        ("a.jsonl", b'{"text": 3}\n', "a.jsonl, line 1: text must be a text, got int"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "a.jsonl, line 1: half a character"),
        ("a.txt", b"\xff", "a.txt: not UTF-8 at byte 0"),
        ("a.parquet", b"no parquet", "a.parquet: damaged, or not a parquet file"),
        ("b.txt", b"x", "files: a.*: no such file"),
    ],
)
def test_local_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes, message: str
) -> None:
    """Catches a wrong file that ends in a traceback or an empty corpus."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(data)
    with pytest.raises(ValueError, match=re.escape(message)):
        texts(Source("local", files=("a.*",)))


def test_play_in_a_row() -> None:
    """Catches a row whose play stays Markdown."""
    source = Source("local", files=("x",), format="play")
    document = next(read_source(source, iter([InputRecord("x", "x, line 1", {"text": "**A**\nWords."})])))
    assert (document.text, document.size) == ("A:\nWords.\n", 10)
