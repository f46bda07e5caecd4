"""The crash test: kills the pipeline at random moments; in the end its files must equal those of an
undisturbed run.

    python -m tests.chaos [--kills 100] [--seed 1]

A copy of the repository with small texts and settings first runs undisturbed, twice: once with cold caches,
once to measure the duration of each stage. Then `dvc repro` is started, killed at a random moment of a chosen
stage, and started again, up to a dozen times. Then it runs to its end, and every file in data/ is compared.
This repeats from an empty data/ until all kills are done. The kinds of kills:

    stage   SIGKILL for the process of the stage only, as the system does when memory is short
    dvc     SIGKILL for `dvc` only; the stage continues, and the stage of the next `dvc repro` must wait for
    it
    group   SIGKILL for dvc, the stage and their children, as when a machine is reset
    ctrl-c  SIGINT for all of them

Training repeats the steps after its last checkpoint. Counted are the steps that the killed process had
finished or begun, minus the step at which the next process resumes. Exit code 1 if a file differs or more
than one interval is repeated. POSIX only.
"""

import argparse
import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from shutil import rmtree

import psutil

from stages.trained_stages import TRAINED_STAGES
from tests.scratch import BIN, STAGES, Copy, heed_ctrl_c, make_copy

INTERVAL = 5  # steps between two checkpoints
SETTINGS = """
train_bpe: {vocab_size: 300}
model: {layers: 3, heads: 3, kv_heads: 1, dim: 96, ffn: 192, context: 64, mtp_heads: 2}
eval: {max_tokens: 8, micro_batch: 8}
""" + "".join(
    f"{stage.name}: {{steps: 60, micro_batch: 32, warmup_steps: 2, val_every: 10, sample_every: 30, "
    f"checkpoint_every: {INTERVAL}}}\n"
    for stage in TRAINED_STAGES
)
WAYS = ("stage", "dvc", "group", "ctrl-c")
TRAINED = [stage.name for stage in TRAINED_STAGES]
TARGETS = (*STAGES, *TRAINED, *TRAINED)  # most kills hit training
KILLS_A_RUN = 12
LONGEST_S = 600  # timeout of every wait

# Messages of DVC after a kill, and the file to delete then, as the README says.
REPAIRS = {
    "Unable to read RWLock-file": ".dvc/tmp/rwlock",
    "is busy, it is being blocked by": ".dvc/tmp/rwlock",
    "dvc.lock' is invalid": "dvc.lock",
    "dvc.lock' validation failed": "dvc.lock",
    # A stage that outlived its `dvc` wrote to a folder that DVC read or emptied. Nothing to delete: the next
    # run succeeds.
    "Directory not empty": "",
    "No such file or directory": "",
}


@dataclass(frozen=True)
class Kill:
    """One kill, planned or done; `training`: at least one step was done, and one was left."""

    stage: str
    way: str
    training: bool = False


@dataclass(frozen=True)
class Session:
    """The steps that one process trained: `begin` is where it resumed, `end` is the last step that it
    began.
    """

    begin: int
    end: int


@dataclass
class Pipeline:
    """The copy in which DVC runs, and the log of each `dvc repro`.

    Args:
        copy: made with SETTINGS.
        scratch: folder for logs, beside the copy.
    """

    copy: Copy
    scratch: Path
    logs: list[Path] = field(default_factory=list)
    orphans: list[psutil.Process] = field(default_factory=list)
    repairs: Counter[str] = field(default_factory=Counter)
    started: int = 0

    def start(self) -> "subprocess.Popen[bytes]":
        """Starts `dvc repro` as the leader of its own process group."""
        self.started += 1
        self.logs.append(self.scratch / f"{self.started:03}.log")
        command = [str(BIN / "dvc"), "repro"]
        with self.logs[-1].open("wb") as log:
            return subprocess.Popen(
                command, cwd=self.copy.root, env=self.copy.environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def text(self) -> str:
        """What the newest `dvc repro` has printed so far."""
        return self.logs[-1].read_text(encoding="utf-8", errors="replace")

    def earlier(self) -> list[str]:
        """What the ones before it in this run have printed."""
        return [log.read_text(encoding="utf-8", errors="replace") for log in self.logs[:-1]]

    def stage(self) -> str | None:
        """The stage that it runs; None before the first."""
        found = re.findall(r"^Running stage '(\w+)'", self.text(), re.MULTILINE)
        return found[-1] if found else None

    def finish(self) -> None:
        """Runs `dvc repro` to its end, with the repairs that it asks for, and waits for what outlived an
        earlier one.
        """
        while self.start().wait(LONGEST_S):
            self.repair()
        psutil.wait_procs(self.orphans, timeout=LONGEST_S)
        assert not [orphan for orphan in self.orphans if alive(orphan)], "a stage outlives the pipeline"
        self.orphans.clear()

    def repair(self) -> None:
        """After a `dvc repro` that failed by itself: follows the README, or fails."""
        text = self.text()
        known = [words for words in REPAIRS if words in text]
        assert known and self.repairs[known[0]] < 10, (
            f"dvc repro failed by itself, see {self.logs[-1]}\n{text[-2000:]}"
        )
        assert REPAIRS[known[0]] or self.orphans, (
            f"without a stage that outlived its dvc, see {self.logs[-1]}\n{text[-2000:]}"
        )
        self.repairs[known[0]] += 1
        if REPAIRS[known[0]]:
            (self.copy.root / REPAIRS[known[0]]).unlink()

    def clear(self) -> None:
        """Removes all that runs have made, but for what is compiled."""
        for name in ("data", ".nanoeuler", ".dvc/cache", ".dvc/tmp"):
            rmtree(self.copy.root / name, ignore_errors=True)
        (self.copy.root / "dvc.lock").unlink(missing_ok=True)
        self.logs.clear()


def alive(process: psutil.Process) -> bool:
    """Whether it runs; one that only waits to be collected by its parent doesn't."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def stage_processes(dvc: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """The processes below dvc that run a stage; the shell between them is none."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(dvc.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if any(part.startswith("stages.") for part in process.cmdline()) and alive(process):
                    found.append(process)
    return found


def strike(pipeline: Pipeline, dvc: "subprocess.Popen[bytes]", way: str) -> bool:
    """Kills in this way and waits until dvc is gone; False if no stage is running."""
    stages = stage_processes(dvc)
    if way == "stage":
        if not stages:
            return False
        for process in stages:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    elif way == "dvc":
        pipeline.orphans += stages
        dvc.kill()
    else:
        with suppress(ProcessLookupError):
            os.killpg(dvc.pid, signal.SIGKILL if way == "group" else signal.SIGINT)
    dvc.wait(LONGEST_S)
    return True


def disturb(
    pipeline: Pipeline, planned: Kill, lengths_s: dict[str, float], rng: random.Random
) -> Kill | None:
    """Runs `dvc repro` and kills it while the planned stage runs, or a later one if the planned one is done.

    Returns:
        What was killed; None where the pipeline came to its end first.
    """
    dvc, moment = pipeline.start(), float("inf")
    while dvc.poll() is None:
        stage = pipeline.stage()
        if stage and moment == float("inf") and STAGES.index(stage) >= STAGES.index(planned.stage):
            # A resumed stage ends sooner; a later moment would mostly fall into the next stage.
            resumed = any(f"Running stage '{stage}'" in earlier for earlier in pipeline.earlier())
            moment = time.monotonic() + rng.uniform(0, lengths_s[stage] * (0.5 if resumed else 1))
        if time.monotonic() >= moment and strike(pipeline, dvc, planned.way):
            return Kill(pipeline.stage() or planned.stage, planned.way, training=is_training(pipeline.text()))
        time.sleep(0.005)
    if dvc.returncode:
        pipeline.repair()
        return disturb(pipeline, planned, lengths_s, rng)
    return None


def is_training(text: str) -> bool:
    """Whether the last stage of a log is between its first step and its last."""
    steps = re.findall(r"^step ([\d,]+)/([\d,]+) ", text.rpartition("Running stage")[2], re.MULTILINE)
    return bool(steps) and steps[-1][0] != steps[-1][1]


def sessions(logs: Sequence[str], stage: str) -> list[Session]:
    """What each process of a stage trained, in the order in which they did."""
    found = []
    for text in logs:
        part = text.partition(f"Running stage '{stage}'")[2].partition("Running stage")[0]
        resumed = re.search(r"^resumed at step (\d+)", part, re.MULTILINE)
        steps = re.findall(r"^step ([\d,]+)/([\d,]+) ", part, re.MULTILINE)
        if not resumed and not steps:
            continue
        begin = int(resumed[1]) if resumed else 0
        last = int(steps[-1][0].replace(",", "")) if steps else begin
        whole = (
            "interrupted: step" in part
            or f"{stage}: done" in part
            or (steps and steps[-1][0] == steps[-1][1])
        )
        found.append(Session(begin, last if whole else last + 1))  # a killed process had begun one more step
    return sorted(found, key=lambda session: (session.begin, session.end))


def repeated(logs: Sequence[str]) -> list[int]:
    """The steps that were done twice, for each time training went on."""
    each = [sessions(logs, stage) for stage in TRAINED]
    return [max(0, one.end - two.begin) for found in each for one, two in pairwise(found)]


def results(root: Path) -> dict[str, str]:
    """SHA-256 of every file that the pipeline made, but for the speed, which is no out."""
    found = {}
    for path in sorted((root / "data").rglob("*")):
        if path.is_file() and path.name not in ("speed.csv", ".gitignore"):
            found[path.relative_to(root).as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def stage_lengths(pipeline: Pipeline) -> dict[str, float]:
    """Seconds from each stage's first line to the next stage's, DVC's own work on its outputs included."""
    begun: dict[str, float] = {}
    dvc = pipeline.start()
    while dvc.poll() is None:
        if (stage := pipeline.stage()) and stage not in begun:
            begun[stage] = time.monotonic()
        time.sleep(0.005)
    assert dvc.returncode == 0 and list(begun) == STAGES, pipeline.text()
    ends = [*list(begun.values())[1:], time.monotonic()]
    return {stage: end - begin for (stage, begin), end in zip(begun.items(), ends, strict=True)}


def table(kills: Sequence[Kill]) -> str:
    """Kills by stage and way."""
    counts = Counter((kill.stage, kill.way) for kill in kills)
    lines = [" " * 12 + "".join(f"{way:>8}" for way in (*WAYS, "all"))]
    for stage in (*STAGES, "all"):
        of_stage = [
            sum(n for (one, w), n in counts.items() if w == way and stage in (one, "all")) for way in WAYS
        ]
        lines.append(f"{stage:<12}" + "".join(f"{n:>8}" for n in (*of_stage, sum(of_stage))))
    return "\n".join(lines)


def chaos(scratch: Path, kills: int, seed: int, say: Callable[[str], None] = print) -> bool:
    """Kills the pipeline `kills` times in a copy below `scratch` and reports; whether all held."""
    heed_ctrl_c()
    copy = make_copy(scratch / "copy", SETTINGS, lines=2000, talks=600)
    own = {"NANOEULER_CACHE": scratch / "compiled", "DVC_SITE_CACHE_DIR": scratch / "dvc"}
    copy.environment |= {"PYTHONUNBUFFERED": "1", **{name: str(path) for name, path in own.items()}}
    pipeline, rng = Pipeline(copy, scratch), random.Random(seed)
    pipeline.finish()
    reference = results(copy.root)
    pipeline.clear()
    lengths_s = stage_lengths(pipeline)
    same = [results(copy.root) == reference]
    say(
        f"undisturbed: {sum(lengths_s.values()):.0f} s, {len(reference)} files, a second run equal: "
        f"{yes(same[0])}"
    )

    pending = [
        Kill(TARGETS[i % len(TARGETS)], WAYS[(i + i // len(TARGETS)) % len(WAYS)]) for i in range(kills)
    ]
    rng.shuffle(pending)
    done: list[Kill] = []
    repeats: list[int] = []
    while pending:
        pipeline.clear()
        of_run = sorted(pending[:KILLS_A_RUN], key=lambda kill: STAGES.index(kill.stage))
        del pending[:KILLS_A_RUN]
        while of_run and (killed := disturb(pipeline, of_run[0], lengths_s, rng)):
            done.append(killed)
            of_run.pop(0)
            say(
                f"  {pipeline.logs[-1].name}: {killed.way} in "
                f"{killed.stage}{', training' if killed.training else ''}"
            )
        pending += of_run  # the pipeline came to its end before them
        pipeline.finish()
        made, again = results(copy.root), repeated([*pipeline.earlier(), pipeline.text()])
        repeats += again
        same.append(made == reference)
        differing = sorted(
            name for name in made.keys() | reference.keys() if made.get(name) != reference.get(name)
        )
        say(
            f"{len(done)} of {kills} kills; equal: {yes(same[-1])} {' '.join(differing)}; repeated steps: "
            f"{again}"
        )
        if not same[-1]:
            break
    largest, training = max(repeats, default=0), sum(kill.training for kill in done)
    say(f"\n{table(done)}\n")
    say(f"kills while a training step was under way: {training}; times that training went on: {len(repeats)}")
    say(f"steps repeated: largest {largest}, sum {sum(repeats)}; a checkpoint every {INTERVAL}")
    say(f"times that DVC refused and was started again, as its words ask: {dict(pipeline.repairs) or 'none'}")
    say(f"byte-equal to the undisturbed run: {sum(same[1:])} of {len(same) - 1} runs, {len(done)} kills")
    return all(same) and largest <= INTERVAL


def yes(holds: bool) -> str:
    """The word for it."""
    return "yes" if holds else "NO"


def program(test: Callable[[Path, int, int, Callable[[str], None]], bool], doc: str, kills: int) -> None:
    """Runs a crash test in a temporary folder, which is kept after a failure.

    Args:
        test: (scratch, kills, seed, say), as chaos.
        doc: of its module.
        kills: how many by default.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--kills", type=int, default=kills)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="chaos-"))
    begun = time.monotonic()
    held = test(scratch, chosen.kills, chosen.seed, lambda line: print(line, flush=True))
    print(f"{time.monotonic() - begun:.0f} s, seed {chosen.seed}")
    if not held:
        print(f"error: see above; logs and results of the last run are in {scratch}", file=sys.stderr)
        raise SystemExit(1)
    rmtree(scratch)


if __name__ == "__main__":
    program(chaos, __doc__ or "", kills=100)
