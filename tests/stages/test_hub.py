"""Datasets of the hub through a folder of the same shape: streamed, cut to columns, kept in parts, gone on
with.
"""

import itertools
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from stages.sources import hub
from stages.sources.corpus import Source


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Three parquet files of 20 rows, in the layout of a dataset on the hub."""
    folder = tmp_path / "tiny_stories"
    (folder / "data").mkdir(parents=True)
    for number in range(3):
        rows = range(number * 20, number * 20 + 20)
        table = pyarrow.table({"text": [f"story {row}" for row in rows], "row": list(rows)})
        path = folder / "data" / f"train-{number:05d}-of-00003.parquet"
        pyarrow.parquet.write_table(table, path, row_group_size=7)
    return folder


STORIES = [{"text": f"story {row}"} for row in range(60)]


def test_rows_of_a_folder_in_order(dataset: Path) -> None:
    """Catches rows out of order, further columns that are fetched for nothing, and a cache that hides a
    changed folder.
    """
    revision, rows = hub.hub_rows(Source("hf", dataset=str(dataset)), ("text", "absent"))
    assert revision is None
    assert list(rows) == STORIES


def test_wrong_column_and_split_are_named(dataset: Path) -> None:
    """Catches a wrong key that gives an empty corpus, and a traceback of the library."""
    with pytest.raises(ValueError, match=r"its rows have the keys \['row', 'text'\], none of \['TEXT'\]"):
        list(hub.hub_rows(Source("hf", dataset=str(dataset)), ("TEXT",))[1])
    with pytest.raises(
        ValueError,
        match=r"cannot be read from the hub .*; is there a network, and are dataset, subset, split",
    ):
        list(hub.hub_rows(Source("hf", dataset=str(dataset), split="test"), ("text",))[1])


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback, or a half-made cache that is taken for the dataset."""
    import huggingface_hub

    def refuse(*args: Any, **keys: Any) -> None:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
    monkeypatch.setenv("NANOEULER_CACHE", str(tmp_path / "cache"))
    message = r"some/set: cannot be read from the hub \(ConnectionError: Name or service not known\); is there a network"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            hub.hub_rows(Source("hf", dataset="some/set"), ("text",))


@pytest.mark.parametrize("part_bytes", [1, 100, 10**9])
def test_interrupted_fetch_goes_on(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    """Catches rows lost or doubled at the seam, and a complete fetch that asks the network again."""
    monkeypatch.setattr(hub, "PART_BYTES", part_bytes)
    source, parts = Source("hf", dataset=str(dataset)), tmp_path / "parts"
    opened: list[Any] = []

    def open_stream() -> Any:
        opened.append(hub._open_stream(source, None, ("text",)))
        return opened[-1]

    for stop in (1, 9, 33):
        rows = hub.cached_rows(parts, open_stream)
        assert list(itertools.islice(rows, stop)) == STORIES[:stop]
        rows.close()
    assert list(hub.cached_rows(parts, open_stream)) == STORIES
    assert len(opened) == 4
    assert list(hub.cached_rows(parts, open_stream)) == STORIES
    assert len(opened) == 4


def test_a_broken_stream_keeps_what_came(tmp_path: Path) -> None:
    """Catches a fetch of hours that starts again from nothing after a lost connection."""

    class Breaking:
        place = 0

        def __iter__(self) -> Any:
            for row in STORIES[self.place :]:
                if self.place == 5 and not whole:
                    raise ConnectionError("reset by peer")
                self.place += 1
                yield row

        def state_dict(self) -> dict[str, int]:
            return {"place": self.place}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.place = state["place"]
            assert self.place == 5

    whole = False
    with pytest.raises(ValueError, match=r"broke off \(ConnectionError: reset by peer\); run again to go on"):
        list(hub.cached_rows(tmp_path, Breaking))
    whole = True
    assert list(hub.cached_rows(tmp_path, Breaking)) == STORIES


def test_a_damaged_part_is_fetched_again(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches bytes of a damaged cache that reach the corpus."""
    monkeypatch.setattr(hub, "PART_BYTES", 200)
    parts = tmp_path / "parts"
    source = Source("hf", dataset=str(dataset))
    assert list(hub.cached_rows(parts, lambda: hub._open_stream(source, None, ("text",)))) == STORIES
    middle = parts / "part_00002.jsonl.zst"
    whole = middle.read_bytes()
    middle.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert list(hub.cached_rows(parts, lambda: hub._open_stream(source, None, ("text",)))) == STORIES
    assert middle.read_bytes() == whole
