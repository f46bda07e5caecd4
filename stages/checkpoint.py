"""Checkpoints, and the state from which a killed run goes on.

A checkpoint is what later stages read: a folder of weights.safetensors (fp32) and model.json, the same bytes for the same
weights. model.json is written last and holds the weights' sha256 and its own, so that half a folder or an edited one shows.

A resume state is one file with everything that training still needs. DVC deletes a stage's outs when the stage starts,
so states live apart from them, in .nanoeuler/resume/<fingerprint>/ of the main checkout: the fingerprint is a hash of
all that the run's bits depend on, and only an exact match resumes.
"""

import ast
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kernels.config import ModelConfig
from stages.text_files import file_sha256, replacing, unwritable, write_text

WEIGHTS = "weights.safetensors"
MODEL = "model.json"
KEPT_STATES = 2  # the newest, and the one before it in case the newest is damaged
REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Checkpoint:
    """A trained model.

    Args:
        weights: fp32 arrays by parameter name, as Engine.load takes them.
        config: the model's shape and parts.
        tokenizer_sha256: of the tokenizer.json whose ids the model was trained on.
    """

    weights: dict[str, np.ndarray]
    config: ModelConfig
    tokenizer_sha256: str


def save(folder: Path, weights: Mapping[str, np.ndarray], config: ModelConfig, tokenizer_sha256: str) -> None:
    """Writes a checkpoint: each file whole or not at all, the same bytes for the same model.

    Raises:
        ValueError: the folder cannot be written.
    """
    write_arrays(folder / WEIGHTS, weights)
    model = {
        "config": config.to_dict(),
        "tokenizer_sha256": tokenizer_sha256,
        "weights_sha256": file_sha256(folder / WEIGHTS),
    }
    write_text(folder / MODEL, json.dumps({**model, "sha256": _json_sha256(model)}, indent=2) + "\n")


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file whole or not at all; ValueError where it cannot be written."""
    with replacing(path) as partial:
        try:
            save_file({name: np.asarray(array, order="C") for name, array in arrays.items()}, partial, metadata)
        except SafetensorError as error:  # it knows no OSError
            raise unwritable(path, error) from None


def load(folder: Path, tokenizer_sha256: str | None = None) -> Checkpoint:
    """Reads and validates a checkpoint.

    Args:
        folder: what save wrote.
        tokenizer_sha256: of the tokenizer that will be used with it; None asks for no match.

    Raises:
        ValueError: a file is missing, half written or edited, or the checkpoint belongs to another tokenizer.
    """
    anew = "run `make repro` to make it anew"
    for name in (MODEL, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name}: expected a file of a checkpoint, found none; {anew}")
    try:
        model = json.loads((folder / MODEL).read_text(encoding="utf-8"))
        if model.pop("sha256") != _json_sha256(model):
            raise ValueError("its sha256 is not that of its other values")
        config = ModelConfig(**model["config"])
        expected, trained_with = model["weights_sha256"], model["tokenizer_sha256"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{folder / MODEL}: half written or edited ({error}); {anew}") from None
    if file_sha256(folder / WEIGHTS) != expected:
        raise ValueError(f"{folder / WEIGHTS}: half written or edited: its sha256 is not the one in {MODEL}; {anew}")
    if tokenizer_sha256 not in (None, trained_with):
        here = f"the tokenizer here is {str(tokenizer_sha256)[:12]}"
        raise ValueError(f"{folder}: trained with the tokenizer {trained_with[:12]}, but {here}; use that or {anew}")
    with safe_open(folder / WEIGHTS, framework="numpy") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    return Checkpoint(weights, config, trained_with)


def _json_sha256(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode("utf-8")).hexdigest()


@dataclass(frozen=True)
class State:
    """All that a run needs to go on as if it had never stopped.

    Args:
        step: finished updates.
        arrays: Engine.state(): parameters, moments, with fp8 scales, and the step count.
        record: what metrics.Record.to_dict() gives: the curves so far.
    """

    step: int
    arrays: dict[str, np.ndarray]
    record: dict[str, Any]


class ResumeFolder:
    """The resume states of one fingerprint, locked while it is open.

    Opening it waits, with a line, while another run holds the same folder, and removes the finished states of other
    fingerprints: they were kept only until DVC had surely recorded that work. Unfinished ones stay.

    Args:
        fingerprint: of this run; see fingerprint().
        root: the folder that holds the folders of all fingerprints.
        say: where a line for the user goes.
    """

    def __init__(self, fingerprint: str, root: Path, say: Callable[[str], None] = print) -> None:
        self.folder = root / fingerprint
        self._say = say
        self._lock = FileLock(self.folder / "lock")

    def __enter__(self) -> "ResumeFolder":
        waiting = False
        while not self._try_to_open():
            if not waiting:
                self._say(f"waiting for another run of the same work, which holds {self.folder}; Ctrl-C gives up")
                waiting = True
            time.sleep(0.5)
        for leftover in self.folder.glob("*.partial"):
            leftover.unlink()
        self._name_others()
        return self

    def _name_others(self) -> None:
        others = 0
        for path in self.folder.parent.glob("*/*.safetensors"):
            with suppress(FileNotFoundError):  # a run of other settings may be replacing it right now
                others += path.stat().st_size if path.parent != self.folder else 0
        if others:
            where = self.folder.parent
            self._say(f"unfinished work of other settings keeps {others >> 20} MiB in {where}; delete what you give up")

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.release()

    def newest(self) -> Path | None:
        """The newest state's file; its content is not yet checked."""
        return next(iter(self._files()), None)

    def load(self) -> State | None:
        """The newest undamaged state, None where there is none; a damaged one is named in a line and removed."""
        for path in self._files():
            if file_sha256(path)[:16] != path.stem.split("-")[1]:
                self._say(f"{path}: damaged resume state, passed over and removed")
                path.unlink()
                continue
            with safe_open(path, framework="numpy") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
                return State(int(path.stem.split("-")[0]), arrays, json.loads(file.metadata()["record"]))
        return None

    def save(self, state: State) -> None:
        """Writes a state whole or not at all and keeps the last two; ValueError where it cannot be written."""
        partial = self.folder / f"{state.step:09d}.partial"
        write_arrays(partial, state.arrays, {"record": json.dumps(state.record)})
        # The content's hash is in the name: no state is taken for whole that was changed since.
        os.replace(partial, self.folder / f"{state.step:09d}-{file_sha256(partial)[:16]}.safetensors")
        for older in self._files()[KEPT_STATES:]:
            older.unlink()

    def finish(self) -> None:
        """Marks the work as handed on: the next run of another fingerprint may remove it."""
        write_text(self.folder / "finished", "")

    def _files(self) -> list[Path]:
        found = [path for path in self.folder.glob("*") if re.fullmatch(r"\d{9}-[0-9a-f]{16}\.safetensors", path.name)]
        return sorted(found, key=lambda path: (path.name[:9], path.stat().st_mtime_ns), reverse=True)

    def _try_to_open(self) -> bool:
        """Takes the lock if it is free; under the root's lock, so that no folder is removed while it is being taken."""
        root = self.folder.parent
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(root / "lock"):
                self.folder.mkdir(exist_ok=True)
                self._lock.acquire(timeout=0)
                for other in root.iterdir():
                    if other != self.folder and (other / "finished").exists():
                        _remove_if_free(other)
        except Timeout:
            return False
        except OSError as error:
            raise unwritable(self.folder, error.strerror) from None
        return True


def _remove_if_free(folder: Path) -> None:
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return
    lock.release()  # before the removal: Windows removes no open file
    shutil.rmtree(folder, ignore_errors=True)


def resume_root() -> Path:
    """Where resume states live: in the main checkout also when DVC runs the stage in a temporary copy of it."""
    return Path(os.environ.get("DVC_ROOT", ".")) / ".nanoeuler" / "resume"


def fingerprint(files: Iterable[Path], values: Mapping[str, Any]) -> str:
    """A hash of all that decides a run's bits.

    Args:
        files: data and sources; folders count with every file in them. Contents and names matter, not where they lie.
        values: parameters, device and library versions, as JSON knows them.
    """
    digest = hashlib.sha256(_json_sha256(values).encode("utf-8"))
    for path in files:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                digest.update(f"{file.name} {file_sha256(file)}\n".encode())
    return digest.hexdigest()[:32]


def sources(module: str) -> list[Path]:
    """The files of this repository whose code a stage runs: what it imports of stages/, and all of kernels/.

    Without settings.py and program.py: all they hand on are values, which count as such.

    Args:
        module: a name within stages/, such as "pretrain".
    """
    found: dict[str, Path] = {}
    pending = [module]
    while pending:
        name = pending.pop()
        path = REPOSITORY / "stages" / f"{name}.py"
        if name in found or name in ("settings", "program") or not path.is_file():
            continue
        found[name] = path
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "stages":
                pending += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stages."):
                pending.append((node.module or "").removeprefix("stages."))
    kernels = [path for path in (REPOSITORY / "kernels").rglob("*") if path.suffix in (".py", ".cu", ".cuh")]
    return [found[name] for name in sorted(found)] + sorted(kernels)
