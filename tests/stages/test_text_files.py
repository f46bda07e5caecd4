"""Plain and compressed text files, their complaints, and files that appear only when they are complete."""

import errno
import gzip
import re
from io import BytesIO
from pathlib import Path

import pytest
import zstandard

from stages.text_files import (
    RowWriter,
    atomic_file,
    read_chunks,
    read_lines,
    read_text,
    replacing,
    stream_rows,
    suffix_of,
    write_text,
)

PACK = {
    "": lambda data: data,
    ".gz": lambda data: gzip.compress(data),
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
}


@pytest.mark.parametrize("suffix", list(PACK))
def test_compressed_equals_plain(suffix: str) -> None:
    """Catches lines lost at the seams of chunks, and files of several frames read to the first one's end."""
    lines = [b"x" * 700_000, b"", b"last line without newline"]
    first, second = b"one\n" * 3, b"\n".join(lines)
    packed = PACK[suffix](first) + PACK[suffix](second)
    assert list(read_lines(BytesIO(packed), "a.txt" + suffix)) == [b"one"] * 3 + lines


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_cut_off_and_foreign_files(suffix: str) -> None:
    """Catches a half-fetched file that passes for a short one."""
    name, packed = "a.txt" + suffix, PACK[suffix](bytes(range(256)) * 50)
    with pytest.raises(ValueError, match=re.escape(f"{name}: the file is cut off")):
        list(read_chunks(BytesIO(packed[:-3]), name))
    with pytest.raises(ValueError, match=re.escape(f"{name}: damaged, or not a {suffix} file")):
        list(read_chunks(BytesIO(b"plain text, no archive"), name))


def test_text_is_utf8_with_one_newline() -> None:
    """Catches a byte order mark or carriage returns that become tokens, and bytes that are replaced without a word."""
    assert read_text(BytesIO("\ufeffa\r\nb\n".encode()), "a.txt") == "a\nb\n"
    with pytest.raises(ValueError, match=r"a\.txt: not UTF-8 at byte 3; convert the file to UTF-8"):
        read_text(BytesIO(b"abc\xe9d"), "a.txt")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "a.jsonl, line 3: expected one JSON object a line"),
        (b'{"text": "\xe9"}', "a.jsonl, line 3: not UTF-8 at byte 10 of the line"),
        (b"[1]", "a.jsonl, line 3: expected one JSON object a line, got list"),
    ],
)
def test_broken_line_is_named(line: bytes, message: str) -> None:
    """Catches a number that counts rows instead of lines (the second one is empty), and a traceback instead of a line."""
    rows = stream_rows(BytesIO(b'{"text": "one"}\n\n' + line + b"\n"), "a.jsonl")
    assert next(rows) == ("a.jsonl, line 1", {"text": "one"})
    with pytest.raises(ValueError, match=re.escape(message)):
        next(rows)


def test_suffix_behind_compression() -> None:
    """Catches `.zst` taken for the kind of file."""
    assert [suffix_of(name) for name in ("a.JSONL.zst", "b.tar.txt", "c.parquet.gz", "d")] == [".jsonl", ".txt", ".parquet", ""]


def test_file_appears_only_when_complete(tmp_path: Path) -> None:
    """Catches an interrupted write that leaves a file, or destroys the one that was there."""
    path = tmp_path / "sub" / "file"
    with atomic_file(path) as stream:
        stream.write(b"old")
        assert not path.exists()
    with pytest.raises(KeyboardInterrupt), atomic_file(path) as stream:
        stream.write(b"new")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_a_failed_write_names_the_file_and_leaves_the_old_one(tmp_path: Path) -> None:
    """Catches a full disk that destroys the last good file, leaves half of the new one, or surfaces as a traceback."""
    path = tmp_path / "file.txt"
    write_text(path, "old")
    with pytest.raises(ValueError, match=r"file\.txt: cannot be written: No space left.*make room"), replacing(path) as partial:
        partial.write_text("half", encoding="utf-8")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert path.read_text(encoding="utf-8") == "old" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(ValueError, match=r"file\.txt/inner/x\.txt: cannot be written: "):
        write_text(path / "inner" / "x.txt", "x")


def test_what_a_source_fails_with_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    """Catches a broken connection that is reported as a disk that cannot be written."""
    with pytest.raises(ConnectionResetError), atomic_file(tmp_path / "file") as stream:
        stream.write(b"half")
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
    assert list(tmp_path.iterdir()) == []


def test_row_writer_reports_the_files_sha256(tmp_path: Path) -> None:
    """Catches a checksum of something else than the bytes on the disk, and bytes that change from run to run."""
    import hashlib

    digests = []
    for name in ("a", "b"):
        with atomic_file(tmp_path / name) as stream:
            writer = RowWriter(stream)
            for number in range(1000):
                writer.write({"text": f"é{number}"})
            digests.append(writer.finish())
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digests[-1]
    assert digests[0] == digests[1]
