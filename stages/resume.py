"""Resume states: a killed run continues from the newest one, and a longer run from that of a shorter one.

A state is one file with everything that training still needs. DVC deletes the outputs of a stage when the
stage starts. So states are kept elsewhere, in .nanoeuler/resume/<fingerprint>/ of the main checkout. The
fingerprint is a hash of everything that decides the bits of the run but the number of ranks, and only an
exact match resumes. With another number of ranks a run continues, but rounds differently.

Exception: with schedule wsd the learning rate before the cool-down does not depend on the length of the run.
So runs that differ only in steps and cooldown_steps can share states from before the cool-down. They have the
same `shared_hash`.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from safetensors import safe_open

from stages.checkpoint import write_arrays
from stages.fingerprint import fingerprint
from stages.text_files import file_sha256, unwritable, write_text

KEPT_STATES = 2  # the newest, and one more in case the newest is damaged
IDENTITY, FINISHED = "work.json", "finished"


@dataclass(frozen=True)
class RunIdentity:
    """The identity of a run.

    Args:
        stage: name of the stage.
        shared_hash: a hash of everything that decides the bits of the run, except its length and its
            cool-down.
        steps: length of the run.
        steps_before_cooldown: steps before the cool-down; 0 if the schedule depends on the length of the run.
    """

    stage: str
    shared_hash: str
    steps: int
    steps_before_cooldown: int

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides the bits of the run, but the number of ranks."""
        return fingerprint([], asdict(self))


@dataclass(frozen=True)
class State:
    """Everything that a run needs to continue as if it had never stopped.

    Args:
        step: finished updates.
        arrays: from Engine.state(): parameters, moments, FP8 scales if any, and the step count.
        history: from TrainingHistory.to_dict(): the curves so far.
    """

    step: int
    arrays: dict[str, np.ndarray]
    history: dict[str, Any]


class ResumeFolder:
    """The resume states of one run, locked while open. Opening waits for another process, and prints a line.

    A finished run stays until another run of the same stage finishes. So nothing is repeated after a kill
    before DVC writes dvc.lock, or after an older dvc.lock is checked out. Unfinished runs stay.

    Args:
        identity: this run.
        root: contains the folders of all runs.
        say: prints a line for the user.
    """

    def __init__(self, identity: RunIdentity, root: Path, say: Callable[[str], None] = print) -> None:
        self.identity, self.folder = identity, root / identity.fingerprint
        self._say = say
        self._lock, self._root_lock = FileLock(self.folder / "lock"), FileLock(root / "lock")

    def __enter__(self) -> "ResumeFolder":
        waiting = False
        while not self._try_to_open():
            if not waiting:
                self._say(
                    f"waiting for another process with the same run, which holds {self.folder}; Ctrl-C gives "
                    "up"
                )
                waiting = True
            time.sleep(0.5)
        for leftover in self.folder.glob("*.partial"):
            leftover.unlink()
        write_text(self.folder / IDENTITY, json.dumps(asdict(self.identity)))
        self._report_unfinished()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.release()

    @property
    def finished(self) -> bool:
        """Whether this run has finished before."""
        return (self.folder / FINISHED).exists()

    def newest(self) -> Path | None:
        """The file of the newest state; its content is not checked."""
        return next(iter(_states(self.folder)), None)

    def load(self) -> State | None:
        """The newest valid state of this run, else of a run that this one can continue, else None.

        A damaged state is reported and removed.
        """
        for path in _states(self.folder):
            if state := self._read(path):
                self._say(f"resumed at step {state.step} from {self.folder}")
                return state
        with self._root_lock:  # the holder of this lock alone removes folders
            for path, steps in self._of_earlier_runs():
                with suppress(FileNotFoundError):  # the other run is training and has replaced this state
                    if state := self._read(path):
                        self._say(
                            f"resumed at step {state.step} of an earlier run of {steps} steps in "
                            f"{path.parent}"
                        )
                        return state
        return None

    def save(self, state: State) -> None:
        """Writes a state atomically; keeps the last two and the last one before the cool-down.

        Raises:
            ValueError: the state cannot be written.
        """
        partial = self.folder / f"{state.step:09d}.partial"
        write_arrays(partial, state.arrays, {"history": json.dumps(state.history)})
        # The name contains the hash of the content, so that a damaged state is detected.
        path = self.folder / f"{state.step:09d}-{file_sha256(partial)[:16]}.safetensors"
        os.replace(partial, path)
        self._keep(
            [path, *(other for other in _states(self.folder) if _step(other) != state.step)][:KEPT_STATES]
        )

    def finish(self) -> None:
        """Marks this run as finished, keeps its newest state, and removes other finished runs of the
        stage.
        """
        write_text(self.folder / FINISHED, self.identity.stage)
        self._keep(_states(self.folder)[:1])
        with self._root_lock:
            for other in self.folder.parent.iterdir():
                if other != self.folder and _finished_stage(other) in (
                    self.identity.stage,
                    "",
                ):  # "": written by an older version
                    _remove_if_free(other)

    def _keep(self, kept: list[Path]) -> None:
        """Removes all other states, except the one of the last step before the cool-down."""
        steps = {_step(path) for path in kept}
        for path in _states(self.folder):
            if path not in kept and (
                _step(path) in steps or _step(path) != self.identity.steps_before_cooldown
            ):
                path.unlink()

    def _read(self, path: Path) -> State | None:
        if file_sha256(path)[:16] != path.stem.split("-")[1]:
            self._say(f"{path}: damaged resume state, skipped and removed")
            path.unlink()
            return None
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            return State(_step(path), arrays, json.loads(file.metadata()["history"]))

    def _of_earlier_runs(self) -> list[tuple[Path, int]]:
        """States of other runs that are also states of this one, with their runs' lengths; newest first."""
        found = []
        for path in self.folder.parent.glob(f"*/{IDENTITY}"):
            other = json.loads(path.read_text(encoding="utf-8"))
            if other.get("shared_hash") == self.identity.shared_hash and path.parent != self.folder:
                common = min(other["steps_before_cooldown"], self.identity.steps_before_cooldown)
                found += [(state, other["steps"]) for state in _states(path.parent) if _step(state) <= common]
        return sorted(found, key=lambda one: _step(one[0]), reverse=True)

    def _report_unfinished(self) -> None:
        size, root = 0, self.folder.parent
        for path in root.glob("*/*.safetensors"):
            if path.parent != self.folder and _finished_stage(path.parent) is None:
                with suppress(FileNotFoundError):  # a run with other settings may be replacing it right now
                    size += path.stat().st_size
        if size:
            self._say(
                f"unfinished runs with other settings use {size >> 20} MiB in {root}; delete unneeded ones"
            )

    def _try_to_open(self) -> bool:
        """Acquires the lock if it is free. The lock of the root prevents that the folder is removed
        meanwhile.
        """
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
    """The state files in a folder, the newest first."""
    found = [
        path for path in folder.glob("*") if re.fullmatch(r"\d{9,10}-[0-9a-f]{16}\.safetensors", path.name)
    ]
    return sorted(found, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.partition("-")[0])


def _finished_stage(folder: Path) -> str | None:
    """The stage of a finished run in a folder; None if the run is not finished."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return (folder / FINISHED).read_text(encoding="utf-8")
    return None


def _remove_if_free(folder: Path) -> None:
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return
    lock.release()  # before the removal: Windows cannot remove an open file
    shutil.rmtree(folder, ignore_errors=True)


def resume_root() -> Path:
    """The folder of resume states: in the main checkout, even if DVC runs the stage in a temporary copy of
    it.
    """
    return Path(os.environ.get("DVC_ROOT", ".")) / ".nanoeuler" / "resume"
