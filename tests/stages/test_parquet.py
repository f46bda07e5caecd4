"""Parquet files: the used columns alone, a row at a time, and one line where a value or a file cannot be
had.
"""

import datetime
import io
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from stages.sources import parquet_pages
from stages.sources.corpus import Source
from stages.sources.parquet import stream_parquet
from stages.sources.records import open_source, read_source

ROOT = Path(__file__).resolve().parent.parent.parent


def written(table: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer, **options)
    return buffer.getvalue()


def rows(data: bytes, *columns: str) -> list[dict[str, Any]]:
    return [row for _, row in stream_parquet(io.BytesIO(data), "a.parquet", columns)]


DAYS = pyarrow.array([-1_000_000, 0], pyarrow.int32()).cast(
    pyarrow.date32()
)  # the first is before the year 1
TIMES = pyarrow.array([2**62, 0], pyarrow.int64()).cast(
    pyarrow.timestamp("us")
)  # the first is beyond the year 9999


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
def test_a_column_that_holds_no_text_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    """Would catch numbers, bytes or lists that reach the tokenizer."""
    monkeypatch.chdir(tmp_path)
    Path("a.parquet").write_bytes(written(pyarrow.table({"text": ["words", None][:1], "other": [value]})))
    source = Source("local", files=("a.parquet",), text_key="other")
    with pytest.raises(
        ValueError, match=r"^a\.parquet, row 1: other must be a text, got (int|bytes|date|list|dict)|keys"
    ):
        list(read_source(source, open_source(source, ("other",)).records))


def test_columns_of_one_name_and_none_of_the_wanted() -> None:
    """Would catch one of two columns that is taken at random, and a file that gives nothing without a
    word.
    """
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    with pytest.raises(ValueError, match=r"^a\.parquet: two columns are named 'text'; rename one of them"):
        rows(written(twice), "text")
    with pytest.raises(ValueError, match=re.escape("a.parquet: expected the column text, got body, n")):
        rows(written(pyarrow.table({"n": [1], "body": ["x"]})), "text")


def test_row_groups_and_empty_ones() -> None:
    """Would catch rows lost at the end of a group, and numbering that starts again there."""
    table = pyarrow.table({"text": [f"t{n}" for n in range(7)]})
    data = written(table, row_group_size=3)
    places = [where for where, _ in stream_parquet(io.BytesIO(data), "a.parquet", ["text"])]
    assert places == [f"a.parquet, row {n}" for n in range(1, 8)]
    assert rows(data, "text") == table.to_pylist()
    assert rows(written(table.slice(0, 0)), "text") == []


MEASURE = """
import resource, sys
from stages.sources.corpus import Source
from stages.sources.records import open_source, read_source
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
        (
            {"text": [str(n) + "z" * 8_000_000 for n in range(20)]},
            {"row_group_size": 1, "use_dictionary": False},
            100,
        ),
        ({"text": [str(n) + "z" * 8_000_000 for n in range(20)]}, {"compression": "zstd"}, 100),
    ],
    ids=["unused column", "one long value 256 times", "long rows", "long rows in one page"],
)
def test_memory_does_not_grow_with_rows(
    tmp_path: Path, table: dict[str, Any], options: dict[str, Any], most_mb: int
) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(written(pyarrow.table(table), **options))
    command = [sys.executable, "-c", MEASURE, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    count, used_mb = map(int, done.stdout.split())
    assert count == sum(len(text) for text in table["text"])
    assert used_mb < most_mb


def sample(rng: random.Random) -> str | None:
    """A text with runs and repetitions, as compressors like them, or none."""
    if rng.random() < 0.2:
        return None
    pieces = [
        "ab",
        "xyz " * rng.randint(1, 30),
        "q" * rng.randint(1, 200),
        "caf\u00e9\U0001f600",
        str(rng.random()),
    ]
    return "".join(rng.choice(pieces) for _ in range(rng.randint(0, rng.choice([3, 100, 3000]))))


# Our own reading of large pages against pyarrow's: a value at the wrong place is another text under the same
# name.
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [True, False])
@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd"])
def test_large_pages_hold_pyarrows_values(
    compression: str, dictionary: bool, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_pages, "LARGE_PAGE_BYTES", 0)
    rng = random.Random(f"{compression}{dictionary}{version}")
    for nullable in (True, False):
        texts = [sample(rng) for _ in range(40)]
        texts = [rng.choice(texts) for _ in range(300)] if nullable else [text or "" for text in texts]
        schema = pyarrow.schema(
            [("n", pyarrow.int64()), pyarrow.field("text", pyarrow.string(), nullable=nullable)]
        )
        table = pyarrow.table({"n": list(range(len(texts))), "text": texts}, schema=schema)
        data = written(table, compression=compression, use_dictionary=dictionary, data_page_version=version,
                       row_group_size=rng.choice([7, 1000]), data_page_size=rng.choice([100, 1 << 20]))  # fmt: skip
        stream = io.BytesIO(data)
        assert parquet_pages.long_texts(pyarrow.parquet.ParquetFile(stream), stream, 0, ["text"]) is not None
        assert [row["text"] for row in rows(data, "text")] == texts


# What our reading does not know is pyarrow's, however large the page is.
def test_other_forms_are_left_to_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_pages, "LARGE_PAGE_BYTES", 0)
    table = pyarrow.table({"text": ["a", None, "c"], "talk": [["x"], [], ["y", "z"]], "n": [1, 2, 3]})
    for options in (
        {"compression": "brotli"},
        {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}},
    ):
        data = written(table.select(["text"]), **options)
        stream = io.BytesIO(data)
        assert parquet_pages.long_texts(pyarrow.parquet.ParquetFile(stream), stream, 0, ["text"]) is None
        assert [row["text"] for row in rows(data, "text")] == ["a", None, "c"]
    assert rows(written(table), "talk", "n") == table.select(["talk", "n"]).to_pylist()


# A damaged page must end in a line, not in a traceback or in another text.
def test_damaged_large_pages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_pages, "LARGE_PAGE_BYTES", 0)
    rng = random.Random(5)
    texts = [f"{n} " + "some words " * 50 for n in range(60)]
    for compression in ("none", "snappy", "gzip", "zstd"):
        data = bytearray(written(pyarrow.table({"text": texts}), compression=compression))
        for _ in range(60):
            spoilt = bytearray(data)
            spoilt[rng.randrange(4, len(data) // 2)] ^= 1 << rng.randrange(8)
            try:
                rows(
                    bytes(spoilt), "text"
                )  # a changed letter of an uncompressed text is another text to anybody
            except ValueError as error:
                assert str(error).startswith("a.parquet")
