"""The structure of the repository, as far as a machine can check it."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml

from kernels.cpu import CpuOps
from kernels.ops import Ops
from stages import trained_stages
from stages.fingerprint import UNTRACKED as UNTRACKED_MODULES
from stages.settings import Settings
from stages.trained_stages import TRAINED_STAGES
from stages.training_settings import Training

ROOT = Path(__file__).resolve().parent.parent
DVC = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))
PARAMS = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))

STAGES = tuple(DVC["stages"])
ROOMS = ("sources", "tokenizer")  # folders of modules: where text comes from, and byte-level BPE

# Files of kernels/cpu that are not an operation of their own, and operations without a backward pass.
NOT_OPERATIONS = ("__init__", "exponential", "jit", "tile")
FORWARD_ONLY = ("decode_attention", "weighted_sum")

# Modules that the deps of dvc.yaml omit: they only pass on values that `params` tracks, or start a stage.
UNTRACKED = tuple(f"stages/{module}" for module in UNTRACKED_MODULES)

FILE_LINES, TEST_LINES, FUNCTION_LINES, CUDA_FUNCTION_LINES = 300, 520, 80, 120
# Files over the limit, and why.
LONG_FILES = {
    "kernels/cuda/matmul/cublaslt.py": 350,  # a C interface and its plans, which are read together
}
LONG_FUNCTIONS: dict[str, int] = {}


def tracked() -> list[str]:
    """The files that git knows or would add, as posix paths."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=True
    ).stdout
    return sorted({name for name in listed.splitlines() if (ROOT / name).is_file()})


def cpu_only() -> set[str]:
    """The files of operations that `Ops` does not demand of every device: optional groups of the CPU. An
    optimizer's is tested with every optimizer of OPTIMIZERS (tests/kernels/test_optimizers.py).
    """
    names = (name for name, value in vars(CpuOps).items() if isinstance(value, staticmethod))
    found = (getattr(CpuOps, name).__module__ for name in names if name not in vars(Ops))
    return {module.rpartition(".")[2] for module in found}


def outs(spec: dict[str, Any]) -> list[str]:
    """The paths that a stage writes."""
    entries = [entry for kind in ("outs", "metrics", "plots") for entry in spec.get(kind, [])]
    return [entry if isinstance(entry, str) else next(iter(entry)) for entry in entries]


def tree(name: str) -> ast.Module:
    """A Python file's syntax tree."""
    return ast.parse((ROOT / name).read_text(encoding="utf-8"))


def imported(name: str) -> Iterator[str]:
    """The first-party files that a Python file imports, wherever in it, also for types only."""
    for node in ast.walk(tree(name)):
        modules: list[str] = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            modules = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        for module in modules:
            path = module.replace(".", "/")
            for candidate in (f"{path}.py", f"{path}/__init__.py"):
                if path.startswith(("stages/", "kernels/")) and (ROOT / candidate).is_file():
                    yield candidate


def closure(name: str) -> set[str]:
    """A Python file and all that it imports, directly or not, without UNTRACKED and what only that
    imports.
    """
    found: set[str] = set()
    pending = [name]
    while pending:
        one = pending.pop()
        if one not in found and not one.removesuffix(".py").startswith(UNTRACKED):
            found.add(one)
            pending += imported(one)
    return found


def programs() -> list[str]:
    """The modules of stages/ that can be run: stages and commands."""
    modules = (name for name in tracked() if re.fullmatch(r"stages/[^/]+\.py", name))
    return [Path(name).stem for name in modules if "__name__ ==" in (ROOT / name).read_text(encoding="utf-8")]


# Stages in another order than that of the pipeline: a look-ahead would miss what a later one objects to.
def test_known_stages_are_in_the_order_of_the_pipeline() -> None:
    assert set(STAGES) <= set(programs())
    assert tuple(stage for stage in STAGES if stage in trained_stages.STAGES) == trained_stages.STAGES


# A stage must have the same name in dvc.yaml, its module, its parameters, its data and its test.
@pytest.mark.parametrize("stage", STAGES)
def test_one_name_a_stage(stage: str) -> None:
    spec = DVC["stages"][stage]
    assert spec["cmd"] == f"python -m stages.{stage}"
    assert f"stages/{stage}.py" in spec["deps"]
    assert spec["desc"]
    sections = ("corpus", "conversations") if stage == "download" else (stage,)
    for section in sections:
        assert section in PARAMS
        assert section in spec["params"]
        assert (ROOT / "conf" / section).is_dir()
    assert (ROOT / "tests" / "stages" / f"test_{stage}.py").is_file()
    for out in outs(spec):
        assert out == f"data/{stage}" or out.startswith(f"data/{stage}/"), out


# Every stage and command runs as `python -m stages.NAME`; without main() or the guard, importing it would run
# it or nothing.
@pytest.mark.parametrize("name", programs())
def test_programs_have_run_and_main(name: str) -> None:
    body = tree(f"stages/{name}.py").body
    functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    assert "main" in functions
    assert "run" in functions or name not in STAGES
    assert ast.unparse(body[-1]) == "if __name__ == '__main__':\n    main()"


# An operation without its backward pass or without its test is not covered by the gradient check's promise.
def test_one_name_an_operation() -> None:
    operations = [Path(name).stem for name in tracked() if re.fullmatch(r"kernels/cpu/[^/]+\.py", name)]
    for operation in sorted(set(operations) - set(NOT_OPERATIONS)):
        functions = {
            node.name
            for node in tree(f"kernels/cpu/{operation}.py").body
            if isinstance(node, ast.FunctionDef)
        }
        if operation in functions:  # an optimizer's update, say
            expected = {operation}
        elif operation in FORWARD_ONLY:
            expected = {f"{operation}_forward"}
        else:
            expected = {f"{operation}_forward", f"{operation}_backward"}
        assert expected <= functions, operation
        tested = (ROOT / "tests" / "kernels" / f"test_{operation}.py").is_file()
        assert tested or operation in cpu_only(), f"{operation} has no test"


# The engine that knows files or settings can't be used without them.
def test_kernels_never_import_stages() -> None:
    for name in tracked():
        if name.startswith("kernels/") and name.endswith(".py"):
            assert not [one for one in imported(name) if one.startswith("stages/")], name


# CuPy imported outside kernels/cuda would break every machine without it.
def test_only_cuda_imports_cupy() -> None:
    for name in tracked():
        if name.endswith(".py") and not name.startswith(("kernels/cuda/", "tests/")):
            for node in ast.walk(tree(name)):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    assert not re.search(r"\bcupy\b", ast.unparse(node)), f"{name}: {ast.unparse(node)}"


# A module that a stage imports but dvc.yaml does not list could change without the stage ever running again;
# one that is listed but not imported would make it run for nothing.
@pytest.mark.parametrize("stage", STAGES)
def test_deps_are_the_imports(stage: str) -> None:
    deps = [dep for dep in DVC["stages"][stage]["deps"] if not dep.startswith(("data/", "${"))]
    needed = {name for name in closure(f"stages/{stage}.py") if (ROOT / name).stat().st_size}
    missing = {
        name for name in needed if name not in deps and not any(name.startswith(f"{dep}/") for dep in deps)
    }
    unused = {
        dep for dep in deps if dep not in needed and not any(name.startswith(f"{dep}/") for name in needed)
    }
    assert (missing, unused) == (set(), set())
    assert deps == sorted(deps)


# A local file that is not a dependency: the run cache would restore the result of an older text.
# Each such key is a path in params.yaml, since DVC can't hash a null.
def test_local_files_are_dependencies() -> None:
    paths = {
        "download": ["corpus.local_path", "conversations.local_path"],
        "train_bpe": ["train_bpe.pretrained"],
        "shard": ["shard.pretokenized"],
        "pretrain": ["pretrain.init_from"],
    }
    for stage, spec in DVC["stages"].items():
        assert [dep for dep in spec["deps"] if dep.startswith("${")] == [
            f"${{{key}}}" for key in paths.get(stage, [])
        ]
    for section, _, key in (path.partition(".") for keys in paths.values() for path in keys):
        assert (ROOT / PARAMS[section][key]).is_file()


# A stage that reads what no stage writes, or two that write the same, can't be run from an empty folder.
def test_data_flows_one_way() -> None:
    written: set[str] = set()
    for spec in DVC["stages"].values():
        for dep in spec["deps"]:
            assert not dep.startswith("data/") or dep in written, f"{dep} is read before it is written"
        new = set(outs(spec))
        assert not new & written
        written |= new
    plotted = [path for plot in DVC["plots"] for path in next(iter(plot.values()))["y"]]
    for path in [*plotted, *(artifact["path"] for artifact in DVC["artifacts"].values())]:
        untracked = path in {
            f"data/{stage.name}/speed.csv" for stage in TRAINED_STAGES
        }  # differs between runs
        assert untracked or any(path == out or path.startswith(f"{out}/") for out in written), path


# An uncached entry of `outs` disables the run cache of its stage: returning to earlier parameters would train
# again.
def test_uncached_outs_are_metrics_or_plots() -> None:
    for stage, spec in DVC["stages"].items():
        for out in spec["outs"]:
            assert isinstance(out, str) or "cache" not in next(iter(out.values())), stage


# DVC must track every section that a stage uses, or its result changes unnoticed; a section that is tracked
# but not used causes needless runs. Only `runtime` is untracked.
@pytest.mark.parametrize("stage", STAGES)
def test_params_are_what_the_stage_uses(stage: str) -> None:
    shared = {"stages/training_stage.py"} & set(
        imported(f"stages/{stage}.py")
    )  # reads settings for the stage
    files = (f"stages/{stage}.py", *shared)
    source = "".join((ROOT / name).read_text(encoding="utf-8") for name in files)
    used = {match for match in re.findall(r"settings\.(\w+)(?:\.(\w+))?", source) if match[0] in PARAMS}
    tracked_params = DVC["stages"][stage]["params"]
    for section, key in used:
        assert section == "runtime" or section in tracked_params or f"{section}.{key}" in tracked_params, (
            section,
            key,
        )
    for param in tracked_params:
        assert param.split(".")[0] in {section for section, _ in used}, param
    assert all(param.split(".")[0] in PARAMS for param in tracked_params)


# As above, for sections that nobody tracks.
def test_every_section_is_tracked() -> None:
    tracked_sections = {param.split(".")[0] for spec in DVC["stages"].values() for param in spec["params"]}
    assert tracked_sections == set(PARAMS) - {"runtime"}


# A training stage that is not listed has no resume state on the disk plan, no column in the evaluation and no
# --model.
def test_every_training_section_is_a_trained_stage() -> None:
    kinds = get_type_hints(Settings)
    sections = tuple(name for name, kind in kinds.items() if issubclass(kind, Training))
    assert sections == tuple(stage.name for stage in TRAINED_STAGES)
    for stage in TRAINED_STAGES:
        assert kinds[stage.name].section() == stage.name
        assert stage.checkpoint.as_posix() in outs(DVC["stages"][stage.name])
        assert stage.checkpoint.as_posix() in DVC["stages"]["eval"]["deps"]
    names = [stage.model for stage in TRAINED_STAGES]
    assert len(set(names)) == len(names)


# Large files and functions are where a reader gives up; the lists name those that are allowed to be.
def test_sizes() -> None:
    for name in tracked():
        if not name.endswith((".py", ".cu", ".cuh")):
            continue
        lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        limit = TEST_LINES if name.startswith("tests/") else FILE_LINES
        assert len(lines) <= LONG_FILES.get(name, limit), f"{name}: {len(lines)} lines"
        if name.endswith(".py"):
            for node in ast.walk(tree(name)):
                if isinstance(node, ast.FunctionDef):
                    length = (node.end_lineno or node.lineno) - node.lineno + 1
                    allowed = LONG_FUNCTIONS.get(f"{name}:{node.name}", FUNCTION_LINES)
                    assert length <= allowed, f"{name}:{node.name}: {length} lines"
        else:
            for first, last in cuda_functions(lines):
                assert last - first < CUDA_FUNCTION_LINES, f"{name}:{first + 1}: {last - first + 1} lines"


def cuda_functions(lines: list[str]) -> Iterator[tuple[int, int]]:
    """First and last line, from 0, of each function at the top level of a CUDA file."""
    first = None
    for number, line in enumerate(lines):
        if (
            re.match(r"(template|__global__|inline|static|[A-Za-z_][\w:<>, ]* \**\w+\()", line)
            and first is None
        ):
            first = number
        if line == "}" and first is not None:
            yield first, number
        if line.startswith("}") or (line.endswith(";") and not line.startswith(" ")):
            first = None


# A CUDA operation whose launcher and kernels are not found under its name.
def test_cuda_operations_are_found_by_name() -> None:
    launchers = {Path(name).stem for name in tracked() if re.fullmatch(r"kernels/cuda/(\w+/)?\w+\.py", name)}
    operations = {Path(name).stem for name in tracked() if re.fullmatch(r"kernels/cpu/[^/]+\.py", name)}
    assert operations - set(NOT_OPERATIONS) - cpu_only() <= launchers
    rooms = {Path(name).parts[2] for name in tracked() if re.fullmatch(r"kernels/cuda/\w+/.*", name)}
    assert rooms == {"attention", "decode", "include", "matmul", "runtime"}


# Names that say nothing gather what belongs elsewhere.
def test_no_file_for_everything() -> None:
    for name in tracked():
        assert not re.search(r"(^|/)(utils?|helpers?|common|misc)(\.|/)", name), name


# Text of another project's tools, of one machine or of one registry would be wrong in everybody else's copy.
# The patterns are written apart here, so that this file does not match them.
def test_nothing_of_one_machine() -> None:
    forbidden = [
        "/" + "work/",
        "/" + "root/",
        "/" + "home/",
        "file:" + "//",
        "index" + "-url",
        "find" + "-links",
    ]
    for name in tracked():
        if (
            name.endswith((".py", ".toml", ".yaml", ".lock", ".md", ".cu", ".cuh"))
            or "." not in Path(name).name
        ):
            text = (ROOT / name).read_text(encoding="utf-8")
            assert not [pattern for pattern in forbidden if pattern in text], name


# Text that is not ASCII prints badly on some consoles; what tests and data need of it is written as escapes.
def test_python_is_ascii() -> None:
    for name in tracked():
        if name.endswith(".py") and not name.startswith("tests/"):
            assert (ROOT / name).read_text(encoding="utf-8").isascii(), name


# A package.__init__ in tests would shadow the real `kernels` and `stages`.
def test_tests_are_no_packages() -> None:
    assert not [name for name in tracked() if name.startswith("tests/") and name.endswith("__init__.py")]


# A dependency that its lock lacks would be installed in whatever version the index has that day.
@pytest.mark.parametrize(
    ("lock", "groups"),
    [
        ("requirements.lock", ("dependencies", "dev")),
        ("requirements-parity.lock", ("parity",)),
        ("requirements-cuda.lock", ("cuda",)),
    ],
)
def test_lock_has_every_dependency(lock: str, groups: tuple[str, ...]) -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lists = {"dependencies": project["project"]["dependencies"], **project["dependency-groups"]}
    wanted = [want for group in groups for want in lists[group]]
    lines = (ROOT / lock).read_text(encoding="utf-8").splitlines()
    locked = {line.split("==")[0] for line in lines if not line.startswith("#")}
    assert {re.split(r"[<>=;\[ ]", want)[0].lower() for want in wanted} <= locked
    assert all(re.match(r"#|[a-z0-9-]+==[^ ]+( ; .*)?$", line) for line in lines)


# Two versions of one package: what the outside judges judge would not be what runs.
def test_locks_agree() -> None:
    locks = []
    for name in ("requirements.lock", "requirements-parity.lock"):
        lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        locks.append(
            {
                line.split("==")[0]: line
                for line in lines
                if "; python" not in line and not line.startswith("#")
            }
        )
    for package in locks[0].keys() & locks[1].keys():
        assert locks[0][package].split(" ; ")[0] == locks[1][package].split(" ; ")[0], package
