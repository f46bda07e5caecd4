"""Page headers of a parquet file: Thrift's compact protocol, as far as headers of pages use it.

Source: Apache Parquet format 2.11 (README, parquet.thrift); Apache Thrift, thrift-compact-protocol.md.
"""

from dataclasses import dataclass
from typing import Any, BinaryIO

_HEADER_BYTES = 1 << 20  # larger than any header: writers truncate their statistics
DATA, DICTIONARY, DATA_V2 = 0, 2, 3  # page types
PLAIN, PLAIN_DICTIONARY, RLE_DICTIONARY = 0, 2, 8  # encodings
CODECS = ("UNCOMPRESSED", "SNAPPY", "GZIP", "ZSTD")


class UnsupportedError(Exception):
    """A form of parquet that is left to pyarrow."""


@dataclass(frozen=True)
class Page:
    """One page of a column chunk.

    Args:
        kind: DATA, DICTIONARY or DATA_V2.
        encoding: of the values.
        count: number of values, nulls included.
        start: offset in the file of the first byte after the header.
        compressed_bytes: size in the file, without the header.
        bytes: decompressed size.
        level_bytes: of a DATA_V2 page: size of its levels, which come first and are never compressed.
        compressed: whether the bytes after the levels are compressed.
    """

    kind: int
    encoding: int
    count: int
    start: int
    compressed_bytes: int
    bytes: int
    level_bytes: int
    compressed: bool


def read_headers(stream: BinaryIO, chunk: Any) -> list[Page]:
    """The pages of a column chunk, from their headers. chunk: pyarrow's metadata of it.

    Raises:
        UnsupportedError: pyarrow has to read it.
    """
    if chunk.compression not in CODECS:
        raise UnsupportedError
    start = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
    pages, remaining = [], chunk.num_values
    while remaining > 0:
        page = _read_header(stream, start)
        if page.encoding not in (PLAIN, PLAIN_DICTIONARY, RLE_DICTIONARY):
            raise UnsupportedError
        pages.append(page)
        remaining -= 0 if page.kind == DICTIONARY else page.count
        start = page.start + page.compressed_bytes
    return pages


def _read_header(stream: BinaryIO, start: int) -> Page:
    """The page whose header starts at the offset `start`."""
    stream.seek(start)
    try:
        header, size = _struct(stream.read(_HEADER_BYTES), 0)
        kind = header[1]
        body = header[{DATA: 5, DICTIONARY: 7, DATA_V2: 8}[kind]]
        encoding = body[4] if kind == DATA_V2 else body[2]
        levels = body[5] + body[6] if kind == DATA_V2 else 0
        compressed = body.get(7, True) if kind == DATA_V2 else True
        return Page(kind, encoding, body[1], start + size, header[3], header[2], levels, compressed)
    except (KeyError, IndexError, TypeError):
        raise UnsupportedError from None


def _struct(data: bytes, pos: int) -> tuple[dict[int, Any], int]:
    """A struct of Thrift's compact protocol at data[pos:]: its fields by number, and the position after
    it.
    """
    fields: dict[int, Any] = {}
    number = 0
    while byte := data[pos]:
        pos += 1
        if byte >> 4:
            number += byte >> 4
        else:
            number, pos = _zigzag(data, pos)
        fields[number], pos = _field(data, pos, byte & 15)
    return fields, pos + 1


def _field(data: bytes, pos: int, kind: int) -> tuple[Any, int]:
    """The value of a field of Thrift's type `kind`, and the position after it."""
    if kind in (1, 2):  # true, false
        return kind == 1, pos
    if kind in (4, 5, 6):
        return _zigzag(data, pos)
    if kind == 7:
        return None, pos + 8  # a double, which no page header uses
    if kind == 8:
        size, pos = read_varint(data, pos)
        return data[pos : pos + size], pos + size
    if kind == 12:
        return _struct(data, pos)
    raise UnsupportedError  # lists and maps, which no page header uses


def read_varint(data: bytes, pos: int) -> tuple[int, int]:
    """A variable-length integer (7 bits per byte, lowest first) at data[pos:], and the position after it."""
    value = shift = 0
    while True:
        byte = data[pos]
        value, shift, pos = value | (byte & 127) << shift, shift + 7, pos + 1
        if byte < 128:
            return value, pos


def _zigzag(data: bytes, pos: int) -> tuple[int, int]:
    """A signed varint: 0, -1, 1, -2, ... are written as 0, 1, 2, 3, ..."""
    value, pos = read_varint(data, pos)
    return value >> 1 ^ -(value & 1), pos
