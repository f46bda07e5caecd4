"""How a stage or command runs as a program: its command line, its errors and exit codes, one stage at a time in a checkout."""

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from io import TextIOWrapper
from pathlib import Path
from types import FrameType

from filelock import FileLock, Timeout

from stages.preflight import objections
from stages.settings import Settings, load
from stages.text_files import write_text, writing

JUST_S = 2.0  # within which an error after Ctrl-C is taken for its result
USAGE = "[key=value ...]  for example pretrain.steps=200 model=gpt2_124m +experiment=smoke; keys and values: conf/"


def stage_main(name: str, run: Callable[[Settings], None]) -> None:
    """A stage's main(): the command line -> settings -> what later stages would refuse -> run, alone in this checkout."""

    def stage(argv: list[str]) -> None:
        settings = load(argv)
        with nullcontext() if settings.runtime.plan else stage_lock(name):  # a plan writes nothing
            if not settings.runtime.plan:
                look_ahead(name, settings)
            run(settings)

    if {"-h", "--help"} & set(sys.argv[1:]):
        print(f"python -m stages.{name} {USAGE}")
    else:
        command_main(stage)


def look_ahead(name: str, settings: Settings) -> None:
    """Ends a run of DVC's that a later stage would end; of a stage run by hand, which may be all there is, says so in lines.

    Raises:
        ValueError: the first objection, under DVC.
    """
    for objection in objections(name, settings):
        if "DVC_STAGE" in os.environ:
            raise ValueError(objection)
        print(f"note: `dvc repro` would refuse this: {objection}", file=sys.stderr)


@contextmanager
def stage_lock(name: str) -> Iterator[None]:
    """Waits, with a line, while another stage runs in this checkout: one may read what another is about to replace.

    DVC's own locks know nothing of stages run by hand, nor of one that goes on after `dvc` alone was killed. The system frees
    this lock when its process ends, however it ends.

    Raises:
        ValueError: another stage was started while this one waited. Of several that wait only the last may run: the `dvc` of an
            earlier one may be gone, and what it would write replace what was made since.
    """
    folder, own = Path(".nanoeuler"), f"{name} (process {os.getpid()})"
    lock, running, last = FileLock(folder / "running.lock"), folder / "running", folder / "started"
    with writing(folder):
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
                    f"{name}: {later} was started while this one waited; start this one again if need be"
                ) from None
    try:
        write_text(running, own)
        yield
    finally:
        lock.release()


def command_main(run: Callable[[list[str]], None]) -> None:
    """Runs a program on its arguments; what its user can repair is one line on stderr, not a traceback.

    Exit code 1 after an error, 130 after Ctrl-C (DVC takes 0 for success, whatever happened before).
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")  # Windows' consoles have another default
    heard_at = -math.inf

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal heard_at
        heard_at = time.monotonic()
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before != signal.SIG_IGN:  # which a shell sets for jobs in the background
        signal.signal(signal.SIGINT, interrupt)
    try:
        run(sys.argv[1:])
    except BrokenPipeError:  # who read has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is written at the end
        raise SystemExit(1) from None
    except (Exception, KeyboardInterrupt) as error:
        # Some libraries turn a KeyboardInterrupt into an error of their own. An error long after is another one.
        if isinstance(error, KeyboardInterrupt) or time.monotonic() - heard_at < JUST_S:
            print("interrupted", file=sys.stderr)
            raise SystemExit(130) from None
        if not isinstance(error, ValueError | OSError):
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        signal.signal(signal.SIGINT, before)
