"""Text files: plain, .gz or .zst; whole, by line, or by JSON row; and the writer of this project's jsonl.zst files.

Every reader streams, and every complaint names the file, and the line where there is one.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

_CHUNK_BYTES = 1 << 20
_ZSTD_LEVEL = 6  # not tuned; fixed, since the level is part of the output's bytes
_COMPRESSED = (".zst", ".gz")


def suffix_of(name: str) -> str:
    """The suffix that says what a file holds: `.jsonl` of `a.jsonl.zst`."""
    path = Path(name.lower())
    return path.with_suffix("").suffix if path.suffix in _COMPRESSED else path.suffix


def _decompressor(name: str) -> Any:
    return zstandard.ZstdDecompressor().decompressobj() if name.endswith(".zst") else zlib.decompressobj(wbits=31)


def read_chunks(stream: BinaryIO, name: str) -> Iterator[bytes]:
    """Bytes of an open file, decompressed as the name says; a file may hold several compressed frames."""
    compressed = name.lower().endswith(_COMPRESSED)
    frame = None  # the frame that is being read, if any
    try:
        while chunk := stream.read(_CHUNK_BYTES):
            while compressed and chunk:
                frame = frame or _decompressor(name.lower())
                yield frame.decompress(chunk)
                chunk = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
            if chunk:
                yield chunk
    except (zstandard.ZstdError, zlib.error) as error:
        raise ValueError(f"{name}: damaged, or not a {Path(name).suffix} file ({error})") from None
    if frame:
        raise ValueError(f"{name}: the file is cut off; fetch or make it again")


def read_lines(stream: BinaryIO, name: str) -> Iterator[bytes]:
    """Lines of an open file without their newline."""
    rest = b""
    for chunk in read_chunks(stream, name):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    if rest:
        yield rest


def read_text(stream: BinaryIO, name: str) -> str:
    """A whole file as text: UTF-8, a byte order mark dropped, every line ending as one newline."""
    data = b"".join(read_chunks(stream, name))
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not UTF-8 at byte {error.start}; convert the file to UTF-8") from None


def parse_row(line: bytes, where: str) -> dict[str, Any]:
    """The JSON object of one line."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 at byte {error.start} of the line; convert the file to UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: expected one JSON object a line, {error.msg} at column {error.colno}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected one JSON object a line, got {type(row).__name__}")
    return row


def stream_rows(stream: BinaryIO, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Pairs (place, row) of an open jsonl file; empty lines are passed over."""
    for number, line in enumerate(read_lines(stream, name), start=1):
        if line.strip():
            where = f"{name}, line {number}"
            yield where, parse_row(line, where)


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Pairs (place, row) of a jsonl file, which may be compressed."""
    if not path.is_file():
        raise ValueError(f"{path.as_posix()}: no such file; run the stage that writes it (dvc repro)")
    with path.open("rb") as stream:
        yield from stream_rows(stream, path.as_posix())


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A new file that appears under its name only when it is complete and on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


class RowWriter:
    """Writes rows as JSON lines into one zstd frame, whose bytes depend on the rows and the library's version alone."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._digest = stream, hashlib.sha256()
        self._frame = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True).compressobj()

    def write(self, row: dict[str, Any]) -> int:
        """Append a row; returns its length in bytes of JSON."""
        line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
        self._append(self._frame.compress(line))
        return len(line)

    def finish(self) -> str:
        """End the frame; returns the SHA-256 of the file."""
        self._append(self._frame.flush())
        return self._digest.hexdigest()

    def _append(self, data: bytes) -> None:
        self._digest.update(data)
        self._stream.write(data)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, atomically, keys in the order given."""
    with atomic_file(path) as stream:
        stream.write((json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())
