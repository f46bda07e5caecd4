"""Texts of a parquet file whose pages are too large for memory: decompressed to a temporary file, read one at
a time.

pyarrow decompresses a page as a whole, and writers put up to 1,024 rows of any length into a page. This
module reads such pages of columns of byte arrays that are not nested. Compression: snappy, gzip, zstd or
none. Encoding: PLAIN or dictionary. pyarrow reads everything else.

    column chunk   [dictionary page] data page, data page, ...    each after its header (`parquet_headers`)
    PLAIN          for each value, 4 bytes of length, then the bytes
    dictionary     a data page holds indices into the dictionary page's values, run-length encoded or
    bit-packed

Source: Apache Parquet format 2.11 (README, Encodings); google/snappy, format_description.txt.
"""

import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, BinaryIO

import numpy as np
import zstandard
from numpy.typing import NDArray

from stages.sources.parquet_headers import (
    DATA_V2,
    DICTIONARY,
    PLAIN,
    Page,
    UnsupportedError,
    read_headers,
    read_varint,
)

LARGE_PAGE_BYTES = 16 << 20  # decompressed; pyarrow reads smaller pages
_PIECE_BYTES = 1 << 20  # read and decompressed at a time
_WINDOW_BYTES = 1 << 16  # largest offset of a copy in snappy


class PageError(Exception):
    """A page that is damaged, or does not fit on the disk."""


def long_texts(
    file: Any, stream: BinaryIO, group: int, columns: Sequence[str]
) -> list[Iterator[bytes | None]] | None:
    """The values of some columns of a row group, one iterator per column. None: pyarrow should read them.

    Args:
        file: pyarrow's ParquetFile of the stream.
        stream: the open file; its pages may be compressed, the file as a whole not.
        group: number of the row group.
        columns: names of the columns.
    """
    metadata = file.metadata.row_group(group)
    numbers = {metadata.column(number).path_in_schema: number for number in range(metadata.num_columns)}
    try:
        chunks = [metadata.column(numbers[column]) for column in columns]
        nullable = [_is_nullable(file.schema.column(numbers[column])) for column in columns]
        pages = [read_headers(stream, chunk) for chunk in chunks]
    except (KeyError, UnsupportedError):
        return None
    if not any(page.bytes > LARGE_PAGE_BYTES for of_chunk in pages for page in of_chunk):
        return None
    return [
        _values(stream, of_chunk, chunk.compression, nulls)
        for of_chunk, chunk, nulls in zip(pages, chunks, nullable, strict=True)
    ]


def _is_nullable(column: Any) -> bool:
    """Whether a column may hold nulls; UnsupportedError if it is nested or no byte array."""
    if column.physical_type != "BYTE_ARRAY" or column.max_repetition_level or column.max_definition_level > 1:
        raise UnsupportedError
    return bool(column.max_definition_level)


def _values(stream: BinaryIO, pages: Sequence[Page], codec: str, nullable: bool) -> Iterator[bytes | None]:
    """The values of a column chunk in order. Memory: one value, and 8 bytes per value of the dictionary."""
    dictionary: IO[bytes] | None = None
    starts: list[int] = []
    try:
        for page in pages:
            if page.kind == DICTIONARY:
                dictionary = _decompress(stream, page, codec)
                starts = _value_starts(dictionary, page.count)
                continue
            with _decompress(stream, page, codec) as body:
                present = _present(stream, body, page) if nullable else np.ones(page.count, np.int64)
                if page.encoding == PLAIN:
                    yield from (_next_value(body) if is_present else None for is_present in present.tolist())
                    continue
                assert dictionary is not None, "a dictionary page comes before the data pages"
                width = body.read(1)[0]
                indices = iter(_decode_runs(body.read(), width, int(present.sum())).tolist())
                for is_present in present.tolist():
                    if is_present:
                        dictionary.seek(starts[next(indices)])
                    yield _next_value(dictionary) if is_present else None
    finally:
        if dictionary is not None:
            dictionary.close()


def _next_value(values: IO[bytes]) -> bytes:
    """The PLAIN value at the current position."""
    return values.read(int.from_bytes(values.read(4), "little"))


def _value_starts(values: IO[bytes], count: int) -> list[int]:
    """The offset of each value of a dictionary, and of its end."""
    starts = [0]
    for _ in range(count):
        starts.append(values.seek(int.from_bytes(values.read(4), "little"), 1))
    return starts


def _present(stream: BinaryIO, body: IO[bytes], page: Page) -> NDArray[np.int64]:
    """The definition levels of a page: 1 for a value, 0 for a null."""
    if page.kind == DATA_V2:
        stream.seek(page.start)
        return _decode_runs(stream.read(page.level_bytes), 1, page.count)
    return _decode_runs(body.read(int.from_bytes(body.read(4), "little")), 1, page.count)


def _decode_runs(data: bytes, width: int, count: int) -> NDArray[np.int64]:
    """Decode `count` integers of `width` bits. A run is one integer repeated, or groups of eight integers,
    bit-packed.
    """
    runs: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    pos = decoded = 0
    while decoded < count and width:
        header, pos = read_varint(data, pos)
        if header & 1:
            size = (header >> 1) * width
            bits = np.unpackbits(np.frombuffer(data, np.uint8, size, pos), bitorder="little")
            runs.append(bits.reshape(-1, width).astype(np.int64) @ (1 << np.arange(width)))
        else:
            size = -(-width // 8)
            runs.append(np.full(header >> 1, int.from_bytes(data[pos : pos + size], "little"), np.int64))
        pos, decoded = pos + size, decoded + runs[-1].size
    return np.concatenate(runs)[:count] if width else np.zeros(count, np.int64)


def _decompress(stream: BinaryIO, page: Page, codec: str) -> IO[bytes]:
    """The bytes of a page after its levels, decompressed to a temporary file that stands at its start."""
    stream.seek(page.start + page.level_bytes)
    remaining = page.compressed_bytes - page.level_bytes

    def read(size: int) -> bytes:
        nonlocal remaining
        piece = stream.read(min(size, remaining))
        remaining -= len(piece)
        return piece

    out = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    try:
        if codec == "SNAPPY" and page.compressed:
            _decompress_snappy(read, out.write)
        else:
            decompressors: Any = {
                "GZIP": lambda: zlib.decompressobj(31),
                "ZSTD": lambda: zstandard.ZstdDecompressor().decompressobj(),
            }
            frame = decompressors[codec]() if codec in decompressors and page.compressed else None
            while piece := read(_PIECE_BYTES):
                out.write(frame.decompress(piece) if frame else piece)
        out.seek(0)
    except OSError as error:
        out.close()
        raise PageError(f"a page of {page.bytes} bytes does not fit into {tempfile.gettempdir()} "
                        f"({error.strerror}); make room "
                        "there or set TMPDIR to another folder") from None  # fmt: skip
    except BaseException:
        out.close()
        raise
    return out


def _decompress_snappy(read: Callable[[int], bytes], write: Callable[[bytes], object]) -> None:
    """Decompress one snappy block: its length, then literals and copies. PageError if it is damaged or cut
    off.
    """
    source, pos = read(_PIECE_BYTES), 0
    size, pos = read_varint(source, pos)
    window = bytearray()  # the last bytes, which copies can reach
    written = 0  # number of bytes written before them
    while written + len(window) < size:
        if len(source) - pos < 8:  # a tag with its length or offset takes at most 5 bytes
            source, pos = source[pos:] + read(_PIECE_BYTES), 0
        tag = source[pos]
        pos += 1
        if tag & 3:  # a copy
            extra = (1, 2, 4)[(tag & 3) - 1]
            high_bits = (tag >> 5) << 8 if extra == 1 else 0
            offset = int.from_bytes(source[pos : pos + extra], "little") | high_bits
            length = (tag >> 2 & 7) + 4 if extra == 1 else (tag >> 2) + 1
            pos += extra
            start = len(window) - offset
            if offset == 0 or start < 0:
                raise PageError("a damaged page; fetch or write the file again")
            copied = window[start : start + length]
            window += copied if offset >= length else (copied * -(-length // offset))[:length]
        else:  # a literal
            length = (tag >> 2) + 1
            if length > 60:
                extra = length - 60
                length, pos = int.from_bytes(source[pos : pos + extra], "little") + 1, pos + extra
            while length:
                piece = source[pos : pos + length]
                window += piece
                pos, length = pos + len(piece), length - len(piece)
                if length and not (source := read(_PIECE_BYTES)):
                    raise PageError("a page that is cut off; fetch or write the file again")
                pos = 0 if length else pos
                written = _flush(window, write, written)
        written = _flush(window, write, written)
    write(bytes(window))


def _flush(window: bytearray, write: Callable[[bytes], object], written: int) -> int:
    """Write the part of a long window that no copy can reach; returns the number of bytes written so far."""
    if len(window) <= 4 * _WINDOW_BYTES:
        return written
    excess = len(window) - _WINDOW_BYTES
    write(bytes(window[:excess]))
    del window[:excess]
    return written + excess
