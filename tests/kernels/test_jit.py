"""Compiled functions and their cache."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
LOSS = """
import hashlib, sys, numpy as np
from kernels.cpu import CpuOps
rng = np.random.default_rng(0)
logits, nll = rng.normal(size=(64, 384)).astype(np.float32), np.empty(64, np.float32)
CpuOps().cross_entropy_backward(logits, nll, rng.integers(0, 300, 64, np.int32), np.ones(64, np.float32), vocab_size=300, softcap=0.0)
print(hashlib.sha256(logits.tobytes() + nll.tobytes()).hexdigest())
"""


# A run that was killed while the cache was still cold goes on with what is read from it: other bits there
# would make its model another one than the undisturbed run's.
@pytest.mark.slow
def test_what_is_just_compiled_gives_the_bits_of_what_is_read_from_the_cache(tmp_path: Path) -> None:
    environment = {**os.environ, "NANOEULER_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", LOSS]
    runs = [
        subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert len(list(tmp_path.rglob("*._backward-*.nbc"))) == 1  # the second run had something to read
    assert runs[0].stdout == runs[1].stdout


# A traceback from the middle of an import, which names neither the folder nor the variable that moves it.
def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    environment = {**os.environ, "NANOEULER_CACHE": str(tmp_path / "file")}
    done = subprocess.run(
        [sys.executable, "-c", "import kernels.cpu"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path / 'file'}") and "set NANOEULER_CACHE" in done.stderr
    assert len(done.stderr.splitlines()) == 1


FULL = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
import numpy as np
from stages.tokenizer.encode import rank_table
print(len(rank_table(np.zeros((3, 3), np.int32))))
"""


# A disk that is full where compiled loops are kept ended the run in the middle of a step, with a traceback.
def test_a_cache_that_fills_up(tmp_path: Path) -> None:
    pytest.importorskip("resource")
    environment = {**os.environ, "NANOEULER_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", FULL], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 16
    assert done.stderr.startswith(f"note: {tmp_path} cannot store compiled code: File too large; ")
    assert "NANOEULER_CACHE" in done.stderr and done.stderr.count("\n") == 1
