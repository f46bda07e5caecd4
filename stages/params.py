"""Command: conf/ -> params.yaml, as `dvc exp run` composes it. `dvc repro` reads params.yaml and never looks at conf/.

    python -m stages.params --write [overrides]   composes params.yaml anew
    python -m stages.params --check [overrides]   fails, naming what differs, where params.yaml is not that composition
    python -m stages.params [overrides]           prints the composition
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from stages.overrides import compose, flat, read_params
from stages.settings import command_main, validate
from stages.text_files import write_text

PARAMS = "params.yaml"


def text(values: dict[str, Any]) -> str:
    """The bytes of params.yaml for composed values, those that DVC writes."""
    return OmegaConf.to_yaml(OmegaConf.create(values))


def write(root: Path, values: dict[str, Any]) -> None:
    """Replaces root/params.yaml, in one step, so that a kill leaves the old or the new one."""
    write_text(root / PARAMS, text(values))


def check(root: Path, values: dict[str, Any]) -> None:
    """Raises ValueError where root/params.yaml does not hold these values in this form."""
    committed = read_params(root / PARAMS)
    old, new = flat(committed), flat(values)
    wrong = [key for key in sorted(old | new) if key not in old or key not in new or old[key] != new[key]]
    if wrong:
        shown = ", ".join(f"{key} (is {old.get(key, 'missing')}, conf/ has {new.get(key, 'none')})" for key in wrong)
        raise ValueError(f"{PARAMS} is not what conf/ composes: {shown}; `python -m stages.params --write` makes it anew")
    if (root / PARAMS).read_text(encoding="utf-8") != text(values):
        raise ValueError(f"{PARAMS} was edited by hand: edit conf/, then `python -m stages.params --write`")


def run(argv: list[str]) -> None:
    """What the module's docstring says."""
    parser = argparse.ArgumentParser(prog="python -m stages.params", description=__doc__.split("\n")[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help=f"write {PARAMS}")
    what.add_argument("--check", action="store_true", help=f"compare {PARAMS}; exit code 1 where it differs")
    parser.add_argument("overrides", nargs="*", help="for example model=gpt2_124m, pretrain.lr=1e-3, +experiment=smoke")
    arguments = parser.parse_args(argv)
    root = Path.cwd()
    values = compose(root, arguments.overrides)
    validate(values)
    if arguments.write:
        write(root, values)
        print(f"{PARAMS} written")
    elif arguments.check:
        check(root, values)
    else:
        sys.stdout.write(text(values))


def main() -> None:
    command_main(run)


if __name__ == "__main__":
    main()
