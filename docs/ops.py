"""Writes docs/ops.md: every operation with its formula, CPU loop, CUDA kernels and tests.

.venv/bin/python -m docs.ops        (make figures)
"""

import ast
import re
from pathlib import Path

from kernels.cpu import CpuOps
from stages.program import command_main
from stages.text_files import write_text

ROOT, PAGE = Path(__file__).resolve().parent.parent, Path("docs/ops.md")
CUDA, TESTS = ROOT / "kernels" / "cuda", ROOT / "tests" / "kernels"
INTRODUCTION = """# Operations

Every operation from its formula to its tests. The CPU file holds the derivation's result and a loop that can
be read and stepped through. The CUDA file starts with the same equations, and its launcher of the same name
points back to the CPU file. [training_step.md](training_step.md) derives the backward passes;
[extending.md](extending.md) adds an operation. Made by `python -m docs.ops` (`make figures`).

| operation | what it computes | CPU | CUDA | launcher | tests |
|---|---|---|---|---|---|
"""


def stems() -> dict[str, str]:
    """The first function of each operation's CPU file, by the file's stem."""
    found: dict[str, str] = {}
    for name, value in vars(CpuOps).items():
        if isinstance(value, staticmethod):
            found.setdefault(value.__func__.__module__.rpartition(".")[2], name)
    return found


def what(stem: str, name: str) -> str:
    """The operation in words, and the equation of its first result, from the docstrings of its CPU file."""
    tree = ast.parse((ROOT / "kernels" / "cpu" / f"{stem}.py").read_text(encoding="utf-8"))
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    lines = (ast.get_docstring(function) or "").partition("Args:")[0].splitlines()
    equations = [re.sub(r" +([-+]?=)", r" \1", line.strip()) for line in lines]
    equations = [
        re.sub(r" {2,}.*", "", line).rstrip(".")
        for line in equations
        if re.match(r"[\w\[\], ]+ [-+]?= ", line)
    ]
    result = function.args.args[0].arg
    chosen = next((line for line in equations if line.startswith(result)), equations[0] if equations else "")
    words = (ast.get_docstring(tree) or "").splitlines()[0].rstrip(".")
    return f"{words}: `{chosen}`" if chosen else words


def links(paths: list[Path]) -> str:
    """Links to files, by their names."""
    return " ".join(f"[{path.name}](../{path.relative_to(ROOT).as_posix()})" for path in paths)


def kernel_files(stem: str) -> tuple[list[Path], list[Path]]:
    """The .cu files whose kernels an operation's launcher starts, and the launcher; nothing if only the CPU
    has the operation.
    """
    launchers = sorted(CUDA.rglob(f"{stem}.py"))
    text = "".join(path.read_text(encoding="utf-8") for path in launchers)
    sources = dict.fromkeys(re.findall(r'"([\w/]+\.cu)"', text))
    return [CUDA / source for source in sources], launchers


def tests(stem: str) -> list[Path]:
    """The operation's test, and those of its CUDA kernels that import its functions."""
    own = TESTS / f"test_{stem}.py"
    used = re.compile(rf"kernels\.cpu\.{stem} import")
    cuda = [
        path for path in sorted(TESTS.glob("test_cuda_*.py")) if used.search(path.read_text(encoding="utf-8"))
    ]
    return [path for path in (own, *cuda) if path.is_file()]


def page() -> str:
    """The text of docs/ops.md."""
    rows = []
    for stem, name in sorted(stems().items()):
        cuda, launcher = kernel_files(stem)
        cpu = [ROOT / "kernels" / "cpu" / f"{stem}.py"]
        cells = [
            f"`{stem}`",
            what(stem, name),
            *(links(paths) for paths in (cpu, cuda, launcher, tests(stem))),
        ]
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n")
    return INTRODUCTION + "".join(rows)


def main() -> None:
    command_main(lambda _: write_text(PAGE, page()))


if __name__ == "__main__":
    main()
