"""Rows of JSON files in every layout; a row that cannot be read is a record that says why."""

import re
from io import BytesIO
from typing import Any

import pytest

from stages import text_files
from stages.sources.corpus import Source
from stages.sources.records import read_source
from stages.sources.rows import InputRecord, read_records


def records(data: bytes | str, name: str = "a.jsonl") -> list[InputRecord]:
    return list(read_records(BytesIO(data.encode() if isinstance(data, str) else data), name, ("text",)))


def rows(data: bytes | str, name: str = "a.jsonl") -> list[tuple[str, Any]]:
    return [(record.where, record.value) for record in records(data, name)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "a.jsonl, line 3: expected one JSON object a line"),
        (b'{"text": "\xe9"}', "a.jsonl, line 3: not UTF-8 at byte 10 of the line"),
        (b"[1]", "a.jsonl, line 3: expected one JSON object a line, got list"),
    ],
)
def test_broken_line_is_named(line: bytes, message: str) -> None:
    """Catches a number that counts rows instead of lines (the second one is empty), and a traceback instead
    of a line.
    """
    first, bad, last = rows(b'{"text": "one"}\n\n' + line + b'\n{"text": "two"}\n')
    assert first == ("a.jsonl, line 1", {"text": "one"}) and last == ("a.jsonl, line 4", {"text": "two"})
    assert isinstance(bad[1], ValueError) and str(bad[1]).startswith(message)


# A corpus that skips a damaged row silently, and so loses text.
def test_a_corpus_ends_at_a_bad_row() -> None:
    source = Source("local", files=("a.jsonl",))
    documents = read_source(source, iter(records('{"text": "one"}\n{"te')))
    assert next(documents).text == "one"
    with pytest.raises(ValueError, match=r"^a\.jsonl, line 2: expected one JSON object a line, "):
        next(documents)


# Old-Mac and Windows line ends, and those at the seam of two chunks, must not join or split rows.
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_every_line_end(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = end.join(['{"text": "a\\r\\n"}', "", '{"text": "b"}']).encode()
    for size in (1, 2, 3, 5, 1000):
        monkeypatch.setattr(text_files, "_CHUNK_BYTES", size)
        assert rows(data) == [
            ("a.jsonl, line 1", {"text": "a\r\n"}),
            ("a.jsonl, line 3", {"text": "b"}),
        ]


# A byte order mark is how some editors begin UTF-8; it was dropped in .txt alone.
@pytest.mark.parametrize("size", [4, 1000])
def test_byte_order_mark_of_rows(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "_CHUNK_BYTES", size)
    lines = b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n'
    assert [row["text"] for _, row in rows(lines)] == ["a", "b"]
    assert [row["text"] for _, row in rows(b'\xef\xbb\xbf[{"text": "a"}]', "a.json")] == ["a"]


# JSON that Python's parser ends with an error of its own: a traceback without file and line.
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[" * 100_000 + "]" * 100_000, "line 2: expected one JSON object a line, got one nested too deeply"),
        (
            '{"a":' * 100_000 + "1" + "}" * 100_000,
            "line 2: expected one JSON object a line, got one nested too deeply",
        ),
        ("1" * 10_000, "line 2: a number of over 4300 digits; write it as a text"),
    ],
    ids=["lists", "objects", "digits"],
)
def test_json_beyond_the_parser(value: str, message: str) -> None:
    good, bad = rows(f'{{"text": "a"}}\n{{"text": "b", "x": {value}}}\n')
    assert good[1] == {"text": "a"} and isinstance(bad[1], ValueError)
    assert str(bad[1]).startswith(f"a.jsonl, {message}")


# alpaca_data.json is an array; others name JSON lines .json, or put an array into .jsonl.
@pytest.mark.parametrize(
    ("name", "data", "places"),
    [
        ("a.json", '[{"n": 1},\n {"n": 2}]', ["a.json, item 1", "a.json, item 2"]),
        ("a.jsonl", '\n[{"n": 1},\n {"n": 2}]\n', ["a.jsonl, item 1", "a.jsonl, item 2"]),
        ("a.json", '{"n": 1}\n\n{"n": 2}\n', ["a.json, line 1", "a.json, line 3"]),
        ("a.json", '{\n "n": 1\n}\n', ["a.json, item 1"]),
        ("a.json", "[]", []),
    ],
)
def test_arrays_and_lines_of_objects(name: str, data: str, places: list[str]) -> None:
    found = rows(data, name)
    assert [where for where, _ in found] == places
    assert [row["n"] for _, row in found] == list(range(1, len(places) + 1))


def test_what_is_no_object_is_named() -> None:
    """Would catch a text or a number that is taken for a row, and good items lost with a bad one."""
    good, bad = rows('[{"n": 1}, 7]', "a.json")
    assert good == ("a.json, item 1", {"n": 1})
    assert str(bad[1]) == "a.json, item 2: expected a JSON array of objects, got int"
    assert str(rows("7", "a.json")[0][1]) == "a.json, item 1: expected a JSON array of objects, got int"


# A damaged file that is read as empty, or as so many bad rows as it has lines.
@pytest.mark.parametrize("data", ["", '{\n "text": "a",\n "n": \n}\n', "{broken"])
def test_a_json_file_without_an_object_is_one_bad_row(data: str) -> None:
    ((where, problem),) = rows(data, "a.json")
    assert where == "a.json"
    assert re.match(r"a\.json: expected a JSON array of objects, .* at column \d+$", str(problem))


# A damaged first line that hides the good ones after it.
def test_damaged_lines_of_a_json_file() -> None:
    found = rows('{broken\n{"n": 2}\n{}\n', "a.json")
    assert [where for where, _ in found] == ["a.json, line 1", "a.json, line 2", "a.json, line 3"]
    assert isinstance(found[0][1], ValueError) and [row for _, row in found[1:]] == [{"n": 2}, {}]


# An array that is cut off has no items that can be trusted.
@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_a_damaged_array_ends_the_reading(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: expected a JSON array of objects, .* at column"):
        rows('[{"n": 1},\n{"n": 2}\n', name)
