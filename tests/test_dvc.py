"""What DVC and Hydra do with this repository, tried on a copy of it with a tiny run. Slow: `.ci/run` runs these.

DVC is called as a user calls it who never activated the environment. The tests share one copy, in which the pipeline has run
once, and put back what they change.
"""

import csv
import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from shutil import copy

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
STAGES = ["download", "train_bpe", "shard", "pretrain", "sft", "eval"]

pytestmark = pytest.mark.slow

# Put at the end of conf/config.yaml, where it wins over the groups, as a default that the tests' overrides still win over.
TINY = """
train_bpe: {vocab_size: 300}
model: {layers: 1, heads: 2, kv_heads: 1, dim: 16, ffn: 16, context: 32, mtp_heads: 2}
pretrain: {steps: 4, micro_batch: 2, warmup_steps: 1, val_every: 2, sample_every: 4, checkpoint_every: 2}
sft: {steps: 3, micro_batch: 2, warmup_steps: 1, val_every: 3, sample_every: 3, checkpoint_every: 3}
eval: {max_tokens: 4, micro_batch: 4}
"""
LONGER = "# @package _global_\npretrain: {steps: 5}\n"


class Copy:
    """A copy of the repository in its own git repository."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # .venv's interpreter finds its own `python` without activation (see the Makefile); another one is given it.
        unactivated = Path(sysconfig.get_path("purelib"), "nanoeuler_path.pth").exists()
        path = os.defpath if unactivated else f"{BIN}{os.pathsep}{os.defpath}"
        kept = {name: os.environ[name] for name in ("HOME", "SYSTEMROOT", "NANOEULER_CACHE") if name in os.environ}
        self.environment = {**kept, "PATH": path, "DVC_NO_ANALYTICS": "1"}

    def run(self, *command: str) -> str:
        """The output of a command that succeeds."""
        done = subprocess.run(command, cwd=self.root, env=self.environment, capture_output=True, text=True, encoding="utf-8")
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout

    def dvc(self, *arguments: str) -> str:
        """The output of a dvc command that succeeds."""
        return self.run(str(BIN / "dvc"), *arguments)

    def git(self, *arguments: str) -> str:
        """The output of a git command that succeeds."""
        return self.run("git", *arguments)

    def params(self) -> dict[str, dict[str, object]]:
        """params.yaml as it is now."""
        return yaml.safe_load((self.root / "params.yaml").read_text(encoding="utf-8"))

    def changed(self) -> set[str]:
        """The stages that `dvc status` does not find up to date by themselves."""
        return set(json.loads(self.dvc("status", "--json")))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """The copy, after `dvc repro` on tiny texts and a commit."""
    root = tmp_path_factory.mktemp("copy")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file() and not name.startswith(("tests/", "data/", "dvc.lock")):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            copy(ROOT / name, root / name)
    lines = [f"Line {number}: the quick brown fox says {number * number} to the lazy dog.\n" for number in range(300)]
    write(root / "texts" / "fox.txt", "".join(lines))
    talk = [{"prompt": f"Say {number}.", "completion": f"{number}!"} for number in range(200)]
    write(root / "conversations" / "talk.jsonl", "".join(json.dumps(row) + "\n" for row in talk))
    defaults = (root / "conf" / "config.yaml").read_text(encoding="utf-8")
    write(root / "conf" / "config.yaml", defaults.replace(": shakespeare", ": local") + TINY)
    write(root / "conf" / "experiment" / "longer.yaml", LONGER)
    copied = Copy(root)
    copied.run(sys.executable, "-m", "stages.params", "--write")
    copied.git("init", "--quiet")
    copied.git("config", "user.name", "test")
    copied.git("config", "user.email", "test@example.org")
    copied.git("add", ".")
    copied.git("commit", "--quiet", "-m", "tiny")
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


def write(path: Path, text: str) -> None:
    """Writes a text file, and the folders that lead to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")


def stages_run(output: str) -> list[str]:
    """The stages whose command ran."""
    return [line.split("'")[1] for line in output.splitlines() if line.startswith("Running stage")]


# A stage that writes something else each time, or reads what it writes, would run at every `dvc repro`.
def test_second_repro_does_nothing(repo: Copy) -> None:
    output = repo.dvc("repro")
    assert stages_run(output) == []
    assert "up to date" in output
    assert repo.git("status", "--porcelain") == ""


# Of the outputs git keeps what dvc.yaml marks `cache: false`, and nothing else: no weights, no data.
def test_git_keeps_metrics_and_curves_alone(repo: Copy) -> None:
    kept = {f"data/{stage}/curves/{name}.csv" for stage in ("pretrain", "sft") for name in ("train", "val")}
    assert set(repo.git("ls-files", "data").split()) == kept | {"data/eval/metrics.json", "data/eval/heads.csv"}


# An SFT parameter that pretraining tracked would cost a pretraining; results that are not in the run cache cost it again.
def test_sft_parameter_reruns_sft_and_eval_and_goes_back_for_nothing(repo: Copy) -> None:
    assert stages_run(repo.dvc("exp", "run", "-S", "sft.steps=2")) == ["sft", "eval"]
    before = json.loads(repo.git("show", "HEAD:data/eval/metrics.json"))
    after = json.loads((repo.root / "data" / "eval" / "metrics.json").read_text(encoding="utf-8"))
    assert before["base"] == after["base"]
    assert before["chat"] != after["chat"]
    assert "sft_loss" in repo.dvc("metrics", "diff")
    assert repo.params()["sft"]["steps"] == 2
    assert stages_run(repo.dvc("exp", "run")) == []
    assert repo.git("status", "--porcelain") == ""


# `dvc exp run -S` composes conf/: a group is chosen, a value set, an experiment added, in any order; and a model of other
# parts trains. The experiment's five steps and the model's two layers show that none overwrote another.
def test_exp_run_composes_groups_values_and_experiments(repo: Copy) -> None:
    output = repo.dvc("exp", "run", "-S", "model.layers=2", "-S", "model=gpt2_124m", "-S", "+experiment=longer")
    assert stages_run(output) == ["pretrain", "sft", "eval"]
    model = repo.params()["model"]
    assert (model["layers"], model["norm"], model["tied_head"], model["dim"]) == (2, "layernorm", True, 16)
    assert repo.params()["pretrain"]["steps"] == 5
    assert "model.norm" in repo.dvc("params", "diff")


# A kernel that DVC does not see change would leave models of the old code; a note or a compiled file is no change.
def test_kernel_source_counts_and_notes_do_not(repo: Copy) -> None:
    write(repo.root / "kernels" / "NOTES.md", "a note\n")
    write(repo.root / "kernels" / "cpu" / "__pycache__" / "new.cpython-311.pyc", "x")
    assert repo.changed() == set()
    with open(repo.root / "kernels" / "cpu" / "matmul.py", "a", encoding="utf-8", newline="\n") as source:
        source.write("# changed\n")
    assert repo.changed() == {"pretrain", "sft", "eval"}


# What a display or a number of threads is set to changes no result, so it must repeat nothing.
def test_runtime_is_not_tracked(repo: Copy) -> None:
    assert stages_run(repo.dvc("exp", "run", "-S", "runtime.display=plain", "-S", "runtime.threads=1")) == []


# Workers of the queue run in a copy of what git tracks, without the shell that queued them: they need the interpreter and
# every file the stages read.
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


# Every curve that dvc.yaml promises has to be found in the files under the names it gives.
def test_plots_and_dag(repo: Copy) -> None:
    repo.dvc("plots", "show")
    page = (repo.root / "dvc_plots" / "index.html").read_text(encoding="utf-8")
    for title in ("nats a token", "bits a byte", "learning rate", "tokens a second"):
        assert title in page
    assert all(stage in repo.dvc("dag") for stage in STAGES)
    assert repo.git("status", "--porcelain") == ""


# A stage run by hand from another folder would read another params.yaml, and DVC would write one.
def test_stage_from_another_folder_is_one_line(repo: Copy) -> None:
    environment = {**repo.environment, "PYTHONPATH": str(repo.root)}
    command = [sys.executable, "-m", "stages.shard"]
    done = subprocess.run(
        command, cwd=repo.root / "conf", env=environment, capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "run from the repository's root" in done.stderr
