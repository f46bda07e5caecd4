"""Stages and commands as programs: command line, error messages, exit codes, and one stage at a time per
checkout.
"""

import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from io import TextIOWrapper
from pathlib import Path
from types import FrameType

from filelock import FileLock, Timeout

from kernels.ranks import ALONE, Link
from stages.preflight import objections
from stages.ranks.join import is_rank, open_link
from stages.ranks.launch import end_with_launcher, launch
from stages.settings import Settings, load
from stages.text_files import wrap_write_errors, write_text

INTERRUPT_EFFECT_S = 2.0  # seconds after Ctrl-C in which an error counts as its effect
USAGE = (
    "[key=value ...]  for example pretrain.steps=200 model=gpt2_124m +experiment=smoke; "
    "keys and values: conf/"
)


def stage_main(name: str, run: Callable[[Settings], None]) -> None:
    """The main() of a stage: command line -> settings -> look-ahead -> run, one stage at a time per
    checkout.
    """

    def stage(settings: Settings, argv: list[str]) -> None:
        with _exclusive_stage(name, settings):
            run(settings)

    _main(name, stage)


def ranked_stage_main(
    name: str, run: Callable[[Settings, Link], None], gpus: Callable[[Settings], int]
) -> None:
    """As stage_main, for a stage that several ranks run together.

    Args:
        name: of the stage.
        run: runs as one rank.
        gpus: the number of ranks that this machine starts, unless a launcher has started this process as one
            of several.
    """

    def stage(settings: Settings, argv: list[str]) -> None:
        if is_rank():
            _run_as_rank(name, settings, run)
        elif not settings.runtime.plan and (count := gpus(settings)) > 1:
            if code := launch(f"stages.{name}", argv, count):
                raise SystemExit(code)
        else:
            with _exclusive_stage(name, settings):
                run(settings, ALONE)

    _main(name, stage)


def _run_as_rank(name: str, settings: Settings, run: Callable[[Settings, Link], None]) -> None:
    """Runs the stage in a process that a launcher has started. An error ends all ranks."""
    end_with_launcher()
    link = open_link()
    try:
        with nullcontext() if link.rank else _exclusive_stage(name, settings):
            run(settings, link)
    except Exception as error:
        if not isinstance(error, ValueError | OSError):
            traceback.print_exc()
        link.fail(" ".join(str(error).split()))
        raise SystemExit(1) from None
    except SystemExit:  # Ctrl-C: all ranks have stopped together
        link.close()
        raise
    link.close()


def _main(name: str, stage: Callable[[Settings, list[str]], None]) -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(f"python -m stages.{name} {USAGE}")
    else:
        command_main(lambda argv: stage(load(argv), argv))


@contextmanager
def _exclusive_stage(name: str, settings: Settings) -> Iterator[None]:
    """One stage at a time, with a look ahead. The memory plan writes nothing and needs neither."""
    with nullcontext() if settings.runtime.plan else stage_lock(name):
        if not settings.runtime.plan:
            look_ahead(name, settings)
        yield


def look_ahead(name: str, settings: Settings) -> None:
    """Stops a DVC run in which a later stage would fail. A stage run by hand prints notes and continues.

    Raises:
        ValueError: the first objection, if DVC runs this stage.
    """
    for objection in objections(name, settings):
        if "DVC_STAGE" in os.environ:
            raise ValueError(objection)
        print(f"note: `dvc repro` would stop here: {objection}", file=sys.stderr)


@contextmanager
def stage_lock(name: str) -> Iterator[None]:
    """A lock that lets one stage at a time run in this checkout; otherwise a stage could read files that
    another replaces.

    While another stage runs, this one prints a line and waits. DVC has its own locks, but they do not cover a
    stage run by hand, or a stage whose `dvc` was killed. The system releases this lock when the process ends,
    even after SIGKILL.

    Raises:
        ValueError: another stage was started while this one waited. Of several waiting stages only the last
            may run: the `dvc` of an earlier one may be gone, and its outputs would replace newer ones.
    """
    folder, own = Path(".nanoeuler"), f"{name} (process {os.getpid()})"
    lock, running, last = FileLock(folder / "running.lock"), folder / "running", folder / "started"
    with wrap_write_errors(folder):
        folder.mkdir(exist_ok=True)
        last.write_text(own, encoding="utf-8", newline="\n")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            other = running.read_text(encoding="utf-8") if running.is_file() else "another stage"
            print(f"{name}: waiting for {other}, which runs in this checkout; Ctrl-C gives up", flush=True)
            lock.acquire()
            later = last.read_text(encoding="utf-8")
            if later != own:
                lock.release()
                raise ValueError(
                    f"{name}: {later} was started while this one waited; start this one again if you still "
                    "need it"
                ) from None
    try:
        write_text(running, own)
        yield
    finally:
        lock.release()


def command_main(run: Callable[[list[str]], None]) -> None:
    """Runs a program on its arguments. An error that the user can fix is one line on standard error, not a
    traceback.

    The exit code is 1 after an error and 130 after Ctrl-C. (DVC takes 0 for success, whatever happened.)
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")  # consoles on Windows have another default
    heard_at = -math.inf

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal heard_at
        heard_at = time.monotonic()
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before != signal.SIG_IGN:  # shells set it for background jobs
        signal.signal(signal.SIGINT, interrupt)
    try:
        run(sys.argv[1:])
    except BrokenPipeError:  # the reader is gone, as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for output that is flushed at exit
        raise SystemExit(1) from None
    except (Exception, KeyboardInterrupt) as error:
        # Some libraries turn a KeyboardInterrupt into their own error. A much later error has another cause.
        if isinstance(error, KeyboardInterrupt) or time.monotonic() - heard_at < INTERRUPT_EFFECT_S:
            print("interrupted", file=sys.stderr)
            raise SystemExit(130) from None
        if not isinstance(error, ValueError | OSError):
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        signal.signal(signal.SIGINT, before)
