"""Parquet files: the used columns alone, a row at a time, and one line where a value or a file cannot be had."""

import datetime
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from stages.corpus import Source
from stages.parquet import stream_parquet
from stages.sources import open_source, read_source

ROOT = Path(__file__).resolve().parent.parent.parent


def written(table: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer, **options)
    return buffer.getvalue()


def rows(data: bytes, *columns: str) -> list[dict[str, Any]]:
    return [row for _, row in stream_parquet(io.BytesIO(data), "a.parquet", columns)]


DAYS = pyarrow.array([-1_000_000, 0], pyarrow.int32()).cast(pyarrow.date32())  # the first is before the year 1
TIMES = pyarrow.array([2**62, 0], pyarrow.int64()).cast(pyarrow.timestamp("us"))  # the first is beyond the year 9999


# A value that Python has no name for, in a column that nobody asked for, ended the stage in a traceback.
@pytest.mark.parametrize("odd", [DAYS, TIMES], ids=["days", "times"])
def test_unused_columns_are_not_read(odd: Any) -> None:
    table = pyarrow.table({"odd": odd, "text": ["a", "b"], "n": [1, 2]})
    assert rows(written(table), "text") == [{"text": "a"}, {"text": "b"}]
    talks = [[{"role": "user", "content": "q"}], [{"role": "assistant", "content": "a"}]]
    table = pyarrow.table({"odd": odd, "messages": talks})
    assert rows(written(table), "messages", "prompt", "completion") == [{"messages": talk} for talk in talks]


# The same in the column that is asked for: one line with the row.
@pytest.mark.parametrize("odd", [DAYS, TIMES], ids=["days", "times"])
def test_a_value_that_cannot_be_had_is_named(odd: Any) -> None:
    with pytest.raises(ValueError, match=r"^a\.parquet, row 1: the column text holds no text: "):
        rows(written(pyarrow.table({"text": odd})), "text")


# Writers of old mark no text as one: it comes as bytes.
def test_bytes_are_read_as_utf8() -> None:
    assert rows(written(pyarrow.table({"text": ["caf\u00e9".encode()]})), "text") == [{"text": "caf\u00e9"}]
    with pytest.raises(ValueError, match=r"^a\.parquet, row 2: the column text holds no text: 'utf-8' codec"):
        rows(written(pyarrow.table({"text": [b"a", b"\xff"]})), "text")


@pytest.mark.parametrize("value", [3, datetime.date(2020, 1, 1), ["list"], {"a": 1}])
def test_a_column_that_holds_no_text_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    """Would catch numbers, bytes or lists that reach the tokenizer."""
    monkeypatch.chdir(tmp_path)
    Path("a.parquet").write_bytes(written(pyarrow.table({"text": ["words", None][:1], "other": [value]})))
    source = Source("local", files=("a.parquet",), text_key="other")
    with pytest.raises(ValueError, match=r"^a\.parquet, row 1: other must be a text, got (int|bytes|date|list|dict)|keys"):
        list(read_source(source, open_source(source, ("other",)).records))


def test_columns_of_one_name_and_none_of_the_wanted() -> None:
    """Would catch one of two columns that is taken at random, and a file that gives nothing without a word."""
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    with pytest.raises(ValueError, match=r"^a\.parquet: two columns are named 'text'; rename one of them"):
        rows(written(twice), "text")
    with pytest.raises(ValueError, match=re.escape("a.parquet: expected the column text, got body, n")):
        rows(written(pyarrow.table({"n": [1], "body": ["x"]})), "text")


def test_row_groups_and_empty_ones() -> None:
    """Would catch rows lost or numbered anew where a group ends."""
    table = pyarrow.table({"text": [f"t{n}" for n in range(7)]})
    data = written(table, row_group_size=3)
    places = [where for where, _ in stream_parquet(io.BytesIO(data), "a.parquet", ["text"])]
    assert places == [f"a.parquet, row {n}" for n in range(1, 8)]
    assert rows(data, "text") == table.to_pylist()
    assert rows(written(table.slice(0, 0)), "text") == []


MEASURE = """
import resource, sys
from stages.corpus import Source
from stages.sources import open_source, read_source
import pyarrow.parquet
source = Source("local", files=(sys.argv[1],))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
count = sum(document.size for document in read_source(source, open_source(source, ("text",)).records))
print(count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


# 256 rows at a time took 5.4 GB for a file of 400 KB, and 2.4 GB for 40 rows of 20 MB.
@pytest.mark.parametrize(
    ("table", "options", "most_mb"),
    [
        ({"text": ["x" * 500] * 256, "image": [b"\0" * (4 << 20)] * 256}, {}, 60),
        ({"text": ["y" * (4 << 20)] * 256}, {}, 60),
        ({"text": [str(n) + "z" * 8_000_000 for n in range(20)]}, {"row_group_size": 1, "use_dictionary": False}, 100),
    ],
    ids=["unused column", "one long value 256 times", "long rows"],
)
def test_memory_does_not_grow_with_rows(tmp_path: Path, table: dict[str, Any], options: dict[str, Any], most_mb: int) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(written(pyarrow.table(table), **options))
    command = [sys.executable, "-c", MEASURE, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    count, used_mb = map(int, done.stdout.split())
    assert count == sum(len(text) for text in table["text"])
    assert used_mb < most_mb
