"""The states from which a killed run goes on, or a longer one.

A state is one file with everything that training still needs. DVC deletes a stage's outs when the stage starts. So states
live apart from them, in .nanoeuler/resume/<fingerprint>/ of the main checkout. The fingerprint is a hash of all that decides
the run's bits, and only an exact match resumes.

One other match is exact. With schedule wsd the learning rate before the cool-down does not depend on the length of the run.
A state from there is also a state of a run with other steps or another cool-down. Such runs have the same `trunk`.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from safetensors import safe_open

from stages.checkpoint import write_arrays
from stages.text_files import file_sha256, unwritable, write_text

KEPT_STATES = 2  # the newest, and the one before it in case the newest is damaged
UNTRACKED = ("settings", "training_settings", "program")  # modules that hand on nothing but values
REPOSITORY = Path(__file__).resolve().parent.parent
WORK, FINISHED = "work.json", "finished"


@dataclass(frozen=True)
class Work:
    """What a run is, for this run and for later ones.

    Args:
        stage: its name.
        trunk: a hash of all that decides the run's bits, but for its steps and its cool-down.
        steps: of the whole run.
        trunk_steps: those before the cool-down; 0 with a schedule that depends on the length of the run.
    """

    stage: str
    trunk: str
    steps: int
    trunk_steps: int

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides the run's bits."""
        return fingerprint([], asdict(self))


@dataclass(frozen=True)
class State:
    """All that a run needs to go on as if it had never stopped.

    Args:
        step: finished updates.
        arrays: of Engine.state(): parameters, moments, with fp8 scales, and the step count.
        history: what metrics.TrainingHistory.to_dict() gives: the curves so far.
    """

    step: int
    arrays: dict[str, np.ndarray]
    history: dict[str, Any]


class ResumeFolder:
    """The resume states of one run, locked while it is open; opening it waits, with a line, while another process holds it.

    Finished work stays until other work of the same stage is finished. So a kill before DVC writes its lock, or a lock that
    was put back, repeats nothing. Unfinished work stays.

    Args:
        work: this run.
        root: the folder that holds the folders of all runs.
        say: where a line for the user goes.
    """

    def __init__(self, work: Work, root: Path, say: Callable[[str], None] = print) -> None:
        self.work, self.folder = work, root / work.fingerprint
        self._say = say
        self._lock, self._root_lock = FileLock(self.folder / "lock"), FileLock(root / "lock")

    def __enter__(self) -> "ResumeFolder":
        waiting = False
        while not self._try_to_open():
            if not waiting:
                self._say(
                    f"waiting for another run of the same work, which holds {self.folder}; Ctrl-C gives up"
                )
                waiting = True
            time.sleep(0.5)
        for leftover in self.folder.glob("*.partial"):
            leftover.unlink()
        write_text(self.folder / WORK, json.dumps(asdict(self.work)))
        self._name_unfinished()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.release()

    @property
    def finished(self) -> bool:
        """Whether this work was finished before."""
        return (self.folder / FINISHED).exists()

    def newest(self) -> Path | None:
        """The newest state's file; its content is not yet checked."""
        return next(iter(_states(self.folder)), None)

    def load(self) -> State | None:
        """The newest undamaged state of this run, else of an earlier one that this run goes on from; None: there is none.

        A damaged state is named in a line and removed.
        """
        for path in _states(self.folder):
            if state := self._read(path):
                self._say(f"resumed at step {state.step} from {self.folder}")
                return state
        with self._root_lock:  # under which no folder is removed
            for path, steps in self._of_earlier_runs():
                with suppress(FileNotFoundError):  # the other run is under way and has replaced this state
                    if state := self._read(path):
                        self._say(
                            f"goes on from step {state.step} of an earlier run of {steps} steps in {path.parent}"
                        )
                        return state
        return None

    def save(self, state: State) -> None:
        """Writes a state whole or not at all; keeps the last two and the last one before the cool-down.

        Raises:
            ValueError: it cannot be written.
        """
        partial = self.folder / f"{state.step:09d}.partial"
        write_arrays(partial, state.arrays, {"history": json.dumps(state.history)})
        # The content's hash is in the name: no state is taken for whole that was changed since.
        path = self.folder / f"{state.step:09d}-{file_sha256(partial)[:16]}.safetensors"
        os.replace(partial, path)
        self._keep(
            [path, *(other for other in _states(self.folder) if _step(other) != state.step)][:KEPT_STATES]
        )

    def finish(self) -> None:
        """Marks the work as handed on and removes finished work of the same stage; keeps the newest state of this one."""
        write_text(self.folder / FINISHED, self.work.stage)
        self._keep(_states(self.folder)[:1])
        with self._root_lock:
            for other in self.folder.parent.iterdir():
                if other != self.folder and _finished_stage(other) in (
                    self.work.stage,
                    "",
                ):  # "": of an older version
                    _remove_if_free(other)

    def _keep(self, kept: list[Path]) -> None:
        """Removes all other states but the one of the last step before the cool-down."""
        steps = {_step(path) for path in kept}
        for path in _states(self.folder):
            if path not in kept and (_step(path) in steps or _step(path) != self.work.trunk_steps):
                path.unlink()

    def _read(self, path: Path) -> State | None:
        if file_sha256(path)[:16] != path.stem.split("-")[1]:
            self._say(f"{path}: damaged resume state, passed over and removed")
            path.unlink()
            return None
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            return State(_step(path), arrays, json.loads(file.metadata()["history"]))

    def _of_earlier_runs(self) -> list[tuple[Path, int]]:
        """States of other runs that are states of this one as well, and how long those runs are; the newest state first."""
        found = []
        for path in self.folder.parent.glob(f"*/{WORK}"):
            other = json.loads(path.read_text(encoding="utf-8"))
            if other["trunk"] == self.work.trunk and path.parent != self.folder:
                common = min(other["trunk_steps"], self.work.trunk_steps)
                found += [(state, other["steps"]) for state in _states(path.parent) if _step(state) <= common]
        return sorted(found, key=lambda one: _step(one[0]), reverse=True)

    def _name_unfinished(self) -> None:
        size, root = 0, self.folder.parent
        for path in root.glob("*/*.safetensors"):
            with suppress(FileNotFoundError):  # a run of other settings may be replacing it right now
                if path.parent != self.folder and _finished_stage(path.parent) is None:
                    size += path.stat().st_size
        if size:
            self._say(
                f"unfinished work of other settings keeps {size >> 20} MiB in {root}; delete what you give up"
            )

    def _try_to_open(self) -> bool:
        """Takes the lock if it is free; under the root's lock, so that no folder is removed while it is being taken."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._root_lock:
                self.folder.mkdir(exist_ok=True)
                self._lock.acquire(timeout=0)
        except Timeout:
            return False
        except OSError as error:
            raise unwritable(self.folder, error.strerror) from None
        return True


def _states(folder: Path) -> list[Path]:
    """The files of a folder's states, the newest first."""
    found = [
        path for path in folder.glob("*") if re.fullmatch(r"\d{9,10}-[0-9a-f]{16}\.safetensors", path.name)
    ]
    return sorted(found, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.partition("-")[0])


def _finished_stage(folder: Path) -> str | None:
    """The stage of which a folder holds finished work; None where the work is not finished."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return (folder / FINISHED).read_text(encoding="utf-8")
    return None


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
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode("utf-8"))
    for path in files:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                digest.update(f"{file.name} {file_sha256(file)}\n".encode())
    return digest.hexdigest()[:32]


def sources(module: str) -> list[Path]:
    """The files of this repository whose code a stage runs: what it imports of stages/, and all of kernels/.

    Without UNTRACKED: the values that they hand on count as such.

    Args:
        module: a name within stages/, such as "pretrain".
    """
    found: dict[str, Path] = {}
    pending = [module]
    while pending:
        name = pending.pop()
        path = REPOSITORY / "stages" / f"{name}.py"
        if name in found or name in UNTRACKED or not path.is_file():
            continue
        found[name] = path
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "stages":
                pending += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stages."):
                pending.append((node.module or "").removeprefix("stages."))
    kernels = [path for path in (REPOSITORY / "kernels").rglob("*") if path.suffix in (".py", ".cu", ".cuh")]
    return [found[name] for name in sorted(found)] + sorted(kernels)
