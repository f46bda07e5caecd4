"""A file of recorded choices by key, so that a later process makes the same choices."""

import json
import os
from pathlib import Path
from typing import Any

from filelock import FileLock


def recorded(path: Path) -> dict[str, dict[str, Any]]:
    """The choices in the file, none if there is no file."""
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path}: not the JSON that this program wrote ({error}); delete it") from None


def record(
    path: Path, key: str, choice: dict[str, Any], replaces: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Add a choice to the file, unless another process was faster: ranks that measure at the same time must
    choose the same.

    Args:
        path: the file. Choices of other keys are kept.
        key: of the choice.
        choice: the choice.
        replaces: a choice in the file that is of no use here.

    Returns:
        The choice that is now in the file.

    Raises:
        ValueError: the file cannot be written. Without it the next process could choose otherwise and compute
            other bits.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            found = recorded(path)
            if found.get(key, replaces) != replaces:
                return found[key]
            unfinished = path.with_name(f"{path.name}.{os.getpid()}")
            unfinished.write_text(json.dumps({**found, key: choice}, indent=1) + "\n", encoding="utf-8")
            unfinished.replace(path)
            return choice
    except OSError as error:
        cure = "make room there or set NANOEULER_CACHE to another folder"
        raise ValueError(f"{path}: cannot be written: {error.strerror}; {cure}") from None
