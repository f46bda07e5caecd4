"""Local files by globs: each file once, in a fixed order; nothing is skipped silently.

A glob is matched segment by segment: `*`, `?` and `[...]` within a name, `**` for any number of folders.
Names that begin with a dot are left out, unless the glob's segment begins with one. A link to a file is
followed. A link to a folder is not: DVC does not follow it either, so it would not notice a change there.
"""

import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path


def find_files(patterns: Sequence[str]) -> list[Path]:
    """The files that the globs match, sorted by path.

    Of a file and its links only one path is kept: that of the file if matched, else the first link by name.

    Raises:
        ValueError: a glob matches no file, a broken link, a link to a folder elsewhere, or a pipe, socket or
            device.
    """
    found: set[Path] = set()
    for pattern in patterns:
        matched = list(_expand(str(Path(pattern).expanduser())))
        if not matched:
            raise ValueError(
                f"files: {display_name(pattern)}: no such file; paths are relative to the repository's root"
            )
        found.update(matched)
    kept: dict[str, Path] = {}
    for path in sorted(found, key=lambda path: (path.is_symlink(), path.as_posix())):
        kept.setdefault(os.path.realpath(path), path)
    return sorted(kept.values(), key=Path.as_posix)


def warn_undecodable(paths: Sequence[Path]) -> None:
    """Prints the names that are not UTF-8. DVC cannot hash their folder, and its error names no file."""
    for path in paths:
        if "\ufffd" in display_name(path) and not str(path).isprintable():
            print(
                f"note: {display_name(path)}: the name is not UTF-8, so DVC cannot hash its "
                "folder; rename it",
                file=sys.stderr,
            )


def display_name(name: str | Path) -> str:
    """A file's name as text, with U+FFFD for bytes that are not UTF-8."""
    return os.fsencode(name).decode("utf-8", errors="replace")


def _expand(pattern: str) -> Iterator[Path]:
    """The files that one glob matches."""
    parts = Path(pattern).parts
    fixed = next((number for number, part in enumerate(parts) if _is_wild(part)), len(parts))
    start = Path(*parts[:fixed])
    if fixed == len(parts):
        if start.is_dir():
            raise ValueError(
                f"files: {display_name(start)} is a folder; write {display_name(start / '**' / '*')} for all "
                "that is in it"
            )
        if os.path.lexists(start):
            yield _checked(start)
    elif start.is_dir():
        yield from _walk(start, parts[fixed:], os.path.realpath(start))


def _walk(folder: Path, parts: Sequence[str], top: str) -> Iterator[Path]:
    """The files below a folder that match the remaining parts of a glob. top: the real path of the walk's
    first folder.
    """
    first, rest = parts[0], parts[1:]
    if first == "**" and rest:
        yield from _walk(folder, rest, top)
    for name in sorted(os.listdir(folder)):
        if name.startswith(".") and not first.startswith("."):
            continue
        path = folder / name
        if first == "**":
            if _enters(path, top):
                yield from _walk(path, parts, top)
            elif not rest and not path.is_dir():
                yield _checked(path)
        elif fnmatchcase(name, first):
            if rest and _enters(path, top):
                yield from _walk(path, rest, top)
            elif not rest and not path.is_dir():
                yield _checked(path)


def _enters(path: Path, top: str) -> bool:
    """Whether the walk enters this path. A link into the same tree is skipped: the walk finds its files
    without it.
    """
    if not path.is_dir():
        return False
    if not path.is_symlink():
        return True
    real = os.path.realpath(path)
    if real != top and not real.startswith(top + os.sep):
        raise ValueError(
            f"{display_name(path)}: a link to the folder {display_name(real)}: DVC does not follow it and "
            "would miss changes; copy the folder, or set local_path and files to it"
        )
    return False


def _checked(path: Path) -> Path:
    """The path, if it is a regular file; else ValueError."""
    try:
        mode = path.stat().st_mode
    except OSError as error:  # a broken link, or one that leads to itself
        raise ValueError(
            f"{display_name(path)}: cannot be read: {error.strerror}; remove it or leave it out of files"
        ) from None
    if not stat.S_ISREG(mode):
        raise ValueError(
            f"{display_name(path)}: a pipe, socket or device, not a file; remove it or leave it out of files"
        )
    return path


def _is_wild(part: str) -> bool:
    return re.search(r"[*?\[]", part) is not None
