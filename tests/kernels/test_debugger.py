"""A whole training step without compilation, as it is walked through in a debugger.

    NUMBA_DISABLE_JIT=1 python -m tests.kernels.test_debugger out.npz

writes what the test compares, in half a second. The compiled side compiles every loop in two precisions where
none is in the cache yet, a minute or more, whatever the model's size; the tests after it find them there.
"""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kernels.batch import Batch, head_weight_sums
from kernels.config import Numerics
from kernels.engine import Engine
from kernels.optimizers import AdamW
from tests.compare import Arrays, assert_calibrated
from tests.gradient_check import MODELS, MTP_WEIGHTS

ROOT = Path(__file__).resolve().parents[2]
DTYPES: dict[str, Any] = {"float32": np.float32, "float64": np.float64}
# Small, since every element of every loop is a line of Python: two tokens more than a tile of attention.
SMALL: dict[str, Any] = {"layers": 1, "context": 6, "dim": 12, "ffn": 6, "vocab_size": 9}


def train(name: str, dtype: str) -> Arrays:
    """Gradients of a micro-step, parameters after the update, and an evaluation."""
    heads = {"euler": (2, 1), "gpt2": (3, 3)}[name]
    config = dataclasses.replace(MODELS[name], **SMALL, heads=heads[0], kv_heads=heads[1])
    engine = Engine(
        config, Numerics(), micro_batch=2, threads=1, dtype=DTYPES[dtype], optimizer=AdamW(eps=1.0)
    )
    rng = np.random.default_rng(0)
    ids = rng.integers(9, size=(2, 7), dtype=np.int32)
    document = np.array([[0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1]], np.int32)
    weight = np.ones((2, 6), np.float32)
    batch = Batch(ids[:, :-1].copy(), ids[:, 1:].copy(), document, weight)
    scale = np.array(MTP_WEIGHTS[: config.mtp_heads]) / head_weight_sums(batch, config.mtp_heads)
    engine.micro_step(batch, scale)
    result = {f"gradient {key}": gradient for key, gradient in engine.gradients().items()}
    # Without Adam's division by the gradient's own size, which would make much of a rounding: eps of 1.
    update = engine.update(0.1)
    result |= {
        "norm": np.array(update.grad_norm),
        "nll_sums": update.nll_sums,
        "nll": engine.evaluate(batch).nll,
    }
    return result | {key: np.array(engine.parameter(key)) for key in engine.weights()}


def everything() -> dict[str, Arrays]:
    """train by architecture and precision."""
    return {f"{name} {dtype}": train(name, dtype) for name in ("euler", "gpt2") for dtype in DTYPES}


# A loop that means one thing to Numba and another to Python: a debugger would show a different program.
def test_interpreted_step_is_the_compiled_one(tmp_path: Path) -> None:
    path = tmp_path / "interpreted.npz"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    subprocess.run(
        [sys.executable, "-m", "tests.kernels.test_debugger", str(path)],
        cwd=ROOT,
        env=environment,
        check=True,
    )
    with np.load(path) as archive:
        interpreted = {key: archive[key] for key in archive.files}
    compiled = everything()
    for name in ("euler", "gpt2"):
        single, double = compiled[f"{name} float32"], compiled[f"{name} float64"]
        got = {key: interpreted[f"{name} float32/{key}"] for key in single}
        assert_calibrated(got, double, with_floor(single, double, 2.0**-24), 3)
        # float64 has the same roundings, each 2^29 times smaller.
        got = {key: interpreted[f"{name} float64/{key}"] for key in single}
        nearer = {key: double[key] + (single[key] - double[key]) * 2.0**-29 for key in single}
        assert_calibrated(got, double, with_floor(nearer, double, 2.0**-53), 3)


def with_floor(baseline: Arrays, oracle: Arrays, unit: float) -> Arrays:
    """The baseline, its error at least four roundings of the tensor's largest element: it may be exact by
    chance.
    """
    floor = {key: 4 * unit * max(np.abs(oracle[key]).max(), 2.0**-20) for key in oracle}
    return {
        key: oracle[key] + np.maximum(np.abs(baseline[key].astype(np.float64) - oracle[key]), floor[key])
        for key in baseline
    }


if __name__ == "__main__":
    named = {f"{run}/{key}": array for run, arrays in everything().items() for key, array in arrays.items()}
    np.savez(sys.argv[1], **named)  # type: ignore[arg-type]
