"""Reading text files (plain, .gz or .zst) and our own .jsonl.zst; atomic writing of every file of this
project.

Readers stream, except read_text. Every error names the file, and the line if there is one. A file appears
under its name only when it is complete.
"""

import codecs
import errno
import hashlib
import json
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from kernels.user_cache import user_cache

_CHUNK_BYTES = 1 << 20
_ZSTD_LEVEL = 6  # not tuned; fixed, since the level is part of the output's bytes
_COMPRESSED = (".zst", ".gz")
_WINDOW_BYTES = 1 << 31  # the largest window of a zstd frame: `zstd --long=31`
_PROBE_BYTES = 4096  # at the start of a file, to detect its encoding
# Errors that only writing can cause.
_WRITE_ERRORS = {errno.ENOSPC, errno.EFBIG, errno.EROFS, getattr(errno, "EDQUOT", errno.ENOSPC)}


def suffix_of(name: str) -> str:
    """The suffix of the content, without that of the compression: `.jsonl` for `a.jsonl.zst`."""
    path = Path(name.lower())
    return path.with_suffix("").suffix if path.suffix in _COMPRESSED else path.suffix


def _decompressor(name: str) -> Any:
    if name.endswith(".zst"):
        return zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).decompressobj()
    return zlib.decompressobj(wbits=31)


def read_chunks(stream: BinaryIO, name: str) -> Iterator[bytes]:
    """Bytes of an open file, decompressed if its name ends in .gz or .zst. A file may hold several frames.

    Raises:
        ValueError: the file is damaged or cut off.
    """
    compressed = name.lower().endswith(_COMPRESSED)
    frame = None  # the decompressor of the current frame
    has_frame = False  # whether a frame has ended
    try:
        while chunk := stream.read(_CHUNK_BYTES):
            while compressed and chunk:
                if has_frame and not frame and not chunk.strip(b"\0"):
                    break  # zero padding after the last frame, as tape and tar tools write it
                frame = frame or _decompressor(name.lower())
                yield frame.decompress(chunk)
                chunk, has_frame = (frame.unused_data, True) if frame.eof else (b"", has_frame)
                frame = None if frame.eof else frame
            if chunk and not compressed:
                yield chunk
    except (zstandard.ZstdError, zlib.error) as error:
        raise ValueError(f"{name}: damaged, or not a {Path(name).suffix} file ({error})") from None
    if frame:
        raise ValueError(f"{name}: the file is cut off; fetch or write it again")


def read_lines(stream: BinaryIO, name: str) -> Iterator[bytes]:
    """Lines of an open file, without their ends (LF, CR LF or CR). A byte order mark is dropped.

    Raises:
        ValueError: the file is damaged or UTF-16.
    """
    parts: list[bytes] = []  # of the incomplete line; joined once, so that a long line takes linear time
    first = True
    for chunk in _with_newlines(read_chunks(stream, name)):
        if first and chunk:
            check_encoding(chunk, name)
            chunk, first = chunk.removeprefix(codecs.BOM_UTF8), False
        *lines, rest = chunk.split(b"\n")
        if lines:
            yield b"".join([*parts, lines[0]])
            yield from lines[1:]
            parts = []
        parts.append(rest)
    if last := b"".join(parts):
        yield last


def _with_newlines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes with every line end as LF. A CR at the end of a chunk is held back: an LF may follow
    it.
    """
    held = b""
    for chunk in chunks:
        data = held + chunk
        held = b"\r" if data.endswith(b"\r") else b""
        data = data[: len(data) - len(held)]
        yield data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in data else data
    if held:
        yield b"\n"


def check_encoding(data: bytes, name: str) -> None:
    """Raises ValueError if a text begins like UTF-16 or UTF-32, with or without a byte order mark."""
    start = data[:_PROBE_BYTES]
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or 4 * start.count(0) > len(start):
        raise ValueError(f"{name}: UTF-16 or UTF-32, or no text; convert the file to UTF-8")


def read_text(stream: BinaryIO, name: str) -> str:
    """A whole UTF-8 file as text. A byte order mark is dropped, and every line end becomes LF."""
    data = b"".join(read_chunks(stream, name))
    check_encoding(data, name)
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not UTF-8 at byte {error.start}; convert the file to UTF-8") from None


def parse_json(data: bytes, where: str, expected: str) -> Any:
    """The value of one JSON text.

    Args:
        data: the text in UTF-8.
        where, expected: begin the error message, such as "FILE, line 3" and "one JSON object a line".

    Raises:
        ValueError: whatever is wrong with the text, in one line.
    """
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: not UTF-8 at byte {error.start} of the line; convert the file to UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: expected {expected}, {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError(
            f"{where}: expected {expected}, got one nested too deeply; leave that part out"
        ) from None
    except ValueError:  # int() refuses more digits
        raise ValueError(
            f"{where}: a number of over {sys.get_int_max_str_digits()} digits; write it as a text"
        ) from None


def parse_object(line: bytes, where: str) -> dict[str, Any]:
    """The JSON object of one line; ValueError if the line holds anything else."""
    expected = "one JSON object a line"
    value = parse_json(line, where, expected)
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected {expected}, got {type(value).__name__}")
    return value


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file that RowWriter wrote, each with its place ("FILE, line 3") for error messages."""
    if not path.is_file():
        raise ValueError(f"{path.as_posix()}: no such file; run the stage that writes it (make repro)")
    with path.open("rb") as stream:
        for number, line in enumerate(read_lines(stream, path.as_posix()), start=1):
            where = f"{path.as_posix()}, line {number}"
            yield where, parse_object(line, where)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def unwritable(path: Path, reason: object) -> ValueError:
    """The error for a file or folder that cannot be written."""
    cache_hint = ", or set NANOEULER_CACHE to another folder" if path.is_relative_to(user_cache()) else ""
    return ValueError(
        f"{path.as_posix()}: cannot be written: {reason}; make room there or give this user the "
        f"right{cache_hint}"
    )


@contextmanager
def wrap_write_errors(path: Path) -> Iterator[None]:
    """Turns an OSError of the block into a ValueError about `path`. The block must only write."""
    try:
        yield
    except OSError as error:
        raise unwritable(path, error.strerror or error) from None


@contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the folder of `path`. After the block the file written there replaces
    `path`.

    The temporary path is always the same, so a repeated run overwrites what a killed run left. Two processes
    must therefore not replace the same file at once.

    Raises:
        ValueError: the file cannot be written (full disk, read-only folder); `path` is unchanged.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with wrap_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.touch()
            mode = partial.stat().st_mode
        yield partial
        with wrap_write_errors(path):
            partial.chmod(mode)  # safetensors creates files that only their owner can read
            with partial.open("rb+") as stream:
                os.fsync(stream.fileno())  # else a power cut can leave an empty file under the final name
            os.replace(partial, path)
    except OSError as error:  # raised by the block, which may read as well as write
        if error.errno in _WRITE_ERRORS:
            raise unwritable(path, error.strerror) from None
        raise
    finally:
        with suppress(OSError):  # no folder, nothing to remove
            partial.unlink()


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A new file, open for writing. It appears under its name only when it is complete and on the disk."""
    with atomic_replace(path) as partial, partial.open("wb") as stream:
        yield stream


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file atomically; ValueError if that fails."""
    with atomic_replace(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")


class RowWriter:
    """Writes rows as JSON lines into one zstd frame. The bytes depend only on the rows and on the library's
    version.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._digest, self._text_digest = stream, hashlib.sha256(), hashlib.sha256()
        self._frame = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True).compressobj()

    def write(self, row: dict[str, Any]) -> int:
        """Append a row; returns its length in bytes of JSON."""
        line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
        self._text_digest.update(line)
        self._append(self._frame.compress(line))
        return len(line)

    def finish(self) -> str:
        """End the frame; returns the SHA-256 of the file."""
        self._append(self._frame.flush())
        return self._digest.hexdigest()

    @property
    def text_sha256(self) -> str:
        """The SHA-256 of the lines before compression."""
        return self._text_digest.hexdigest()

    def _append(self, data: bytes) -> None:
        self._digest.update(data)
        self._stream.write(data)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically, with keys in the order given."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")
