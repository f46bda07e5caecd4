"""Texts of a parquet file whose pages are too large for memory: unpacked into a temporary file, then read one at a time.

pyarrow decompresses a page as a whole, and writers put up to 1,024 rows into a page, however long they are. This module reads
such pages where a column holds byte arrays that are not nested, compressed with snappy, gzip, zstd or not at all, and encoded
as PLAIN or by a dictionary. Everything else is left to pyarrow.

    column chunk   [dictionary page] data page, data page, ...    each behind a header in Thrift's compact protocol
    PLAIN          4 bytes of length, then the bytes, value after value
    dictionary     a data page holds indices into the dictionary page's values, run-length encoded or bit-packed

Source: Apache Parquet format 2.11 (README, Encodings, parquet.thrift); google/snappy, format_description.txt.
"""

import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, BinaryIO

import numpy as np
import zstandard
from numpy.typing import NDArray

LARGE_PAGE_BYTES = 16 << 20  # decompressed; smaller pages are pyarrow's
_PIECE_BYTES = 1 << 20  # moved at a time
_HEADER_BYTES = 1 << 20  # more than any header: writers cut their statistics
_WINDOW_BYTES = 1 << 16  # how far snappy's copies reach back
DATA, DICTIONARY, DATA_V2 = 0, 2, 3  # kinds of pages
PLAIN, PLAIN_DICTIONARY, RLE_DICTIONARY = 0, 2, 8  # encodings
CODECS = ("UNCOMPRESSED", "SNAPPY", "GZIP", "ZSTD")


class UnsupportedError(Exception):
    """A form of parquet that is left to pyarrow."""


class PageError(Exception):
    """A page that is damaged, or does not fit onto the disk."""


@dataclass(frozen=True)
class Page:
    """One page: where its bytes lie in the file, and what its header says of them."""

    kind: int
    encoding: int
    count: int  # of values, nulls among them
    start: int
    compressed_bytes: int
    bytes: int  # decompressed
    level_bytes: int  # of a DATA_V2 page: its levels, in front and never compressed
    packed: bool  # whether what follows the levels is compressed


def long_texts(
    file: Any, stream: BinaryIO, group: int, columns: Sequence[str]
) -> list[Iterator[bytes | None]] | None:
    """The values of some columns of a row group, an iterator a column; None where pyarrow should read them.

    Args:
        file: pyarrow's ParquetFile of the stream.
        stream: the open file, uncompressed as a whole.
        group: number of the row group.
        columns: names of the columns.
    """
    metadata = file.metadata.row_group(group)
    places = {metadata.column(number).path_in_schema: number for number in range(metadata.num_columns)}
    try:
        chunks = [metadata.column(places[column]) for column in columns]
        optional = [_optional(file.schema.column(places[column])) for column in columns]
        pages = [_pages(stream, chunk) for chunk in chunks]
    except (KeyError, UnsupportedError):
        return None
    if not any(page.bytes > LARGE_PAGE_BYTES for found in pages for page in found):
        return None
    return [
        _values(stream, found, chunk.compression, nullable)
        for found, chunk, nullable in zip(pages, chunks, optional, strict=True)
    ]


def _optional(column: Any) -> bool:
    """Whether a column may hold nulls; UnsupportedError where it is nested or no byte array."""
    if column.physical_type != "BYTE_ARRAY" or column.max_repetition_level or column.max_definition_level > 1:
        raise UnsupportedError
    return bool(column.max_definition_level)


def _pages(stream: BinaryIO, chunk: Any) -> list[Page]:
    """The pages of a column chunk, by their headers alone."""
    if chunk.compression not in CODECS:
        raise UnsupportedError
    start = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
    found, left = [], chunk.num_values
    while left > 0:
        page = _page(stream, start)
        if page.encoding not in (PLAIN, PLAIN_DICTIONARY, RLE_DICTIONARY):
            raise UnsupportedError
        found.append(page)
        left -= 0 if page.kind == DICTIONARY else page.count
        start = page.start + page.compressed_bytes
    return found


def _page(stream: BinaryIO, start: int) -> Page:
    stream.seek(start)
    try:
        header, size = _struct(stream.read(_HEADER_BYTES), 0)
        kind = header[1]
        body = header[{DATA: 5, DICTIONARY: 7, DATA_V2: 8}[kind]]
        encoding = body[4] if kind == DATA_V2 else body[2]
        levels = body[5] + body[6] if kind == DATA_V2 else 0
        packed = body.get(7, True) if kind == DATA_V2 else True
        return Page(kind, encoding, body[1], start + size, header[3], header[2], levels, packed)
    except (KeyError, IndexError, TypeError):
        raise UnsupportedError from None


def _struct(data: bytes, place: int) -> tuple[dict[int, Any], int]:
    """A struct of Thrift's compact protocol: its fields by number, and the place behind it."""
    fields: dict[int, Any] = {}
    number = 0
    while byte := data[place]:
        place += 1
        if byte >> 4:
            number += byte >> 4
        else:
            number, place = _zigzag(data, place)
        fields[number], place = _field(data, place, byte & 15)
    return fields, place + 1


def _field(data: bytes, place: int, kind: int) -> tuple[Any, int]:
    if kind in (1, 2):  # true, false
        return kind == 1, place
    if kind in (4, 5, 6):
        return _zigzag(data, place)
    if kind == 7:
        return None, place + 8  # a double, of which no header here is made
    if kind == 8:
        size, place = _varint(data, place)
        return data[place : place + size], place + size
    if kind == 12:
        return _struct(data, place)
    raise UnsupportedError  # lists and maps, which page headers do not have


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value, shift, place = value | (byte & 127) << shift, shift + 7, place + 1
        if byte < 128:
            return value, place


def _zigzag(data: bytes, place: int) -> tuple[int, int]:
    value, place = _varint(data, place)
    return value >> 1 ^ -(value & 1), place


def _values(stream: BinaryIO, pages: Sequence[Page], codec: str, optional: bool) -> Iterator[bytes | None]:
    """The values of a column chunk in order; memory is one of them, and 8 bytes for each in the dictionary."""
    words: IO[bytes] | None = None
    starts: list[int] = []
    try:
        for page in pages:
            if page.kind == DICTIONARY:
                words = _unpacked(stream, page, codec)
                starts = _starts(words, page.count)
                continue
            with _unpacked(stream, page, codec) as body:
                present = _present(stream, body, page) if optional else np.ones(page.count, np.int64)
                if page.encoding == PLAIN:
                    yield from (_next(body) if there else None for there in present.tolist())
                    continue
                assert words is not None, "a dictionary page comes before the data pages"
                width = body.read(1)[0]
                places = iter(_hybrid(body.read(), width, int(present.sum())).tolist())
                for there in present.tolist():
                    if there:
                        words.seek(starts[next(places)])
                    yield _next(words) if there else None
    finally:
        if words is not None:
            words.close()


def _next(values: IO[bytes]) -> bytes:
    return values.read(int.from_bytes(values.read(4), "little"))


def _starts(values: IO[bytes], count: int) -> list[int]:
    """Where each value of a dictionary begins."""
    starts = [0]
    for _ in range(count):
        starts.append(values.seek(int.from_bytes(values.read(4), "little"), 1))
    return starts


def _present(stream: BinaryIO, body: IO[bytes], page: Page) -> NDArray[np.int64]:
    """Of each value whether it is there: 1, or 0 for a null."""
    if page.kind == DATA_V2:
        stream.seek(page.start)
        return _hybrid(stream.read(page.level_bytes), 1, page.count)
    return _hybrid(body.read(int.from_bytes(body.read(4), "little")), 1, page.count)


def _hybrid(data: bytes, width: int, count: int) -> NDArray[np.int64]:
    """Numbers of `width` bits from runs that are either one number repeated or groups of eight, bit-packed."""
    found: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    place = have = 0
    while have < count and width:
        header, place = _varint(data, place)
        if header & 1:
            size = (header >> 1) * width
            bits = np.unpackbits(np.frombuffer(data, np.uint8, size, place), bitorder="little").reshape(
                -1, width
            )
            found.append(bits.astype(np.int64) @ (1 << np.arange(width)))
        else:
            size = -(-width // 8)
            found.append(np.full(header >> 1, int.from_bytes(data[place : place + size], "little"), np.int64))
        place, have = place + size, have + found[-1].size
    return np.concatenate(found)[:count] if width else np.zeros(count, np.int64)


def _unpacked(stream: BinaryIO, page: Page, codec: str) -> IO[bytes]:
    """The page's bytes behind its levels, decompressed, as a temporary file at its beginning."""
    stream.seek(page.start + page.level_bytes)
    left = page.compressed_bytes - page.level_bytes

    def read(size: int) -> bytes:
        nonlocal left
        piece = stream.read(min(size, left))
        left -= len(piece)
        return piece

    out = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    try:
        if codec == "SNAPPY" and page.packed:
            _unsnap(read, out.write)
        else:
            whole: Any = {
                "GZIP": lambda: zlib.decompressobj(31),
                "ZSTD": lambda: zstandard.ZstdDecompressor().decompressobj(),
            }
            frame = whole[codec]() if codec in whole and page.packed else None
            while piece := read(_PIECE_BYTES):
                out.write(frame.decompress(piece) if frame else piece)
        out.seek(0)
    except OSError as error:
        out.close()
        raise PageError(f"a page of {page.bytes} bytes does not fit into {tempfile.gettempdir()} ({error.strerror}); make room "
                        "there or set TMPDIR to another folder") from None  # fmt: skip
    except BaseException:
        out.close()
        raise
    return out


def _unsnap(read: Callable[[int], bytes], write: Callable[[bytes], object]) -> None:
    """Decompresses a block of snappy, which says its length first; PageError where it is cut off or copies from nowhere."""
    source, place = read(_PIECE_BYTES), 0
    size, place = _varint(source, place)
    window, done = bytearray(), 0  # what copies may reach, and the bytes written before it
    while done + len(window) < size:
        if len(source) - place < 8:  # a tag and its length or offset take at most 5
            source, place = source[place:] + read(_PIECE_BYTES), 0
        tag = source[place]
        place += 1
        if tag & 3:
            extra = (1, 2, 4)[(tag & 3) - 1]
            offset = int.from_bytes(source[place : place + extra], "little") | (
                (tag >> 5) << 8 if extra == 1 else 0
            )
            length = (tag >> 2 & 7) + 4 if extra == 1 else (tag >> 2) + 1
            place += extra
            start = len(window) - offset
            if offset == 0 or start < 0:
                raise PageError("a damaged page")
            copied = window[start : start + length]
            window += copied if offset >= length else (copied * -(-length // offset))[:length]
        else:
            length = (tag >> 2) + 1
            if length > 60:
                extra = length - 60
                length, place = int.from_bytes(source[place : place + extra], "little") + 1, place + extra
            while length:
                piece = source[place : place + length]
                window += piece
                place, length = place + len(piece), length - len(piece)
                if length and not (source := read(_PIECE_BYTES)):
                    raise PageError("a page that is cut off")
                place = 0 if length else place
                done = _flush(window, write, done)
        done = _flush(window, write, done)
    write(bytes(window))


def _flush(window: bytearray, write: Callable[[bytes], object], done: int) -> int:
    """Writes all of a long window but what copies may reach; returns the bytes written so far."""
    if len(window) <= 4 * _WINDOW_BYTES:
        return done
    gone = len(window) - _WINDOW_BYTES
    write(bytes(window[:gone]))
    del window[:gone]
    return done + gone
