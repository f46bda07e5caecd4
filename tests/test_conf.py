"""conf/: everything in it composes and validates, and params.yaml is its composition."""

import re
import subprocess
from pathlib import Path

import pytest

from stages.overrides import compose
from stages.params import text
from stages.settings import validate

ROOT = Path(__file__).resolve().parent.parent
GROUPS = sorted(
    path.name for path in (ROOT / "conf").iterdir() if path.is_dir() and path.name != "experiment"
)
FILES = [(group, path.stem) for group in GROUPS for path in sorted((ROOT / "conf" / group).glob("*.yaml"))]
EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))


# `dvc repro` does not read conf/: after an edit there it would silently use the old params.yaml.
def test_params_yaml_is_the_composition() -> None:
    committed = [
        "git",
        "show",
        "HEAD:params.yaml",
    ]  # not the file itself, which every `dvc exp run` overwrites
    params = subprocess.run(
        committed, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=True
    ).stdout
    assert params == text(compose(ROOT, []))


# DVC writes params.yaml at every `dvc exp run`; another form would show as a change in git after each.
def test_params_yaml_is_what_dvc_writes(tmp_path: Path) -> None:
    from dvc.utils.hydra import compose_and_dump

    compose_and_dump(tmp_path / "params.yaml", str(ROOT / "conf"), None, "config", "", ["+experiment=smoke"])
    assert (tmp_path / "params.yaml").read_text(encoding="utf-8") == text(
        compose(ROOT, ["+experiment=smoke"])
    )


# A file of a group that nobody ran since a key was renamed fails only when somebody chooses it.
@pytest.mark.parametrize(("group", "name"), FILES)
def test_every_file_composes(group: str, name: str) -> None:
    validate(compose(ROOT, [f"{group}={name}"]))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes(name: str) -> None:
    """As above, and an experiment that changes nothing is not one."""
    values = compose(ROOT, [f"+experiment={name}"])
    validate(values)
    assert values != compose(ROOT, [])


# The published sizes: a model file with another shape would make every comparison with them wrong.
@pytest.mark.parametrize(
    ("model", "vocab_size", "parameters"),
    [
        ("euler_1m", 512, 1_050_000),
        ("gpt2_124m", 50257, 124_439_808),
        ("gpt2_350m", 50257, 354_823_168),
        ("gpt2_774m", 50257, 774_030_080),
        ("gpt2_1558m", 50257, 1_557_611_200),
    ],
)
def test_models_have_their_size(model: str, vocab_size: int, parameters: int) -> None:
    from kernels.parameters import parameter_table

    config = validate(compose(ROOT, [f"model={model}"])).model.config(vocab_size)
    padding = (config.padded_vocab - vocab_size) * config.dim
    count = sum(parameter.size for parameter in parameter_table(config)) - padding
    tolerance = 0.01 if model.startswith("euler") else 0.0
    assert abs(count - parameters) <= tolerance * parameters, count


# A key without a comment leaves its unit and range to guessing.
@pytest.mark.parametrize(
    "path", sorted((ROOT / "conf").rglob("*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_files_explain_themselves(path: Path) -> None:
    assert re.match(r"(# @package _global_\n)?# \w", path.read_text(encoding="utf-8"))
    if path.parent.name in ("experiment", "corpus", "conversations", "kept") or path.stem == "config":
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and line[0].isalpha() and not line.startswith("defaults:"):
            assert "#" in line, f"{path.name}: {line}"
