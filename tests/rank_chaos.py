"""The crash test of several ranks: kills them at random moments; in the end their files must equal those of
an undisturbed run with the same number of ranks.

    python -m tests.rank_chaos [--kills 40] [--seed 1]

Pretraining runs on 2 and 3 CPU ranks, connected by sockets (python -m stages.ranks.launch) and by MPI
(mpiexec). At a random moment one of these is killed:

    rank    SIGKILL for one rank, as the system does when memory is short
    all     SIGKILL for launcher and ranks, as when a machine is reset
    launch  SIGKILL for the launcher only
    ctrl-c  SIGINT for the launcher

All processes must be gone within END_S. Then the same command goes on, until the run is done. Exit code 1 if a
process stays, or a file differs. POSIX only.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from shutil import rmtree

import psutil

from tests.chaos import alive, program, results, yes
from tests.scratch import BIN, Copy, heed_ctrl_c, make_copy

SETTINGS = """
train_bpe: {vocab_size: 300}
model: {layers: 3, heads: 3, kv_heads: 1, dim: 96, ffn: 192, context: 64, mtp_heads: 2}
pretrain: {steps: 80, micro_batch: 4, grad_accum_steps: 6, warmup_steps: 2, val_every: 10, sample_every: 30,
  checkpoint_every: 5}
runtime: {device: cpu, threads: 1}
"""
LAUNCHERS = {
    "sockets": [sys.executable, "-m", "stages.ranks.launch", "{ranks}", "pretrain"],
    "mpi": [str(BIN / "mpiexec"), "-n", "{ranks}", sys.executable, "-m", "stages.pretrain"],
}
WAYS = ("rank", "rank", "all", "launch", "ctrl-c")
KILLS_A_RUN = 4
END_S = 10.0
LONGEST_S = 300


class Run:
    """One way to start ranks in a copy of the repository."""

    def __init__(self, copy: Copy, launcher: str, ranks: int, log: Path) -> None:
        self.copy, self.log = copy, log
        self.command = [part.format(ranks=ranks) for part in LAUNCHERS[launcher]]

    def start(self) -> "subprocess.Popen[bytes]":
        """Starts the ranks."""
        with self.log.open("wb") as log:
            return subprocess.Popen(
                self.command, cwd=self.copy.root, env=self.copy.environment, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def steps(self) -> int:
        """The newest step that was shown."""
        steps = re.findall(r"^step ([\d,]+)/", self.log.read_text(errors="replace"), re.MULTILINE)
        return int(steps[-1].replace(",", "")) if steps else 0

    def clear(self) -> None:
        """Removes what pretraining has made."""
        for name in ("data/pretrain", ".nanoeuler"):
            rmtree(self.copy.root / name, ignore_errors=True)


def processes(of: psutil.Process) -> list[psutil.Process]:
    """The ranks below a launcher."""
    with suppress(psutil.NoSuchProcess):
        return [
            child
            for child in of.children(recursive=True)
            if "stages.pretrain" in " ".join(child.cmdline()) and "mpiexec" not in child.name()
        ]
    return []


def strike(launcher: "subprocess.Popen[bytes]", way: str, rng: random.Random) -> float:
    """Kills in this way. Returns the seconds until no process was left."""
    parent = psutil.Process(launcher.pid)
    below = parent.children(recursive=True)
    ranks = [process for process in processes(parent) if alive(process)]
    begun = time.monotonic()
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        if way == "rank":
            rng.choice(ranks).kill()
        elif way == "ctrl-c":
            launcher.send_signal(signal.SIGINT)
        else:
            for process in (parent, *(below if way == "all" else [])):
                process.kill()
    while time.monotonic() - begun < END_S:
        launcher.poll()
        if not any(alive(process) for process in (*below, parent)):
            break
        time.sleep(0.01)
    return time.monotonic() - begun


def disturbed(run: Run, kills: int, seconds: float, rng: random.Random) -> list[tuple[str, float]]:
    """Runs to the end with kills; the way of each, and how long the processes took to end."""
    done: list[tuple[str, float]] = []
    while len(done) < kills:
        launcher, moment = run.start(), time.monotonic() + rng.uniform(0.3, seconds)
        while launcher.poll() is None and time.monotonic() < moment:
            time.sleep(0.01)
        if launcher.poll() is not None:
            assert launcher.returncode == 0, run.log.read_text(errors="replace")
            return done
        way = rng.choice(WAYS)
        done.append((way, strike(launcher, way, rng)))
        if done[-1][1] >= END_S:
            return done
    code = run.start().wait(LONGEST_S)
    assert code == 0, run.log.read_text(errors="replace")
    return done


def chaos(scratch: Path, kills: int, seed: int, say: Callable[[str], None] = print) -> bool:
    """Kills ranks in a copy below `scratch` and reports; whether all held."""
    heed_ctrl_c()
    copy, rng = make_copy(scratch / "copy", SETTINGS, lines=2000), random.Random(seed)
    copy.environment |= {"PYTHONUNBUFFERED": "1", "NANOEULER_CACHE": str(scratch / "compiled")}
    for stage in ("download", "train_bpe", "shard"):
        copy.run(sys.executable, "-m", f"stages.{stage}")
    expected: dict[int, dict[str, str]] = {}
    seconds: dict[tuple[str, int], float] = {}
    for launcher, ranks in [("mpi", 2), ("mpi", 3), ("sockets", 2), ("sockets", 3)]:
        run = Run(copy, launcher, ranks, scratch / "log")
        for _ in range(2 if not seconds else 1):  # the first run compiles
            run.clear()
            begun = time.monotonic()
            assert run.start().wait(LONGEST_S) == 0, run.log.read_text()
        seconds[launcher, ranks] = time.monotonic() - begun
        found = results(copy.root)
        if expected.setdefault(ranks, found) != found:
            say(f"{ranks} ranks: {launcher} differs from mpi")
            return False
    say(f"undisturbed: {', '.join(f'{key[0]} {key[1]}: {s:.1f} s' for key, s in seconds.items())}")
    counts, ends, equal = Counter[str](), list[float](), list[bool]()
    while sum(counts.values()) < kills:
        (launcher, ranks), duration = rng.choice(list(seconds.items()))
        run = Run(copy, launcher, ranks, scratch / "log")
        run.clear()
        done = disturbed(run, min(KILLS_A_RUN, kills - sum(counts.values())), duration, rng)
        counts.update(way for way, _ in done)
        ends += [ended for _, ended in done]
        equal.append(results(copy.root) == expected[ranks])
        say(f"  {ranks} ranks, {launcher}: {[f'{way} {s:.1f} s' for way, s in done]} equal: {yes(equal[-1])}")
        if not equal[-1] or max(ends, default=0) >= END_S:
            break
    left = [p.pid for p in psutil.process_iter() if _of_copy(p, copy)]
    say(
        f"{dict(counts)}; all processes gone after {max(ends, default=0):.1f} s at most; left: {left or 'none'}"
    )
    say(f"byte-equal to the undisturbed run: {sum(equal)} of {len(equal)} runs, {sum(counts.values())} kills")
    return all(equal) and max(ends, default=0) < END_S and not left


def _of_copy(process: psutil.Process, copy: Copy) -> bool:
    with suppress(psutil.Error, OSError):
        return Path(process.cwd()) == copy.root and process.pid != os.getpid() and alive(process)
    return False


if __name__ == "__main__":
    program(chaos, __doc__ or "", kills=40)
