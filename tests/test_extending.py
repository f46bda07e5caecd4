"""docs/extending.md, followed step by step in a copy of the project.

The page's code blocks are applied as the line before each says: "New file `PATH`:", "At the end of `PATH`:",
or "In `PATH`," and then "below `LINE`:", "above `LINE`:", "above the class `NAME`:" or "in place of `LINE`:".
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
STEP = re.compile(
    r"^(New file|At the end of|In) `([^`]+)`(.*?):\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL
)

# A model with the new part trains; so does one with the new optimizer.
TRAIN = """
import numpy as np
from kernels.config import ModelConfig, Numerics
from kernels.engine import Engine
from kernels.optimizers import OPTIMIZERS
from tests.gradient_check import LIMIT, check_model, make_problem

config = ModelConfig(
    vocab_size=31, layers=2, heads=2, kv_heads=1, dim=12, ffn=20, context=9, mlp="relu_squared", bias=True, mtp_heads=2
)
assert max(check_model(config, seed=1, elements=8).values()) < LIMIT
problem, losses = make_problem(config, seed=0), []
engine = Engine(config, Numerics(), micro_batch=3, threads=1, device="cpu", optimizer=OPTIMIZERS["sgd"](beta1=0.5))
for _ in range(20):
    engine.micro_step(problem.batch, problem.head_scale)
    losses.append(engine.update(0.1).nll_sums.sum())
assert losses[-1] < 0.9 * losses[0], losses
assert "exp_avg_sq" not in engine.state()
engine.decoder.decode(np.ones((1, 3), np.int32), engine.decoder.cache())
"""

# The new dataset composes.
PIPELINE = """
from pathlib import Path
from stages.overrides import compose

assert compose(Path(), ["corpus=sonnets"])["corpus"]["name"] == "sonnets"
"""


def edited(text: str, how: str, block: str, path: str) -> str:
    """The text with the block where `how` says."""
    replaced = re.search(r"in place of `([^`]+)`", how)
    beside = re.search(r"(below|above) `([^`]+)`", how)
    named = re.search(r"above the class `([^`]+)`", how)
    if named:
        found = re.search(rf"^@dataclass\(frozen=True\)\nclass {named[1]}:", text, re.MULTILINE)
        assert found, f"{path}: no class {named[1]}"
        return text[: found.start()] + block + text[found.start() :]
    line = (replaced or beside)[1 if replaced else 2] + "\n"  # type: ignore[index]
    assert text.count(line) == 1, f"{path}: {text.count(line)} lines {line!r}"
    if replaced:
        return text.replace(line, block)
    return text.replace(line, line + block if beside and beside[1] == "below" else block + line)


def follow(root: Path) -> list[str]:
    """Apply every step; the paths that were touched, in order."""
    touched = []
    for kind, path, how, block in STEP.findall(PAGE):
        file = root / path
        if kind == "New file":
            assert not file.exists(), f"{path} exists already"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block, encoding="utf-8")
        else:
            text = file.read_text(encoding="utf-8")
            blank = "\n\n" if "two blank lines" in how else ""
            new = text + blank + block if kind == "At the end of" else edited(text, how, block, path)
            file.write_text(new, encoding="utf-8")
        touched.append(path)
    return touched


def run(root: Path, *command: str) -> str:
    """What a command in the copy prints; it must succeed."""
    done = subprocess.run(
        [sys.executable, *command], cwd=root, env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True, text=True, encoding="utf-8", check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(command)[:200]}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with every step of the page applied."""
    root = tmp_path_factory.mktemp("project")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
    assert len(follow(root)) >= 20
    run(root, "-m", "stages.params", "--compose")
    return root


# A CUDA kernel that does not compile.
@pytest.mark.slow
def test_the_kernels_compile(copy: Path) -> None:
    pytest.importorskip("cupy")
    code = """
from kernels.cuda.relu_squared import _BACKWARD, _FORWARD
from kernels.cuda.runtime.compile import compile_instance
for kernel in (_FORWARD, _BACKWARD):
    for template in kernel.instances:
        assert not compile_instance(kernel.source, kernel.expression(template), "sm_90").spill_bytes
"""
    run(copy, "-c", code)


# A step that names a line which is no longer there, or code that no longer fits the interfaces.
@pytest.mark.slow
def test_the_steps_work(copy: Path) -> None:
    assert " passed" in run(
        copy, "-m", "pytest", "-q", "tests/kernels/test_relu_squared.py", "tests/stages/test_count_words.py"
    )
    run(copy, "-c", TRAIN)
    run(copy, "-c", PIPELINE)


# An example that the linter, the types or the structure's rules refuse.
@pytest.mark.slow
def test_the_steps_keep_the_rules(copy: Path) -> None:
    run(copy, "-m", "ruff", "check", ".")
    run(copy, "-m", "mypy", "kernels", "stages")
    for command in (["init", "--quiet"], ["add", "."]):  # some rules are about the files that git knows
        subprocess.run(["git", *command], cwd=copy, check=True)
    run(copy, "-m", "docs.ops")
    rules = ("tests/test_structure.py", "tests/test_docs.py", "tests/kernels/test_cuda_signatures.py")
    models = (f"tests/kernels/test_{name}.py" for name in ("optimizers", "gradients", "config"))
    run(copy, "-m", "pytest", "-q", *rules, *models)
    run(copy, "-m", "ruff", "format", "--check", "kernels/parts", "kernels/cpu/relu_squared.py")
