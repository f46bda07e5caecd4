"""Text files: plain, .gz or .zst; whole, by line, or by JSON row; and how every file of this project is written.

Every reader streams, and every complaint names the file, and the line where there is one. A file appears under its name only
when it is whole.
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
_LOOK_BYTES = 4096  # of a file, by which its encoding is told
_NO_ROOM = {
    errno.ENOSPC,
    errno.EFBIG,
    errno.EROFS,
    getattr(errno, "EDQUOT", errno.ENOSPC),
}  # what no read fails with


def suffix_of(name: str) -> str:
    """The suffix that says what a file holds: `.jsonl` of `a.jsonl.zst`."""
    path = Path(name.lower())
    return path.with_suffix("").suffix if path.suffix in _COMPRESSED else path.suffix


def _decompressor(name: str) -> Any:
    if name.endswith(".zst"):
        return zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).decompressobj()
    return zlib.decompressobj(wbits=31)


def read_chunks(stream: BinaryIO, name: str) -> Iterator[bytes]:
    """Bytes of an open file, decompressed as the name says; a file may hold several compressed frames."""
    compressed = name.lower().endswith(_COMPRESSED)
    frame = None  # the frame that is being read, if any
    whole = False  # whether one frame has ended
    try:
        while chunk := stream.read(_CHUNK_BYTES):
            while compressed and chunk:
                if whole and not frame and not chunk.strip(b"\0"):
                    break  # zeros behind the end, as tape and tar tools leave them
                frame = frame or _decompressor(name.lower())
                yield frame.decompress(chunk)
                chunk, whole = (frame.unused_data, True) if frame.eof else (b"", whole)
                frame = None if frame.eof else frame
            if chunk and not compressed:
                yield chunk
    except (zstandard.ZstdError, zlib.error) as error:
        raise ValueError(f"{name}: damaged, or not a {Path(name).suffix} file ({error})") from None
    if frame:
        raise ValueError(f"{name}: the file is cut off; fetch or make it again")


def read_lines(stream: BinaryIO, name: str) -> Iterator[bytes]:
    """Lines of an open file without their ends, which are LF, CR LF or CR; a byte order mark is dropped.

    Raises:
        ValueError: the file is damaged or UTF-16.
    """
    parts: list[bytes] = []  # of the line that is not complete yet
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
    """The same bytes with every line's end as LF; a CR at a chunk's end waits for what follows."""
    held = b""
    for chunk in chunks:
        data = held + chunk
        held = b"\r" if data.endswith(b"\r") else b""
        data = data[: len(data) - len(held)]
        yield data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in data else data
    if held:
        yield b"\n"


def check_encoding(data: bytes, name: str) -> None:
    """Raises ValueError where the first bytes of a text are those of UTF-16 or UTF-32, with or without a byte order mark."""
    look = data[:_LOOK_BYTES]
    if look.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or 4 * look.count(0) > len(look):
        raise ValueError(f"{name}: UTF-16 or UTF-32, or no text; convert the file to UTF-8")


def read_text(stream: BinaryIO, name: str) -> str:
    """A whole file as text: UTF-8, a byte order mark dropped, every line ending as one newline."""
    data = b"".join(read_chunks(stream, name))
    check_encoding(data, name)
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not UTF-8 at byte {error.start}; convert the file to UTF-8") from None


def parse_json(data: bytes, where: str, expected: str) -> Any:
    """The value of one JSON text; ValueError in one line, whatever is wrong with it."""
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
    except ValueError:  # of int(), which refuses more digits
        raise ValueError(
            f"{where}: a number of over {sys.get_int_max_str_digits()} digits; write it as a text"
        ) from None


def parse_row(line: bytes, where: str) -> dict[str, Any]:
    """The JSON object of one line."""
    return _object(parse_json(line, where, "one JSON object a line"), where, "one JSON object a line")


def _object(value: Any, where: str, expected: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected {expected}, got {type(value).__name__}")
    return value


def stream_rows(stream: BinaryIO, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Pairs (place, row) of an open jsonl file; empty lines are passed over. A file that is a JSON array is read as that."""
    lines, begun = enumerate(read_lines(stream, name), start=1), False
    for number, line in lines:
        if not begun and line.lstrip().startswith(b"["):
            yield from _items(b"\n".join([line, *(rest for _, rest in lines)]), name)
        elif line.strip():
            where, begun = f"{name}, line {number}", True
            yield where, parse_row(line, where)


def read_json(stream: BinaryIO, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Pairs (place, row) of an open .json file: an array of objects, one object, or objects line by line as in .jsonl.

    An array or an object over several lines is read whole, so memory is several times the file.
    """
    lines = list(read_lines(stream, name))
    whole = b"\n".join(lines)
    first = next((line for line in lines if line.strip()), b"")
    if whole.lstrip().startswith(b"[") or not _is_object(first):
        yield from _items(whole, name)
    else:
        places = ((f"{name}, line {number}", line) for number, line in enumerate(lines, start=1))
        yield from ((where, parse_row(line, where)) for where, line in places if line.strip())


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _items(data: bytes, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Pairs (place, row) of a JSON array of objects, or of one object."""
    expected = "a JSON array of objects"
    value = parse_json(data, name, expected)
    items = value if isinstance(value, list) else [value]
    yield from (
        (f"{name}, item {n}", _object(item, f"{name}, item {n}", expected)) for n, item in enumerate(items, 1)
    )


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Pairs (place, row) of a jsonl file, which may be compressed."""
    if not path.is_file():
        raise ValueError(f"{path.as_posix()}: no such file; run the stage that writes it (make repro)")
    with path.open("rb") as stream:
        yield from stream_rows(stream, path.as_posix())


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def unwritable(path: Path, reason: object) -> ValueError:
    """The complaint about a file or folder that cannot be written."""
    kept = ", or set NANOEULER_CACHE to another folder" if path.is_relative_to(user_cache()) else ""
    return ValueError(
        f"{path.as_posix()}: cannot be written: {reason}; make room there or give this user the right{kept}"
    )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what goes wrong with the disk in the block into a ValueError about `path`, for blocks that do nothing else."""
    try:
        yield
    except OSError as error:
        raise unwritable(path, error.strerror or error) from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the folder of `path`; what the block wrote there takes the place of `path` as a whole.

    Two processes must not replace the same file at once: the temporary path is always the same, so that none is left over
    where a run that was killed is repeated.

    Raises:
        ValueError: the file cannot be written (full disk, read-only folder); `path` is as it was.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.touch()
            mode = partial.stat().st_mode
        yield partial
        with writing(path):
            partial.chmod(mode)  # safetensors makes files that only their owner can read
            with partial.open("rb+") as stream:
                os.fsync(stream.fileno())  # else a power cut may leave an empty file under the final name
            os.replace(partial, path)
    except OSError as error:  # the block's; it may read as well as write
        if error.errno in _NO_ROOM:
            raise unwritable(path, error.strerror) from None
        raise
    finally:
        with suppress(OSError):  # where the folder cannot be made there is nothing to remove
            partial.unlink()


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A new file, open for writing, that appears under its name only when it is complete and on the disk."""
    with replacing(path) as partial, partial.open("wb") as stream:
        yield stream


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file whole or not at all; ValueError where that fails."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")


class RowWriter:
    """Writes rows as JSON lines into one zstd frame, whose bytes depend on the rows and the library's version alone."""

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
    """Write a JSON file, atomically, keys in the order given."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")
