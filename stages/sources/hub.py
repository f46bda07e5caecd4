"""Rows of a dataset on the Hugging Face hub: streamed, and cached in parts, so that an interrupted fetch
resumes.

A part holds about PART_BYTES of JSON rows. A record file next to it holds its SHA-256 and the stream's state
after its last row. A fetch reads and checks the cached parts, and asks the hub for the rest. The dataset's
commit is looked up once and cached with the parts, so all parts come from the same commit.
"""

import hashlib
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from kernels.user_cache import user_cache
from stages.sources.corpus import Source
from stages.text_files import RowWriter, atomic_file, file_sha256, read_rows, write_json

PART_BYTES = 64 << 20
_FIX_HINT = "is there a network, and are dataset, subset, split and revision right?"


def hub_rows(source: Source, columns: Sequence[str]) -> tuple[str | None, Iterator[dict[str, Any]]]:
    """The dataset's commit (None for a local folder), and its rows, cut to `columns`.

    Raises:
        ValueError: the hub cannot be reached, or does not have the dataset, subset, split or revision.
    """
    if Path(source.dataset).is_dir():
        return None, _plain_rows(_open_stream(source, None, columns))
    key = json.dumps([source.dataset, source.subset, source.split, source.revision, sorted(columns)])
    folder = user_cache() / "hub" / hashlib.sha256(key.encode()).hexdigest()[:16]
    pinned = folder / "dataset.json"
    if not pinned.is_file():
        write_json(pinned, {"dataset": source.dataset, "revision": _newest_commit(source)})
    revision = json.loads(pinned.read_text(encoding="utf-8"))["revision"]
    return revision, cached_rows(folder, lambda: _open_stream(source, revision, columns))


def _hub_error(source: Source, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())[:200]
    return ValueError(
        f"{source.label}: cannot be read from the hub ({type(error).__name__}: {reason}); {_FIX_HINT}"
    )


def _newest_commit(source: Source) -> str:
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(source.dataset, revision=source.revision).sha)
    except Exception as error:  # the client raises errors of several libraries, without a common base
        raise _hub_error(source, error) from None


def _open_stream(source: Source, revision: str | None, columns: Sequence[str]) -> Any:
    """The dataset as an iterable with state_dict and load_state_dict, cut to those `columns` that it has."""
    import datasets

    datasets.disable_progress_bars()
    try:
        stream = datasets.load_dataset(
            source.dataset, source.subset, split=source.split, revision=revision, streaming=True
        )
        present = stream.column_names or list(next(iter(stream), {}))
    except Exception as error:  # as above
        raise _hub_error(source, error) from None
    if not set(columns) & set(present):
        raise ValueError(
            f"{source.label}: its rows have the keys {sorted(present)}, none of {sorted(columns)}; set "
            "text_key"
        )
    return stream.select_columns([column for column in columns if column in present])


def _plain_rows(stream: Any) -> Iterator[dict[str, Any]]:
    try:
        yield from stream
    except Exception as error:  # as above; the connection can break at any row
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"the hub's stream broke off ({type(error).__name__}: {reason}); run again to go on, the rows so "
            "far are kept"
        ) from None


def cached_rows(folder: Path, open_stream: Callable[[], Any]) -> Generator[dict[str, Any], None, None]:
    """Rows of the parts in `folder`, then those of the stream after them, which are written as further parts.

    A part is also written when the caller stops early or the stream breaks off. From the first damaged part
    on, all parts are fetched again.
    """
    state, number = None, 0
    while (record := _whole_part(folder, number)) is not None:
        yield from (row for _, row in read_rows(_part(folder, number)))
        state, number = record["state"], number + 1
        if record["last"]:
            return
    for stale in folder.glob("part_*"):
        if int(stale.name[5:10]) >= number:
            stale.unlink()
    stream = open_stream()
    if state is not None:
        stream.load_state_dict(state)
    rows, last = _plain_rows(stream), False
    while not last:
        last = yield from _write_part(folder, number, rows, stream)
        number += 1


def _write_part(
    folder: Path, number: int, rows: Iterator[dict[str, Any]], stream: Any
) -> Generator[dict[str, Any], None, bool]:
    """Yield rows and write them as one part; returns whether the stream has ended."""
    size, last, interruption = 0, False, None
    with atomic_file(_part(folder, number)) as file:
        writer = RowWriter(file)
        try:
            for row in rows:
                size += writer.write(row)
                yield row
                if size >= PART_BYTES:
                    break
            else:
                last = True
        except (GeneratorExit, ValueError) as error:
            interruption = error  # raised again after the rows so far are written
        sha256 = writer.finish()
    write_json(_record(folder, number), {"sha256": sha256, "last": last, "state": stream.state_dict()})
    if interruption is not None:
        raise interruption
    return last


def _part(folder: Path, number: int) -> Path:
    return folder / f"part_{number:05d}.jsonl.zst"


def _record(folder: Path, number: int) -> Path:
    return folder / f"part_{number:05d}.json"


def _whole_part(folder: Path, number: int) -> dict[str, Any] | None:
    """The record of a part; None if the part or its record is missing or damaged."""
    try:
        record: dict[str, Any] = json.loads(_record(folder, number).read_text(encoding="utf-8"))
        return record if file_sha256(_part(folder, number)) == record["sha256"] else None
    except (FileNotFoundError, json.JSONDecodeError, KeyError):
        return None
