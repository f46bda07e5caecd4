"""Rows of a parquet file, only the columns that are used, one row at a time.

A batch of many rows can take any amount of memory: a file of 400 KB can hold 256 rows of 4 MB. A batch of one
row costs 8 us. pyarrow decompresses each page of a column as a whole. `parquet_pages` reads pages that are
too large for that.
"""

import zlib
from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import Any, BinaryIO

import zstandard

from stages.sources.parquet_pages import PageError, long_texts
from stages.text_files import read_chunks

_BUFFER_BYTES = 1 << 20  # read from a column at a time


def stream_parquet(
    stream: BinaryIO, name: str, columns: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of an open parquet file, each with its place ("FILE, row 3"). A row has those `columns` that the
    file has.

    Raises:
        ValueError: the file is damaged, has two columns of one name or none of `columns`, or a value cannot
            be converted.
    """
    import pyarrow
    import pyarrow.parquet

    if not name.lower().endswith(".parquet"):
        stream = BytesIO(b"".join(read_chunks(stream, name)))  # seekable: reading starts at the file's end
    number = 0
    try:
        file = pyarrow.parquet.ParquetFile(stream, pre_buffer=False, buffer_size=_BUFFER_BYTES)
        used = _used_columns(file.schema_arrow.names, name, columns)
        for group in range(file.num_row_groups):
            for row in _rows(file, stream, group, used):
                number += 1
                where = f"{name}, row {number}"
                found = {column: _value(row.pop(column), column, where) for column in used}
                yield where, found
                del found  # frees the row before the next one is read
    except PageError as error:
        raise ValueError(f"{name}: after row {number}: {error}") from None
    except (
        pyarrow.ArrowException,
        OSError,
        IndexError,
        RuntimeError,
        zlib.error,
        zstandard.ZstdError,
    ) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{name}: damaged, or not a parquet file, after row {number} ({reason}); "
                         "fetch or write it again") from None  # fmt: skip


def _rows(file: Any, stream: BinaryIO, group: int, used: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a row group; values are pyarrow scalars or bytes."""
    texts = long_texts(file, stream, group, used)
    if texts is not None:
        for _ in range(file.metadata.row_group(group).num_rows):
            yield {column: next(values) for column, values in zip(used, texts, strict=True)}
        return
    for batch in file.iter_batches(batch_size=1, row_groups=[group], columns=used, use_threads=False):
        for row in range(batch.num_rows):  # an empty row group has a batch without rows
            yield {column: batch.column(column)[row] for column in used}


def _used_columns(names: Sequence[str], name: str, columns: Sequence[str]) -> list[str]:
    twice = sorted({column for column in names if names.count(column) > 1})
    if twice:
        raise ValueError(f"{name}: two columns are named {twice[0]!r}; rename one of them")
    used = [column for column in columns if column in names]
    if not used:
        raise ValueError(
            f"{name}: expected the column {' or '.join(columns)}, got {', '.join(sorted(names)) or 'none'}"
        )
    return used


def _value(cell: Any, column: str, where: str) -> Any:
    """A cell as a Python value; ValueError if Python has no such value, such as a date before the year 1.

    Bytes are decoded as UTF-8, since some writers do not mark texts as such.
    """
    try:
        value = cell.as_py() if hasattr(cell, "as_py") else cell
        return value.decode("utf-8") if isinstance(value, bytes) else value
    except (ValueError, OverflowError, LookupError) as error:  # UnicodeDecodeError is a ValueError
        raise ValueError(
            f"{where}: the column {column} holds no text: {' '.join(str(error).split())}; correct the row"
        ) from None
