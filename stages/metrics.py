"""Display, curves, samples, speed and provenance of a training run.

Curves and samples are the same bytes for the same run. Speed and provenance contain times and machines, so
DVC tracks neither.
"""

import io
import json
import os
import platform
import statistics
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stages.text_files import write_text

TRAIN_COLUMNS = ("step", "loss", "total_loss", "lr", "grad_norm")
VAL_COLUMNS = ("step", "val_loss", "val_bpb")
SPEED_COLUMNS = ("step", "tokens_per_s")
# of the training curve, without the first and the newest step: enough for any plot, small enough for Git
MAX_ROWS = 1000
PLAIN_LINES = 40  # progress lines over a whole run, if there is no terminal
LIBRARIES = ("numpy", "numba", "llvmlite", "cupy-cuda13x", "cupy-cuda12x")  # those that compute results


Rows = list[Sequence[float]]


def add_row(rows: Rows, row: Sequence[float]) -> None:
    """Appends the row of a step to a curve and thins the curve. A row begins with its step; steps ascend.

    A curve holds the first step, the newest step, and every multiple of `every`: the smallest power of two
    that keeps them within MAX_ROWS. So the rows depend only on the steps done, not on the length of the run.
    """
    step = int(row[0])
    every, before = _every(step), _every(step - 1)
    if every != before:
        rows[:] = [old for old in rows if old[0] == 1 or old[0] % every == 0]
    elif rows and rows[-1][0] % every:
        rows.pop()
    rows.append(row)


def _every(step: int) -> int:
    every = 1
    while step // every > MAX_ROWS:
        every *= 2
    return every


@dataclass
class TrainingHistory:
    """The results of a run so far. The resume state contains it, so the curves of a resumed run are complete.

    The first three do not depend on how often the run was stopped. The others describe its sessions.

    Args:
        train: rows of TRAIN_COLUMNS.
        val: rows of VAL_COLUMNS.
        samples: (step, text) of each sample.
        speed: rows of SPEED_COLUMNS.
        seconds: of training, validation and sampling, over all sessions.
        resumed_at: the step of each resume.
    """

    train: Rows = field(default_factory=list)
    val: Rows = field(default_factory=list)
    samples: list[tuple[int, str]] = field(default_factory=list)
    speed: Rows = field(default_factory=list)
    seconds: float = 0.0
    resumed_at: list[int] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The history as plain values for JSON; TrainingHistory(**values) restores it."""
        return asdict(self)

    def write_curves(self, folder: Path) -> None:
        """Writes train.csv and val.csv, each atomically."""
        write_csv(folder / "train.csv", TRAIN_COLUMNS, self.train)
        write_csv(folder / "val.csv", VAL_COLUMNS, self.val)

    def write_speed(self, path: Path) -> None:
        """Writes the speed of the steps in the training curve."""
        write_csv(path, SPEED_COLUMNS, self.speed)

    def write_samples(self, path: Path) -> None:
        """Writes every sample, with its step as a headline."""
        write_text(path, "".join(f"=== step {step}\n{text}\n\n" for step, text in self.samples))


@dataclass(frozen=True)
class Progress:
    """The state of a run after a step.

    Losses are in nats. `left_s` estimates the remaining seconds; None after the first step of a session.
    `val_bpb` is None before the first validation.
    """

    step: int
    steps: int
    loss: float
    total_loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    left_s: float | None
    val_bpb: float | None

    def cells(self) -> list[tuple[str, str]]:
        """(label, value) of each figure, in display order."""
        bpb = [] if self.val_bpb is None else [("val bits/byte", f"{self.val_bpb:.4f}")]
        left = [] if self.left_s is None else [("left", duration(self.left_s))]
        return [
            ("step", f"{self.step:,}/{self.steps:,}"),
            ("loss", f"{self.loss:.4f}"),
            ("lr", f"{self.lr:.2e}"),
            ("grad norm", f"{self.grad_norm:.3f}"),
            *bpb,
            ("tokens/s", f"{self.tokens_per_s:,.0f}"),
            *left,
        ]


class Display(AbstractContextManager["Display"], Protocol):
    """Shows the progress of a run."""

    def update(self, progress: Progress) -> None:
        """Shows a finished step."""

    def say(self, text: str) -> None:
        """Shows lines of text that stay visible."""


class PlainDisplay:
    """Lines of text: about PLAIN_LINES over a run, including the first and last step."""

    def __enter__(self) -> "PlainDisplay":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, progress: Progress) -> None:
        """Prints every n-th step."""
        every = max(1, progress.steps // PLAIN_LINES)
        if progress.step in (1, progress.steps) or progress.step % every == 0:
            self.say("  ".join(f"{label} {value}" for label, value in progress.cells()))

    def say(self, text: str) -> None:
        """Prints the text."""
        print(text, flush=True)


class NoDisplay(PlainDisplay):
    """Shows nothing: of several ranks one speaks."""

    def update(self, progress: Progress) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""


class LiveDisplay:
    """A progress bar and a row of figures at the bottom of the terminal; lines scroll above them.

    Args:
        title: name of the stage.
        console: where to draw.
    """

    def __init__(self, title: str, console: Console) -> None:
        self._title = title
        self._progress: Progress | None = None
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=4)

    def __enter__(self) -> "LiveDisplay":
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def update(self, progress: Progress) -> None:
        """Keeps the step; it is drawn four times per second, independent of the speed of the steps."""
        self._progress = progress

    def say(self, text: str) -> None:
        """Prints the text above the figures."""
        self._live.console.print(text, markup=False, highlight=False)

    def _draw(self) -> Group:
        if self._progress is None:
            return Group(Text(f"{self._title}: waiting for the first step"))
        figures = Table.grid(padding=(0, 3))
        cells = self._progress.cells()
        figures.add_row(*(Text(label, style="dim") for label, _ in cells))
        figures.add_row(*(Text(value) for _, value in cells))
        bar = Table.grid(expand=True)  # the grid ends the line, which the bar does not
        bar.add_row(ProgressBar(total=self._progress.steps, completed=self._progress.step))
        return Group(Text(self._title, style="bold"), bar, figures)


def open_display(kind: str, title: str) -> Display:
    """The display that runtime.display names; auto is live in a terminal, else plain. "none" is for ranks but
    the first.
    """
    if kind == "none":
        return NoDisplay()
    if kind == "live" or (kind == "auto" and sys.stdout.isatty()):
        return LiveDisplay(title, Console(force_terminal=True if kind == "live" else None))
    return PlainDisplay()


class Speed:
    """Speed of the steps: the median of the last 50, which single slow steps (the first one compiles) do not
    change.
    """

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=50)
        self._steps, self._step_s = 0, 0.0

    def add(self, step_s: float) -> float:
        """Adds a step of step_s seconds, without validation and sampling; returns the median in seconds."""
        self._last.append(step_s)
        self._steps, self._step_s = self._steps + 1, self._step_s + step_s
        return statistics.median(self._last)

    def left_s(self, steps: int, here_s: float) -> float | None:
        """Estimated remaining seconds of `steps` more steps, including average per-step overhead (validation,
        sampling, saving).

        here_s is the duration of this session so far, in seconds. None after its first step, which compiles.
        """
        return (
            None
            if self._steps == 1
            else steps * (statistics.median(self._last) + (here_s - self._step_s) / self._steps)
        )


def duration(seconds: float) -> str:
    """A duration for display: 45s, 3m 05s, 2h 07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    return (
        f"{whole // 60}m {whole % 60:02}s" if whole < 3600 else f"{whole // 3600}h {whole % 3600 // 60:02}m"
    )


def write_csv(path: Path, columns: Iterable[str], rows: Iterable[Sequence[float | str]]) -> None:
    """Writes a CSV file atomically; floats have 6 significant digits."""
    text = io.StringIO()
    for row in [tuple(columns), *rows]:
        text.write(",".join(f"{cell:.6g}" if isinstance(cell, float) else str(cell) for cell in row) + "\n")
    write_text(path, text.getvalue())


def versions() -> dict[str, str]:
    """The versions of Python and of the installed libraries that compute."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def now() -> str:
    """The current time for provenance, in UTC to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_provenance(path: Path, **facts: object) -> None:
    """Writes the provenance of a result: `facts`, library versions and machine."""
    machine = {"platform": platform.platform(), "cores": os.cpu_count()}
    write_text(
        path, json.dumps({**facts, "versions": versions(), "machine": machine}, indent=2, default=str) + "\n"
    )
