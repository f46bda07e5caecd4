"""What DVC and Hydra do with this repository, tried on a copy of it with a tiny run. Slow: `.ci/run` runs
these.

DVC is called as a user calls it who never activated the environment. The tests share one copy, in which the
pipeline has run once, and put back what they change.
"""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from shutil import rmtree

import pytest
import yaml

from tests.scratch import BIN, STAGES, TINY, Copy, heed_ctrl_c, make_copy, write

DVC = str(BIN / "dvc")

pytestmark = pytest.mark.slow

LONGER = "# @package _global_\npretrain: {steps: 5}\n"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """The copy, after `dvc repro` on tiny texts and a commit."""
    copied = make_copy(tmp_path_factory.mktemp("copy"), TINY)
    write(copied.root / "conf" / "experiment" / "longer.yaml", LONGER)
    copied.git("add", ".")
    copied.git("commit", "--quiet", "-m", "an experiment")
    assert stages_run(copied.dvc("repro")) == STAGES
    copied.git("add", ".")
    copied.git("commit", "--quiet", "-m", "run")
    return copied


@pytest.fixture
def repo(ran: Copy) -> Iterator[Copy]:
    """The copy, put back afterwards."""
    yield ran
    ran.git("checkout", "--quiet", "--", ".")
    ran.git("clean", "--quiet", "-fd")
    ran.dvc("checkout", "--quiet")


def stages_run(output: str) -> list[str]:
    """The stages whose command ran."""
    return [line.split("'")[1] for line in output.splitlines() if line.startswith("Running stage")]


def params(repo: Copy) -> dict[str, dict[str, object]]:
    """params.yaml as it is now."""
    return yaml.safe_load((repo.root / "params.yaml").read_text(encoding="utf-8"))


def changed(repo: Copy) -> set[str]:
    """The stages that `dvc status` does not find up to date by themselves."""
    return set(json.loads(repo.dvc("status", "--json")))


# A stage that writes something else each time, or reads what it writes, would run at every `dvc repro`.
def test_second_repro_does_nothing(repo: Copy) -> None:
    output = repo.dvc("repro")
    assert stages_run(output) == []
    assert "up to date" in output
    assert repo.git("status", "--porcelain") == ""


# Of the outputs git keeps what dvc.yaml marks `cache: false`, and nothing else: no weights, no data.
def test_git_keeps_metrics_and_curves_alone(repo: Copy) -> None:
    kept = {f"data/{stage}/curves/{name}.csv" for stage in ("pretrain", "sft") for name in ("train", "val")}
    assert set(repo.git("ls-files", "data").split()) == kept | {
        "data/eval/metrics.json",
        "data/eval/heads.csv",
    }


# An out that holds a time differs from run to run: after `git checkout .` the lock names one that is in no
# cache, and minutes of training run again.
def test_a_run_from_nothing_writes_the_same_lock(repo: Copy) -> None:
    for folder in ("data", ".dvc/cache", ".nanoeuler"):
        rmtree(repo.root / folder)
    assert stages_run(repo.dvc("repro")) == STAGES
    assert repo.git("status", "--porcelain") == ""


# A lock that is put back must cost seconds, also where DVC's run cache is gone: finished work of a stage is
# kept.
def test_a_lock_that_is_put_back_repeats_no_training(repo: Copy) -> None:
    repo.dvc("exp", "run", "-S", "sft.steps=2")
    repo.git("checkout", "--quiet", "dvc.lock", "params.yaml")
    assert stages_run(repo.dvc("repro")) == []
    rmtree(repo.root / ".dvc" / "cache" / "runs")
    (repo.root / "dvc.lock").unlink()
    output = repo.dvc("repro")
    assert "resumed at step 4 " in output and "step 1/4" not in output
    repo.git("checkout", "--quiet", ".")
    assert stages_run(repo.dvc("repro")) == []


# An SFT parameter that pretraining tracked would cost a pretraining; results that are not in the run cache
# cost it again.
def test_sft_parameter_reruns_sft_and_eval_and_goes_back_for_nothing(repo: Copy) -> None:
    assert stages_run(repo.dvc("exp", "run", "-S", "sft.steps=2")) == ["sft", "eval"]
    before = json.loads(repo.git("show", "HEAD:data/eval/metrics.json"))
    after = json.loads((repo.root / "data" / "eval" / "metrics.json").read_text(encoding="utf-8"))
    assert before["base"] == after["base"]
    assert before["chat"] != after["chat"]
    assert "sft_loss" in repo.dvc("metrics", "diff")
    assert params(repo)["sft"]["steps"] == 2
    assert stages_run(repo.dvc("exp", "run")) == []
    assert repo.git("status", "--porcelain") == ""


# `dvc exp run -S` composes conf/: a group is chosen, a value set, an experiment added, in any order; and a
# model of other parts trains. The experiment's five steps and the model's two layers show that none overwrote
# another.
def test_exp_run_composes_groups_values_and_experiments(repo: Copy) -> None:
    output = repo.dvc(
        "exp", "run", "-S", "model.layers=2", "-S", "model=gpt2_124m", "-S", "+experiment=longer"
    )
    assert stages_run(output) == ["pretrain", "sft", "eval"]
    model = params(repo)["model"]
    assert (model["layers"], model["norm"], model["tied_head"], model["dim"]) == (2, "layernorm", True, 16)
    assert params(repo)["pretrain"]["steps"] == 5
    assert "model.norm" in repo.dvc("params", "diff")


# A kernel that DVC does not see change would leave models of the old code; a note or a compiled file is no
# change.
def test_kernel_source_counts_and_notes_do_not(repo: Copy) -> None:
    write(repo.root / "kernels" / "NOTES.md", "a note\n")
    write(repo.root / "kernels" / "cpu" / "__pycache__" / "new.cpython-311.pyc", "x")
    assert changed(repo) == set()
    with open(repo.root / "kernels" / "cpu" / "matmul.py", "a", encoding="utf-8", newline="\n") as source:
        source.write("# changed\n")
    assert changed(repo) == {"pretrain", "sft", "eval"}


# What a display or a number of threads is set to changes no result, so it must repeat nothing.
def test_runtime_is_not_tracked(repo: Copy) -> None:
    assert stages_run(repo.dvc("exp", "run", "-S", "runtime.display=plain", "-S", "runtime.threads=1")) == []


# Workers of the queue run in a copy of what git tracks, without the shell that queued them: they need the
# interpreter and every file the stages read.
def test_sweep_in_the_queue(repo: Copy) -> None:
    repo.dvc("exp", "run", "--queue", "-S", "sft.lr=1e-4,2e-4")
    repo.dvc("queue", "start", "--jobs", "1")
    deadline = time.monotonic() + 300
    while any(word in repo.dvc("queue", "status") for word in ("Queued", "Running")):
        assert time.monotonic() < deadline, repo.dvc("queue", "status")
        time.sleep(1)
    status = repo.dvc("queue", "status")
    assert status.count("Success") == 2, status
    shown = list(csv.DictReader(repo.dvc("exp", "show", "--csv").splitlines()))
    assert {float(row["sft.lr"]) for row in shown if row["State"] == "Success"} == {1e-4, 2e-4}
    assert repo.git("status", "--porcelain") == ""


# A temporary copy has another current folder, while DVC_ROOT still names this one.
def test_exp_run_in_a_temporary_copy(repo: Copy) -> None:
    assert stages_run(repo.dvc("exp", "run", "--temp", "-S", "eval.max_tokens=3")) == ["eval"]
    assert repo.git("status", "--porcelain") == ""


def start(repo: Copy, *command: str) -> "subprocess.Popen[str]":
    """A command that goes on, the leader of its own process group, as in a terminal."""
    heed_ctrl_c()
    environment = {**repo.environment, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command, cwd=repo.root, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, encoding="utf-8", start_new_session=True,
    )  # fmt: skip


def read_until(process: "subprocess.Popen[str]", words: str) -> str:
    """A process's output up to the line that holds these words."""
    assert process.stdout
    lines: list[str] = []
    while not lines or words not in lines[-1]:
        lines.append(process.stdout.readline())
        assert lines[-1], "".join(lines)
    return "".join(lines)


def train_long(repo: Copy, seed: int) -> None:
    """Makes pretraining long enough to be interrupted, with a seed that no other test trained with."""
    never = [f"pretrain.{key}=1500" for key in ("steps", "val_every", "sample_every", "checkpoint_every")]
    repo.run(sys.executable, "-m", "stages.params", "--write", f"pretrain.seed={seed}", *never)


# DVC ignores Ctrl-C and records a stage that exits 0 as complete, half trained as it may be.
def test_ctrl_c_saves_and_leaves_the_stage_unfinished(repo: Copy) -> None:
    train_long(repo, seed=1)
    with start(repo, DVC, "repro") as first:
        read_until(first, "step 37/1,500")
        os.killpg(first.pid, signal.SIGINT)
        rest = first.communicate(timeout=60)[0]
    saved = int(rest.partition("interrupted: step ")[2].split()[0])
    assert 37 <= saved < 1500 and first.returncode != 0
    assert re.search(
        "failed to reproduce 'pretrain': .* exited with (130|-2)$", rest, re.MULTILINE
    )  # -2: the shell as well
    assert "pretrain" in changed(repo)
    again = repo.dvc("repro")
    assert f"resumed at step {saved} " in again and stages_run(again) == ["pretrain", "sft", "eval"]


# Two that train in one folder would mix their files. DVC refuses; a stage by hand, or one whose `dvc` was
# killed, waits. Of two that wait the first gives up: nothing waits for what it makes, and it would come
# between the later one and the next stage.
def test_a_second_run_is_refused_or_waits(repo: Copy) -> None:
    train_long(repo, seed=2)
    with start(repo, DVC, "repro") as first:
        read_until(first, "step 37/1,500")
        second = start(repo, DVC, "repro", "pretrain").communicate(timeout=60)
        assert "is busy, it is being blocked by" in second[0] and str(first.pid) in second[0]
        with start(repo, sys.executable, "-m", "stages.pretrain") as by_hand:
            read_until(by_hand, "pretrain: waiting for pretrain (process ")
            first.kill()
            first.wait()
            with start(
                repo, DVC, "repro"
            ) as anew:  # of the stage that goes on without its dvc, and of the one by hand
                read_until(anew, "pretrain: waiting for pretrain (process ")
                assert (
                    "was started while this one waited" in by_hand.communicate(timeout=60)[0]
                    and by_hand.returncode == 1
                )
                assert "resumed at step 1500 " in anew.communicate(timeout=60)[0] and anew.returncode == 0


# DVC writes these two in place. The README says what to do where a kill left half of one.
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("dvc.lock", "", "validation failed"),
        ("dvc.lock", "schema: '2.0'\nstages", "is invalid"),
        (".dvc/tmp/rwlock", '{"write": {', "Unable to read RWLock-file '.dvc/tmp/rwlock'"),
    ],
)
def test_half_written_by_dvc_is_named_and_can_be_deleted(
    repo: Copy, name: str, content: str, message: str
) -> None:
    (repo.root / name).write_text(content, encoding="utf-8")
    with start(repo, DVC, "repro") as refused:
        output = refused.communicate(timeout=60)[0]
    assert refused.returncode != 0 and message in output and name in output
    (repo.root / name).unlink()
    assert stages_run(repo.dvc("repro")) == []
    assert repo.git("status", "--porcelain") == ""


# Every curve that dvc.yaml promises has to be found in the files under the names it gives.
def test_plots_and_dag(repo: Copy) -> None:
    repo.dvc("plots", "show")
    page = (repo.root / "dvc_plots" / "index.html").read_text(encoding="utf-8")
    for title in ("nats per token", "bits per byte", "learning rate", "tokens per second"):
        assert title in page
    assert all(stage in repo.dvc("dag") for stage in STAGES)
    assert repo.git("status", "--porcelain") == ""


# A stage run by hand from another folder would read another params.yaml, and DVC would write one.
def test_stage_from_another_folder_is_one_line(repo: Copy) -> None:
    environment = {**repo.environment, "PYTHONPATH": str(repo.root)}
    command = [sys.executable, "-m", "stages.shard"]
    done = subprocess.run(
        command,
        cwd=repo.root / "conf",
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "run from the repository's root" in done.stderr
