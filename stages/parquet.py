"""Rows of a parquet file: of the columns that are used, one row at a time.

A batch of many rows may take any amount of memory, since a file of 400 KB can hold 256 rows of 4 MB. One row a batch costs 8 us.
What remains is the file's own unit: a page of the column is decompressed as a whole.
"""

from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import Any, BinaryIO

from stages.text_files import read_chunks

_BUFFER_BYTES = 1 << 20  # read of a column at a time


def stream_parquet(stream: BinaryIO, name: str, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Pairs (place, row) of an open parquet file, each row cut to those of `columns` that the file has.

    Raises:
        ValueError: the file is damaged, has two columns of one name or none of `columns`, or a value cannot be had.
    """
    import pyarrow
    import pyarrow.parquet

    if not name.lower().endswith(".parquet"):
        stream = BytesIO(b"".join(read_chunks(stream, name)))  # a parquet file is read from its end
    number = 0
    try:
        file = pyarrow.parquet.ParquetFile(stream, pre_buffer=False, buffer_size=_BUFFER_BYTES)
        used = _used_columns(file.schema_arrow.names, name, columns)
        for batch in file.iter_batches(batch_size=1, columns=used, use_threads=False):
            for row in range(batch.num_rows):  # none in an empty row group
                number += 1
                where = f"{name}, row {number}"
                found = {column: _value(batch.column(column)[row], column, where) for column in used}
                yield where, found
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{name}: damaged, or not a parquet file, after row {number} ({reason})") from None


def _used_columns(names: Sequence[str], name: str, columns: Sequence[str]) -> list[str]:
    twice = sorted({column for column in names if names.count(column) > 1})
    if twice:
        raise ValueError(f"{name}: two columns are named {twice[0]!r}; rename one of them")
    used = [column for column in columns if column in names]
    if not used:
        raise ValueError(f"{name}: expected the column {' or '.join(columns)}, got {', '.join(sorted(names)) or 'none'}")
    return used


def _value(cell: Any, column: str, where: str) -> Any:
    """A cell as a Python value; ValueError where Python has none for it, as for a date before the year 1.

    Bytes are decoded, since some writers do not mark a text as one.
    """
    try:
        value = cell.as_py()
        return value.decode("utf-8") if isinstance(value, bytes) else value
    except (ValueError, OverflowError, LookupError) as error:  # UnicodeDecodeError is a ValueError
        raise ValueError(f"{where}: the column {column} holds no text: {' '.join(str(error).split())}") from None
