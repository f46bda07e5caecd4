"""A hash of everything that decides the bits of a run: parameters, data, versions and the source files."""

import ast
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stages.text_files import file_sha256

# Modules that only pass on values, or start a stage and its ranks.
UNTRACKED = ("settings", "training_settings", "program", "ranks")
REPOSITORY = Path(__file__).resolve().parent.parent


def fingerprint(files: Iterable[Path], values: Mapping[str, Any]) -> str:
    """A hash of everything that decides the bits of a run.

    Args:
        files: data and sources; a folder stands for all files in it. Names and contents count, parent folders
            do not.
        values: parameters, device and library versions, as plain values for JSON.
    """
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode("utf-8"))
    for path in files:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                digest.update(f"{file.name} {file_sha256(file)}\n".encode())
    return digest.hexdigest()[:32]


def sources(module: str) -> list[Path]:
    """The source files that a stage runs: its imports from stages/ and all of kernels/.

    UNTRACKED modules are left out; the values that they pass on are in the fingerprint.

    Args:
        module: a name within stages/, such as "pretrain".
    """
    found: set[Path] = set()
    pending = [REPOSITORY / "stages" / f"{module}.py"]
    while pending:
        path = pending.pop()
        if path in found:
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "stages":
                pending += _sources_of([alias.name for alias in node.names])
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stages."):
                pending += _sources_of([(node.module or "").removeprefix("stages.")])
    kernels = [path for path in (REPOSITORY / "kernels").rglob("*") if path.suffix in (".py", ".cu", ".cuh")]
    return sorted(found) + sorted(kernels)


def _sources_of(modules: Iterable[str]) -> list[Path]:
    """The files of modules within stages/; of a package all."""
    tracked = [REPOSITORY / "stages" / name.replace(".", "/") for name in modules
               if name.partition(".")[0] not in UNTRACKED]  # fmt: skip
    files = [path.with_suffix(".py") for path in tracked if path.with_suffix(".py").is_file()]
    return files + [file for path in tracked for file in path.glob("*.py")]
