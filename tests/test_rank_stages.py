"""The stages pretrain, sft and eval on several ranks, in a copy of the repository, as a user starts them."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree, rmtree

import numpy as np
import pytest

from stages import checkpoint
from tests.scratch import BIN, Copy, make_copy

SETTINGS = """
train_bpe: {vocab_size: 300}
model: {layers: 2, heads: 2, kv_heads: 1, dim: 32, ffn: 48, context: 32, mtp_heads: 2}
pretrain: {steps: 12, micro_batch: 2, grad_accum_steps: 4, warmup_steps: 2, val_every: 6, sample_every: 6,
  checkpoint_every: 4, optimizer: muon}
sft: {steps: 6, micro_batch: 2, grad_accum_steps: 4, warmup_steps: 1, val_every: 3, sample_every: 3,
  checkpoint_every: 3}
eval: {max_tokens: 4, micro_batch: 4}
runtime: {device: cpu, threads: 1}
"""
TRAINED = ("pretrain", "sft")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A copy in which all stages ran on one rank; their results are in `one`."""
    made = make_copy(tmp_path_factory.mktemp("ranks") / "copy", SETTINGS, lines=600)
    for stage in ("download", "train_bpe", "shard", *TRAINED, "eval"):
        made.run(sys.executable, "-m", f"stages.{stage}")
    for stage in (*TRAINED, "eval"):
        copytree(made.root / "data" / stage, made.root / "one" / stage)
    return made


def mpi(copy: Copy, ranks: int, stage: str, *overrides: str) -> str:
    """Runs a stage under mpiexec; its output."""
    return copy.run(
        str(BIN / "mpiexec"), "-n", str(ranks), sys.executable, "-m", f"stages.{stage}", *overrides
    )


def curves(folder: Path, name: str) -> np.ndarray:
    """The numbers of a curve."""
    with (folder / "curves" / name).open() as file:
        return np.array([[float(cell) for cell in row] for row in list(csv.reader(file))[1:]])


# Data, masks, losses or validations that depend on the number of ranks: the curves would be others. The CSV
# files round to six digits; a gradient sums up in another order.
@pytest.mark.parametrize("ranks", [2, 4])
def test_curves_are_those_of_one_rank(copy: Copy, ranks: int) -> None:
    for stage in TRAINED:
        rmtree(copy.root / "data" / stage)
        rmtree(copy.root / ".nanoeuler", ignore_errors=True)
        said = mpi(copy, ranks, stage)
        assert f"{ranks} ranks, each with {4 // ranks} micro-batches an update" in said
        assert said.count(f"{stage}: done") == 1
        folder, one = copy.root / "data" / stage, copy.root / "one" / stage
        for name in ("train.csv", "val.csv"):
            np.testing.assert_allclose(curves(folder, name), curves(one, name), rtol=2e-3)
        if stage == "pretrain":  # sft must start from the same weights
            rmtree(folder)
            copytree(one, folder)


# Batches that no rank scores, or two do; sums in the order in which ranks finish. The same weights have the
# same metrics, digit by digit.
def test_eval_is_that_of_one_rank(copy: Copy) -> None:
    for stage in TRAINED:
        rmtree(copy.root / "data" / stage)
        copytree(copy.root / "one" / stage, copy.root / "data" / stage)
    mpi(copy, 3, "eval")
    for name in ("metrics.json", "heads.csv", "report.md"):
        found, one = ((copy.root / folder / "eval" / name).read_bytes() for folder in ("data", "one"))
        assert found == one, name
    assert json.loads((copy.root / "data" / "eval" / "metrics.json").read_text())["device"] == "cpu"


# Two machines whose launchers a user starts by hand; a rank that waits for ever, or trains alone.
def test_two_launchers(copy: Copy) -> None:
    rmtree(copy.root / "data" / "pretrain", ignore_errors=True)
    rmtree(copy.root / ".nanoeuler", ignore_errors=True)
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000)}
    command = [sys.executable, "-m", "stages.pretrain"]
    ranks = [
        subprocess.Popen(
            command, cwd=copy.root, env={**copy.environment, **address, "RANK": str(rank), "LOCAL_RANK": "0"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in (1, 0)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert outputs[0] == "" and "pretrain: done" in outputs[1]
    sockets = checkpoint.load(copy.root / "data" / "pretrain" / "checkpoint").weights
    rmtree(copy.root / "data" / "pretrain")
    rmtree(copy.root / ".nanoeuler")
    mpi(copy, 2, "pretrain")
    by_mpi = checkpoint.load(copy.root / "data" / "pretrain" / "checkpoint").weights
    assert all(np.array_equal(sockets[name], by_mpi[name]) for name in by_mpi)


# A state that only its own number of ranks can read, or that is written by each; three ranks do not divide 4
# micro-batches, which a message must say with what does.
def test_resume_with_another_number_of_ranks(copy: Copy) -> None:
    rmtree(copy.root / "data" / "pretrain", ignore_errors=True)
    rmtree(copy.root / ".nanoeuler", ignore_errors=True)
    length = ("pretrain.grad_accum_steps=6", "pretrain.schedule=wsd", "pretrain.cooldown_steps=0")
    mpi(copy, 1, "pretrain", *length, "pretrain.steps=4")
    assert "resumed at step 4" in mpi(copy, 3, "pretrain", *length, "pretrain.steps=8")
    assert "resumed at step 8" in mpi(copy, 2, "pretrain", *length, "pretrain.steps=12")
    found = curves(copy.root / "data" / "pretrain", "train.csv")
    rmtree(copy.root / "data" / "pretrain")
    rmtree(copy.root / ".nanoeuler")
    copy.run(sys.executable, "-m", "stages.pretrain", *length, "pretrain.steps=12")
    np.testing.assert_allclose(found, curves(copy.root / "data" / "pretrain", "train.csv"), rtol=2e-3)
    launch = (sys.executable, "-m", "stages.ranks.launch", "3", "pretrain")
    said = copy.fail(*launch)
    assert said.count("error:") == 1 and "expected a multiple of the 3 ranks, got 4" in said
    assert "pretrain.grad_accum_steps" in said


# An error of one rank that leaves the others waiting, is told by all, or by none.
def test_an_error_ends_all_ranks(copy: Copy) -> None:
    for command in (
        (sys.executable, "-m", "stages.ranks.launch", "2", "pretrain"),
        (str(BIN / "mpiexec"), "-n", "2", sys.executable, "-m", "stages.pretrain"),
    ):
        rmtree(copy.root / "data" / "pretrain", ignore_errors=True)
        rmtree(copy.root / ".nanoeuler", ignore_errors=True)
        said = copy.fail(*command, "pretrain.lr=1e30", "pretrain.grad_clip=0")
        assert said.count("error:") == 1 and "not finite" in said, said
