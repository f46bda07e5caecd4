"""The command params: conf/ -> params.yaml, as `dvc exp run` composes it. `dvc repro` reads only params.yaml,
not conf/.

    python -m stages.params --write [overrides]   writes params.yaml and keeps the overrides; without
    overrides, keeps nothing
    python -m stages.params --compose             writes params.yaml with the kept overrides, after an edit in
    conf/
    python -m stages.params --check [overrides]   exit code 1 and the differences if params.yaml is not that
    composition
    python -m stages.params [overrides]           prints the composition

Kept overrides are in conf/kept/params.yaml, the last entry of the defaults list. So every later `dvc exp run`
includes them.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from stages.overrides import REGENERATE_HINT, compose, flat, group_choices, parse, read_params
from stages.program import command_main
from stages.settings import validate
from stages.text_files import write_text

PARAMS = "params.yaml"
KEPT = "conf/kept/params.yaml"
KEPT_HEADER = """\
# @package _global_
# Written by `python -m stages.params --write [overrides]`: overrides of every later composition.
"""


def text(values: dict[str, Any]) -> str:
    """The text of params.yaml for composed values, byte for byte as DVC writes it."""
    return OmegaConf.to_yaml(OmegaConf.create(values))


def write(root: Path, values: dict[str, Any]) -> None:
    """Replaces root/params.yaml atomically."""
    write_text(root / PARAMS, text(values))


def kept_text(root: Path, overrides: Sequence[str]) -> str:
    """The text of conf/kept/params.yaml: a Hydra config with the effect of these overrides.

    Experiments and files of groups become its defaults list, values become its keys.

    Raises:
        ValueError: an override deletes a key, which a Hydra config cannot express.
    """
    parsed = parse(overrides)
    chosen = group_choices(root, parsed)
    defaults: list[Any] = []
    values = OmegaConf.create({})
    for override in parsed:
        if override.is_delete():
            raise ValueError(
                f"{override.input_line}: a deletion cannot be kept; edit the file in conf/ that has the key"
            )
        if override not in chosen:
            OmegaConf.update(values, override.key_or_group, override.value(), merge=True)
        elif override.is_add():
            defaults.append(f"/{override.key_or_group}/{override.value()}")
    choices = [override for override in chosen if not override.is_add()]
    defaults += [{f"override /{override.key_or_group}": override.value()} for override in choices]
    head = KEPT_HEADER + f"# Kept: {' '.join(overrides) or 'nothing'}.\n"
    if not overrides:
        return head + "{}\n"
    return head + OmegaConf.to_yaml(OmegaConf.create({"defaults": [*defaults, "_self_"]})) + yaml_of(values)


def yaml_of(values: Any) -> str:
    """YAML of a config; empty for an empty one, whose `{}` must not follow other keys."""
    return OmegaConf.to_yaml(values) if values else ""


def keep(root: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Writes params.yaml with these overrides, keeps them in place of earlier ones, and returns the values.

    Raises:
        ValueError: as in compose and validate, or the overrides cannot be kept. Both files are then
            unchanged.
    """
    values = compose(root, ["kept=none", *overrides])
    validate(values)
    path = root / KEPT
    before = path.read_text(encoding="utf-8")
    write_text(path, kept_text(root, overrides))
    try:
        if compose(root, []) != values:
            raise ValueError(
                f"{' '.join(overrides)}: these overrides have another effect when kept; use `dvc exp run -S`"
            )
        write(root, values)
    except ValueError:
        write_text(path, before)
        raise
    return values


def check_params_file(root: Path, values: dict[str, Any]) -> None:
    """Raises ValueError if root/params.yaml does not hold exactly these values in DVC's form."""
    committed = read_params(root / PARAMS)
    old, new = flat(committed), flat(values)
    wrong = [key for key in sorted(old | new) if key not in old or key not in new or old[key] != new[key]]
    if wrong:
        shown = ", ".join(
            f"{key} (is {old.get(key, 'missing')}, conf/ has {new.get(key, 'none')})" for key in wrong
        )
        raise ValueError(f"{PARAMS} is not the composition of conf/: {shown}{REGENERATE_HINT}")
    if (root / PARAMS).read_text(encoding="utf-8") != text(values):
        raise ValueError(
            f"{PARAMS} was edited by hand; edit conf/ instead, then run `python -m stages.params --compose`"
        )


def run(argv: list[str]) -> None:
    """Runs the command as the module docstring says."""
    parser = argparse.ArgumentParser(prog="python -m stages.params", description=__doc__.split("\n")[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--write", action="store_true", help=f"write {PARAMS}, and keep the overrides in {KEPT}"
    )
    what.add_argument("--compose", action="store_true", help=f"write {PARAMS} with the kept overrides")
    what.add_argument("--check", action="store_true", help=f"compare {PARAMS}; exit code 1 if it differs")
    parser.add_argument(
        "overrides", nargs="*", help="for example model=gpt2_124m, pretrain.lr=1e-3, +experiment=smoke"
    )
    arguments = parser.parse_args(argv)
    root = Path.cwd()
    if arguments.write:
        keep(root, arguments.overrides)
        print(f"{PARAMS} written; kept for later compositions: {' '.join(arguments.overrides) or 'nothing'}")
        return
    values = compose(root, arguments.overrides)
    validate(values)
    if arguments.check:
        check_params_file(root, values)
    elif arguments.compose:
        write(root, values)
        print(f"{PARAMS} written")
    else:
        sys.stdout.write(text(values))


def main() -> None:
    command_main(run)


if __name__ == "__main__":
    main()
