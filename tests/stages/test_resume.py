"""Resume states: written atomically, never foreign or damaged, and kept as long as they are useful."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stages import resume as resume_module
from stages.fingerprint import REPOSITORY, fingerprint, sources
from stages.resume import ResumeFolder, RunIdentity, State

WORK = RunIdentity("pretrain", "shared_hash", steps=100, steps_before_cooldown=0)
OTHER = replace(WORK, shared_hash="another")
WSD = RunIdentity("pretrain", "wsd", steps=20, steps_before_cooldown=15)


def state(step: int) -> State:
    arrays: dict[str, np.ndarray] = {
        "parameters": np.full(7, step, np.float32),
        "step": np.array(step, np.int64),
    }
    return State(step, arrays, {"train": [[step, 0.1]], "samples": ["\u00fc"]})


def steps(folder: ResumeFolder) -> list[int]:
    """The steps of the states that are kept."""
    return sorted(int(path.name.partition("-")[0]) for path in folder.folder.glob("*.safetensors"))


def make(work: RunIdentity, root: Path, *saved: int, finish: bool = True) -> ResumeFolder:
    """The folder of a run that saved these steps."""
    with ResumeFolder(work, root, lambda line: None) as folder:
        for step in saved:
            folder.save(state(step))
        if finish:
            folder.finish()
    return folder


# Would catch rounded moments, a lost history, and a disk that fills with states.
def test_states_come_back_exactly_and_two_are_kept(tmp_path: Path) -> None:
    with ResumeFolder(WORK, tmp_path) as resume:
        assert resume.load() is None and resume.newest() is None
        for step in (5, 10, 15):
            resume.save(state(step))
        loaded = resume.load()
        assert loaded is not None and loaded.step == 15 and loaded.history == state(15).history
        for name, array in state(15).arrays.items():
            assert np.array_equal(loaded.arrays[name], array) and loaded.arrays[name].dtype == array.dtype
        assert steps(resume) == [10, 15]


# Would catch a step of ten digits that is not found, or sorted before one of nine.
def test_a_long_run_finds_its_newest_state(tmp_path: Path) -> None:
    with ResumeFolder(WORK, tmp_path) as resume:
        for step in (999_999_999, 2**31 - 1):
            resume.save(state(step))
        loaded = resume.load()
        assert loaded is not None and loaded.step == 2**31 - 1


# Would catch a step saved twice, with and without its validation, that pushes the state before it out.
@pytest.mark.parametrize("work", [WORK, replace(WSD, steps_before_cooldown=10)])
def test_a_step_saved_again_replaces_its_state(tmp_path: Path, work: RunIdentity) -> None:
    with ResumeFolder(work, tmp_path) as resume:
        for step in (5, 10):
            resume.save(state(step))
        resume.save(replace(state(10), history={"val": [10]}))
        loaded = resume.load()
        assert loaded is not None and loaded.history == {"val": [10]} and steps(resume) == [5, 10]


# Would catch training that resumes from a damaged state, or stops although an older one is valid.
@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_state_gives_way_to_the_one_before(tmp_path: Path, damage: str) -> None:
    lines: list[str] = []
    with ResumeFolder(WORK, tmp_path, lines.append) as resume:
        resume.save(state(5))
        resume.save(state(10))
        newest = resume.newest()
        assert newest is not None
        whole = newest.read_bytes()
        newest.write_bytes(
            {"cut": whole[:-3], "flip": bytes([*whole[:-1], whole[-1] ^ 1]), "empty": b""}[damage]
        )
        loaded = resume.load()
        assert loaded is not None and loaded.step == 5
        assert len(lines) == 2 and "damaged resume state" in lines[0] and newest.name in lines[0]


# Would catch a 'newest state' finder that trips over names it did not write.
def test_leftovers_of_a_kill_are_ignored_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / WORK.fingerprint
    folder.mkdir()
    for name in ("000000010.partial", "000000010.partial.partial", "notes", "10-abc.safetensors"):
        (folder / name).write_bytes(b"half")
    with ResumeFolder(WORK, tmp_path) as resume:
        assert resume.load() is None
        assert {path.name for path in folder.iterdir()} == {
            "lock",
            "notes",
            "10-abc.safetensors",
            "work.json",
        }


# Would catch work repeated after a kill before DVC's lock or after `git checkout .`: pretrain's gone as soon
# as sft runs, or as soon as a run of other settings merely starts. And a disk that fills, and an interrupted
# run thrown away.
def test_finished_work_stays_until_other_work_of_its_stage_is_finished(tmp_path: Path) -> None:
    own, interrupted = (
        make(WORK, tmp_path, 5, 7),
        make(replace(WORK, shared_hash="interrupted"), tmp_path, 3, finish=False),
    )
    assert (own.folder / "finished").read_text(encoding="utf-8") == "pretrain" and steps(own) == [7]
    make(replace(WORK, stage="sft"), tmp_path, 9)
    lines: list[str] = []
    with ResumeFolder(WORK, tmp_path, lines.append) as again:
        loaded = again.load()
        assert again.finished and loaded is not None and loaded.step == 7
    assert (
        len(lines) == 2
        and "unfinished runs with other settings use 0 MiB in" in lines[0]
        and "resumed at step 7" in lines[1]
    )
    with ResumeFolder(OTHER, tmp_path, lambda line: None) as other:
        assert own.folder.exists() and not other.finished
        other.save(state(8))
        other.finish()
    assert not own.folder.exists() and interrupted.folder.exists()
    assert sorted(path.parent.name for path in tmp_path.glob("*/finished")) == sorted(
        [other.folder.name, replace(WORK, stage="sft").fingerprint]
    )


# Would catch folders of a version before this one, marked without the stage's name, that nothing ever
# removes.
def test_finished_work_of_an_older_version_is_removed(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "finished").touch()
    make(WORK, tmp_path, 5)
    assert not (tmp_path / "old").exists()


# Would catch the state before the cool-down removed for newer ones or at the end, and further states kept.
def test_the_state_before_the_cool_down_is_kept(tmp_path: Path) -> None:
    with ResumeFolder(WSD, tmp_path) as resume:
        for step in (5, 10, 15, 17, 18, 19):
            resume.save(state(step))
        assert steps(resume) == [15, 18, 19]
        resume.save(state(20))
        resume.finish()
        assert steps(resume) == [15, 20]


# Would catch a longer run that repeats finished work, or resumes within the cool-down or from a foreign
# state. Also a shorter one that begins after its own cool-down.
@pytest.mark.parametrize(
    ("work", "saved", "expected"),
    [
        (replace(WSD, steps=50, steps_before_cooldown=40), (10, 15, 16, 20), 15),
        (replace(WSD, steps=50, steps_before_cooldown=40), (10, 12), 12),  # interrupted before its cool-down
        (replace(WSD, steps=20, steps_before_cooldown=12), (10, 15, 20), None),
        (replace(WSD, steps=12, steps_before_cooldown=12), (10, 12), 12),
        (replace(WSD, shared_hash="another"), (10, 15), None),
        (replace(WSD, stage="sft", shared_hash="another"), (10, 15), None),
        (
            replace(WSD, steps=50, steps_before_cooldown=0),
            (10, 15),
            None,
        ),  # the schedule depends on the length
    ],
)
def test_a_run_of_another_length_goes_on_from_the_newest_common_state(
    tmp_path: Path, work: RunIdentity, saved: tuple[int, ...], expected: int | None
) -> None:
    earlier = make(WSD, tmp_path, *saved, finish=False)
    lines: list[str] = []
    with ResumeFolder(work, tmp_path, lines.append) as resume:
        loaded = resume.load()
        assert (loaded.step if loaded else None) == expected
        assert (f"resumed at step {expected} of an earlier run of 20 steps" in lines[-1]) == (
            expected is not None
        )
        if loaded:  # its own states count first, from then on
            resume.save(state(loaded.step + 1))
            own = resume.load()
            assert own is not None and own.step == loaded.step + 1
    assert earlier.folder.exists()


# Would catch a damaged state of an earlier run that is used, and an earlier run that is removed before the
# longer one finishes.
def test_an_earlier_run_is_read_with_the_same_care(tmp_path: Path) -> None:
    earlier = make(WSD, tmp_path, 10, 15, 20)
    damaged = next(earlier.folder.glob("000000015-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with ResumeFolder(replace(WSD, steps=50, steps_before_cooldown=40), tmp_path) as longer:
        assert longer.load() is None and earlier.folder.exists()
        longer.save(state(50))
        longer.finish()
        assert not earlier.folder.exists()


# Would catch two runs that write the same states, and one that removes the states of a run still at work.
def test_a_second_run_waits_for_the_first_and_says_so(tmp_path: Path) -> None:
    lines: list[str] = []
    order: list[str] = []

    def second() -> None:
        with ResumeFolder(WORK, tmp_path, lines.append):
            order.append("second")

    with ResumeFolder(WORK, tmp_path) as resume:
        resume.finish()
        with ResumeFolder(OTHER, tmp_path) as other:
            other.finish()
            assert resume.folder.exists()  # finished, but still held
        thread = threading.Thread(target=second)
        thread.start()
        deadline = time.monotonic() + 10
        while not lines and time.monotonic() < deadline:
            time.sleep(0.01)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"] and len(lines) == 1 and "waiting for another process" in lines[0]


# Would catch a lock that outlives its process: after kill -9 the next run would wait for ever.
def test_a_killed_run_frees_its_lock(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from stages.resume import ResumeFolder, RunIdentity\n"
        "ResumeFolder(RunIdentity('pretrain', 'shared_hash', 100, 0), Path(sys.argv[1])).__enter__(); "
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=REPOSITORY, timeout=60, check=False)
    assert (tmp_path / WORK.fingerprint / "lock").exists()
    with ResumeFolder(WORK, tmp_path, lambda line: pytest.fail(line)):
        pass


# Would catch states left in the temporary copy of a queued experiment, which DVC deletes when it fails.
def test_resume_root_is_the_main_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVC_ROOT", os.sep + "main")
    assert resume_module.resume_root() == Path(os.sep) / "main" / ".nanoeuler" / "resume"
    monkeypatch.delenv("DVC_ROOT")
    assert resume_module.resume_root() == Path(".nanoeuler/resume")


# Would catch a run resumed with other data, other parameters, or files that swapped their contents; and one
# that is not resumed after a move to another folder.
def test_fingerprint_changes_with_all_it_covers(tmp_path: Path) -> None:
    def made(folder: str, content: str = "x", index: str = "{}", lr: float = 0.1) -> str:
        (tmp_path / folder / "shards").mkdir(parents=True)
        (tmp_path / folder / "shards" / "a.bin").write_text(content, encoding="utf-8")
        (tmp_path / folder / "shards" / "b.bin").write_text(index, encoding="utf-8")
        return fingerprint([tmp_path / folder / "shards"], {"lr": lr, "device": "cpu"})

    first = made("1")
    assert made("2") == first
    assert len({first, made("3", content="y"), made("4", lr=0.2), made("5", content="{}", index="x")}) == 4


# Would catch a hash of contents only, which confuses files that differ in their names.
def test_fingerprint_holds_names(tmp_path: Path) -> None:
    found = set()
    for folder, names in (("1", ("a", "b")), ("2", ("b", "c"))):
        (tmp_path / folder).mkdir()
        for name, content in zip(names, ("x", "y"), strict=True):
            (tmp_path / folder / name).write_text(content, encoding="utf-8")
        found.add(fingerprint([tmp_path / folder], {}))
    assert len(found) == 2


# Would catch a run of another length, or another stage, that takes this one's states for its own.
def test_work_has_its_own_fingerprint() -> None:
    others = [
        replace(WSD, steps=21),
        replace(WSD, steps_before_cooldown=14),
        replace(WSD, stage="sft"),
        replace(WSD, shared_hash="x"),
    ]
    assert len({work.fingerprint for work in [WSD, *others]}) == 5
    assert json.loads(json.dumps(WSD.fingerprint)) == WSD.fingerprint and len(WSD.fingerprint) == 32


# Would catch a changed module that does not change the fingerprint, and a foreign one that does.
def test_sources_are_what_the_stage_imports() -> None:
    names = {path.relative_to(REPOSITORY).as_posix() for path in sources("training")}
    modules = ("training", "updates", "interrupt", "resume", "checkpoint", "metrics")
    assert {*(f"stages/{name}.py" for name in modules), "kernels/engine.py"} <= names
    of_pretrain = {path.relative_to(REPOSITORY).as_posix() for path in sources("pretrain")}
    assert {"stages/tokenizer/encode.py", "stages/tokenizer/__init__.py"} <= of_pretrain
    assert not any(name.startswith("stages/ranks/") for name in of_pretrain)
    assert (
        not {"stages/settings.py", "stages/training_settings.py", "stages/corpus.py", "stages/eval.py"}
        & names
    )
