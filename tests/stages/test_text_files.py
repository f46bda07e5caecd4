"""Plain and compressed text files, their error messages, and files that appear only when they are
complete.
"""

import errno
import gzip
import re
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import zstandard

from stages import text_files
from stages.text_files import (
    RowWriter,
    atomic_file,
    atomic_replace,
    read_chunks,
    read_lines,
    read_rows,
    read_text,
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
    """Catches a byte order mark or carriage returns that become tokens, and bytes that are replaced without a
    word.
    """
    assert read_text(BytesIO("\ufeffa\r\nb\n".encode()), "a.txt") == "a\nb\n"
    with pytest.raises(ValueError, match=r"a\.txt: not UTF-8 at byte 3; convert the file to UTF-8"):
        read_text(BytesIO(b"abc\xe9d"), "a.txt")


# Old-Mac and Windows line ends, and those at the seam of two chunks, must not join or split lines, nor reach
# the text.
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_every_line_end(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = end.join(['{"text": "a\\r\\n"}', "", '{"text": "b"}']).encode()
    for size in (1, 2, 3, 5, 1000):
        monkeypatch.setattr(text_files, "_CHUNK_BYTES", size)
        for text in (data, data + end.encode()):
            lines = list(read_lines(BytesIO(text), "a.jsonl"))
            assert lines == [b'{"text": "a\\r\\n"}', b"", b'{"text": "b"}']
    assert read_text(BytesIO(f"a{end}{end}b".encode()), "a.txt") == "a\n\nb"


# A byte order mark is how some editors begin UTF-8; it was dropped in .txt alone.
@pytest.mark.parametrize("size", [4, 1000])
def test_byte_order_mark_of_lines(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "_CHUNK_BYTES", size)
    assert list(read_lines(BytesIO(b"\xef\xbb\xbf{}\n\xef\xbb\xbf\n"), "a.jsonl")) == [b"{}", b"\xef\xbb\xbf"]


# UTF-16 of ASCII letters is valid UTF-8 with a zero next to each letter: text that nobody wants to train on.
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("read", [lambda s, n: read_text(s, n), lambda s, n: list(read_lines(s, n))])
def test_other_unicode_encodings_are_named(encoding: str, read: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^a\.txt: UTF-16 or UTF-32, or no text; convert the file to UTF-8$"
    ):
        read(BytesIO('{"text": "some words"}\n'.encode(encoding)), "a.txt")


def zst_long() -> bytes:
    """A frame as `zstd --long=28` streams it: it asks for a window of 256 MB."""
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=28, enable_ldm=True)
    frame = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return frame.compress(b"line\n" * 1000) + frame.flush()


SKIPPABLE = b"\x50\x2a\x4d\x18\x04\x00\x00\x00note"


# What zstd, gzip, tar and tapes write and their own tools read.
@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.txt.zst", zst_long()),
        ("a.txt.zst", SKIPPABLE + PACK[".zst"](b"line\n" * 400) + SKIPPABLE + PACK[".zst"](b"line\n" * 600)),
        ("a.txt.gz", PACK[".gz"](b"line\n" * 1000) + bytes(5000)),
        ("a.txt.gz", PACK[".gz"](b"line\n" * 400) + PACK[".gz"](b"line\n" * 600) + bytes(3)),
        ("a.txt.GZ", PACK[".gz"](b"line\n" * 1000)),
    ],
    ids=["long window", "skippable frames", "zeros", "members and zeros", "capitals"],
)
@pytest.mark.parametrize("size", [7, 1 << 20])
def test_compressed_as_tools_write(
    name: str, data: bytes, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "_CHUNK_BYTES", size)
    assert read_text(BytesIO(data), name) == "line\n" * 1000


# Bytes after the last frame that are not zero may be a second file that was cut off. Dropping them silently
# loses text.
def test_garbage_after_the_end_is_named() -> None:
    with pytest.raises(ValueError, match=r"a\.txt\.gz: damaged, or not a \.gz file"):
        read_text(BytesIO(PACK[".gz"](b"line\n") + bytes(4) + b"more"), "a.txt.gz")
    with pytest.raises(ValueError, match=r"a\.txt\.gz: damaged, or not a \.gz file"):
        read_text(BytesIO(bytes(100)), "a.txt.gz")


# An array, or a file of another kind, that passes for rows of ours; a bad line without its number.
@pytest.mark.parametrize("line", ["[1]", "", '{"text": "a"'])
def test_our_rows_are_one_object_a_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "[a]"}\n' + line + "\n", encoding="utf-8", newline="\n")
    rows = read_rows(path)
    assert next(rows) == (f"{path.as_posix()}, line 1", {"text": "[a]"})
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: expected one JSON object a line, "):
        next(rows)


# Joining what is there with each new chunk takes hours for a line of a gigabyte.
def test_a_long_line_takes_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "_CHUNK_BYTES", 64)
    data = b"x" * (64 * 50_000)
    begun = time.process_time()
    assert [len(line) for line in read_lines(BytesIO(data + b"\ny"), "a.jsonl")] == [len(data), 1]
    assert time.process_time() - begun < 5  # 0.05 s; if joined again for each chunk, 80 GB are moved


def test_suffix_before_compression() -> None:
    """Catches `.zst` taken for the kind of file."""
    assert [suffix_of(name) for name in ("a.JSONL.zst", "b.tar.txt", "c.parquet.gz", "d")] == [
        ".jsonl",
        ".txt",
        ".parquet",
        "",
    ]


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
    """Catches a full disk that destroys the last good file, leaves half of the new one, or surfaces as a
    traceback.
    """
    path = tmp_path / "file.txt"
    write_text(path, "old")
    with (
        pytest.raises(ValueError, match=r"file\.txt: cannot be written: No space left.*make room"),
        atomic_replace(path) as partial,
    ):
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
    """Catches a checksum of something else than the bytes on the disk, and bytes that change from run to
    run.
    """
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
