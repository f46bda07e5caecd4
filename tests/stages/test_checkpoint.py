"""Checkpoints and resume states: the same bytes, whole or not at all, and nothing foreign or damaged is ever used."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kernels.config import ModelConfig
from stages import checkpoint
from stages.checkpoint import ResumeFolder, State, fingerprint, sources

CONFIG = ModelConfig(vocab_size=300, layers=1, heads=2, kv_heads=1, dim=8, ffn=12, context=16)


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(3, 4)).astype(np.float32) for name in ("head", "embedding", "norm")}


def state(step: int) -> State:
    arrays: dict[str, np.ndarray] = {"parameters": np.full(7, step, np.float32), "step": np.array(step, np.int64)}
    return State(step, arrays, {"train": [[step, 0.1]], "samples": ["\u00fc"]})


def test_a_checkpoint_comes_back_whole(tmp_path: Path) -> None:
    """Would catch a parameter lost, renamed, cast or transposed on the way through the file."""
    checkpoint.save(tmp_path / "c", weights(), CONFIG, "abc")
    loaded = checkpoint.load(tmp_path / "c", "abc")
    assert loaded.config == CONFIG and loaded.tokenizer_sha256 == "abc"
    assert loaded.weights.keys() == weights().keys()
    for name, array in weights().items():
        assert np.array_equal(loaded.weights[name], array) and loaded.weights[name].dtype == np.float32


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    """Would catch a time, a path or the order of a dict in what DVC hashes."""
    checkpoint.save(tmp_path / "a", weights(), CONFIG, "abc")
    checkpoint.save(tmp_path / "b", dict(reversed(weights().items())), CONFIG, "abc")
    for name in (checkpoint.WEIGHTS, checkpoint.MODEL):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [checkpoint.MODEL, checkpoint.WEIGHTS]
    modes = {path.stat().st_mode for path in (tmp_path / "a").iterdir()}
    assert len(modes) == 1  # the weights can be read by whoever can read the description


def test_a_foreign_or_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    """Would catch a model that runs with half its weights, edited weights or another tokenizer's ids."""
    folder = tmp_path / "c"
    with pytest.raises(ValueError, match=r"c.model\.json: expected a file of a checkpoint.*make repro"):
        checkpoint.load(folder)
    checkpoint.save(folder, weights(), CONFIG, "abc")
    with pytest.raises(ValueError, match="trained with the tokenizer abc, but the tokenizer here is xyz"):
        checkpoint.load(folder, "xyz")
    whole = (folder / checkpoint.WEIGHTS).read_bytes()
    flipped = bytes([*whole[:-1], whole[-1] ^ 1])
    for damaged in (whole[:-10], flipped, b""):
        (folder / checkpoint.WEIGHTS).write_bytes(damaged)
        with pytest.raises(ValueError, match=r"weights\.safetensors: half written or edited"):
            checkpoint.load(folder)
    checkpoint.save(folder, weights(), CONFIG, "abc")
    model = (folder / checkpoint.MODEL).read_text(encoding="utf-8")
    for spoilt in (model.replace('"heads": 2', '"heads": 4'), model.replace('"abc"', "5"), model[:-3], "[]", "7", "{}"):
        assert spoilt != model
        (folder / checkpoint.MODEL).write_text(spoilt, encoding="utf-8")
        with pytest.raises(ValueError, match=r"model\.json: half written or edited \(.*\); run `make repro`"):
            checkpoint.load(folder)


def test_states_come_back_exactly_and_two_are_kept(tmp_path: Path) -> None:
    """Would catch moments rounded on the way, a record lost, and a disk that fills with states."""
    with ResumeFolder("f", tmp_path) as resume:
        assert resume.load() is None and resume.newest() is None
        for step in (5, 10, 15):
            resume.save(state(step))
        loaded = resume.load()
        assert loaded is not None and loaded.step == 15 and loaded.record == state(15).record
        for name, array in state(15).arrays.items():
            assert np.array_equal(loaded.arrays[name], array) and loaded.arrays[name].dtype == array.dtype
        assert len(list(resume.folder.glob("*.safetensors"))) == checkpoint.KEPT_STATES


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_state_gives_way_to_the_one_before(tmp_path: Path, damage: str) -> None:
    """Would catch training that goes on from a half-written or corrupted state or gives up while an older one is good."""
    lines: list[str] = []
    with ResumeFolder("f", tmp_path, lines.append) as resume:
        resume.save(state(5))
        resume.save(state(10))
        newest = resume.newest()
        assert newest is not None
        whole = newest.read_bytes()
        newest.write_bytes({"cut": whole[:-3], "flip": bytes([*whole[:-1], whole[-1] ^ 1]), "empty": b""}[damage])
        loaded = resume.load()
        assert loaded is not None and loaded.step == 5
        assert len(lines) == 1 and "damaged resume state" in lines[0] and newest.name in lines[0]


def test_leftovers_of_a_kill_are_ignored_and_removed(tmp_path: Path) -> None:
    """Would catch a 'newest state' finder that trips over names it did not write."""
    (tmp_path / "f").mkdir()
    for name in ("000000010.partial", "000000010.partial.partial", "notes", "10-abc.safetensors"):
        (tmp_path / "f" / name).write_bytes(b"half")
    with ResumeFolder("f", tmp_path) as resume:
        assert resume.load() is None
        assert {path.name for path in resume.folder.iterdir()} == {"lock", "notes", "10-abc.safetensors"}


def test_finished_work_stays_until_another_fingerprint_runs(tmp_path: Path) -> None:
    """Would catch work repeated after a kill before DVC's lock, a disk that fills, an interrupted run thrown away."""
    for name in ("finished", "interrupted"):
        with ResumeFolder(name, tmp_path) as resume:
            resume.save(state(5))
            if name == "finished":
                resume.finish()
    # "interrupted" was opened after "finished" was marked and has removed it; one's own stays.
    assert not (tmp_path / "finished").exists()
    with ResumeFolder("own", tmp_path) as resume:
        resume.save(state(7))
        resume.finish()
    with ResumeFolder("own", tmp_path) as resume:
        loaded = resume.load()
        assert loaded is not None and loaded.step == 7
    lines: list[str] = []
    with ResumeFolder("other", tmp_path, lines.append):
        assert not (tmp_path / "own").exists() and (tmp_path / "interrupted").exists()
    assert len(lines) == 1 and "unfinished work of other settings keeps 0 MiB" in lines[0]


def test_a_second_run_waits_for_the_first_and_says_so(tmp_path: Path) -> None:
    """Would catch two runs that write the same states, and one that removes the states of a run still at work."""
    lines: list[str] = []
    order: list[str] = []

    def second() -> None:
        with ResumeFolder("f", tmp_path, lines.append):
            order.append("second")

    with ResumeFolder("f", tmp_path) as resume:
        resume.finish()
        with ResumeFolder("other", tmp_path):
            assert resume.folder.exists()  # finished, but still held
        thread = threading.Thread(target=second)
        thread.start()
        deadline = time.monotonic() + 10
        while not lines and time.monotonic() < deadline:
            time.sleep(0.01)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"] and len(lines) == 1 and "waiting for another run" in lines[0]


def test_a_killed_run_frees_its_lock(tmp_path: Path) -> None:
    """Would catch a lock that outlives its process: after kill -9 the next run would wait for ever."""
    code = (
        "import os, sys; from pathlib import Path; from stages.checkpoint import ResumeFolder\n"
        "ResumeFolder('f', Path(sys.argv[1])).__enter__(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=checkpoint.REPOSITORY, timeout=60, check=False)
    with ResumeFolder("f", tmp_path, lambda line: pytest.fail(line)):
        pass


def test_resume_root_is_the_main_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch states left in the temporary copy of a queued experiment, which DVC deletes when it fails."""
    monkeypatch.setenv("DVC_ROOT", os.sep + "main")
    assert checkpoint.resume_root() == Path(os.sep) / "main" / ".nanoeuler" / "resume"
    monkeypatch.delenv("DVC_ROOT")
    assert checkpoint.resume_root() == Path(".nanoeuler/resume")


def test_fingerprint_changes_with_all_it_covers(tmp_path: Path) -> None:
    """Would catch a run resumed with other data or parameters, or not resumed after a move to another folder."""

    def made(folder: str, content: str = "x", lr: float = 0.1) -> str:
        (tmp_path / folder / "shards").mkdir(parents=True)
        (tmp_path / folder / "shards" / "a.bin").write_text(content, encoding="utf-8")
        (tmp_path / folder / "index.json").write_text("{}", encoding="utf-8")
        return fingerprint([tmp_path / folder / "shards", tmp_path / folder / "index.json"], {"lr": lr, "device": "cpu"})

    first = made("1")
    assert made("2") == first
    assert len({first, made("3", content="y"), made("4", lr=0.2)}) == 3


def test_sources_are_what_the_stage_imports() -> None:
    """Would catch a changed module that does not change the fingerprint, and a foreign one that does."""
    names = {path.relative_to(checkpoint.REPOSITORY).as_posix() for path in sources("training")}
    assert {"stages/training.py", "stages/checkpoint.py", "stages/metrics.py", "kernels/engine.py"} <= names
    assert not {"stages/settings.py", "stages/corpus.py", "stages/eval.py"} & names
