"""Records of one open file: a whole text (.txt, .md, .yml), or rows of JSON (.json, .jsonl) or parquet.

JSON comes in three layouts: one object a line, an array of objects, or one object over several lines. A row
that cannot be read becomes a record too. Its value is the ValueError that says why, and the caller raises or
counts it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from stages.sources.parquet import stream_parquet
from stages.text_files import parse_json, parse_object, read_lines, read_text, suffix_of

TEXTS = (".txt", ".md", ".yml")
ROWS = (".json", ".jsonl", ".parquet")
_ARRAY = "a JSON array of objects"


@dataclass(frozen=True)
class InputRecord:
    """One text or row of a source.

    Args:
        name: of the file or dataset; written into the output.
        where: begins error messages, such as "FILE, line 3".
        value: the text, the row, or the ValueError of a row that cannot be read.
    """

    name: str
    where: str
    value: str | dict[str, Any] | ValueError


def read_records(stream: BinaryIO, name: str, columns: Sequence[str]) -> Iterator[InputRecord]:
    """Records of an open file. The suffix of its name selects the reader.

    Args:
        stream: the open file, compressed if `name` says so.
        name: of the file.
        columns: keys of a row that are used. Only these columns of a parquet file are read.

    Raises:
        ValueError: the suffix is unknown, or the file as a whole cannot be read.
    """
    suffix = suffix_of(name)
    if suffix in TEXTS:
        yield InputRecord(name, name, read_text(stream, name))
    elif suffix == ".jsonl":
        yield from _lines(read_lines(stream, name), name)
    elif suffix == ".json":
        yield from _json(b"\n".join(read_lines(stream, name)), name)
    elif suffix == ".parquet":
        yield from (InputRecord(name, where, row) for where, row in stream_parquet(stream, name, columns))
    else:
        raise ValueError(f"{name}: expected a name that ends in {', '.join(TEXTS + ROWS)}, optionally "
                         "followed by .zst or .gz; "
                         "convert the file, or leave it out of files")  # fmt: skip


def _json(data: bytes, name: str) -> Iterator[InputRecord]:
    """Records of a .json file in any layout. The whole file is in memory, several times its size."""
    try:
        value = parse_json(data, name, _ARRAY)
    except ValueError as error:
        if data.lstrip().startswith(b"["):
            raise
        lines = data.split(b"\n")
        if any(map(_is_object, lines)):
            yield from _lines(iter(lines), name)
        else:
            yield InputRecord(name, name, error)
    else:
        yield from _items(value, name)


def _is_object(line: bytes) -> bool:
    try:
        parse_object(line, "")
    except ValueError:
        return False
    return True


def _lines(lines: Iterator[bytes], name: str) -> Iterator[InputRecord]:
    """Records of one object a line; empty lines are skipped. A text that starts with [ is read as one
    array.
    """
    numbered, is_first = enumerate(lines, start=1), True
    for number, line in numbered:
        if is_first and line.lstrip().startswith(b"["):
            whole = b"\n".join([line, *(rest for _, rest in numbered)])
            yield from _items(parse_json(whole, name, _ARRAY), name)
        elif line.strip():
            where, is_first = f"{name}, line {number}", False
            value: dict[str, Any] | ValueError
            try:
                value = parse_object(line, where)
            except ValueError as error:
                value = error
            yield InputRecord(name, where, value)


def _items(value: Any, name: str) -> Iterator[InputRecord]:
    """Records of a parsed array, or of one object."""
    for number, item in enumerate(value if isinstance(value, list) else [value], start=1):
        where = f"{name}, item {number}"
        problem = ValueError(f"{where}: expected {_ARRAY}, got {type(item).__name__}")
        yield InputRecord(name, where, item if isinstance(item, dict) else problem)
