"""params.yaml, conf/ and command-line overrides -> plain values, by Hydra's Compose API.

Overrides have the grammar of `dvc exp run -S`. There is no `outputs/` folder and no change of directory. A
value override changes the value in params.yaml; choosing a file of a group composes conf/ again.
"""

import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

REGENERATE_HINT = "; `python -m stages.params --compose` regenerates it"

# Keys and files of conf/ by their former names, and what replaced each.
RENAMED = {
    "train_bpe.take": "train_bpe.pretrained",
    "shard.take": "shard.pretokenized",
    "pretrain.mtp_weights": "pretrain.mtp_loss_weights",
    "pretrain.within_documents": "pretrain.document_mask",
    "sft.mtp_weights": "sft.mtp_loss_weights",
    "sft.too_long": "sft.overflow (drop | truncate)",
    "model.nanoeuler": "model=nanoeuler_269m",
    "experiment.nanoeuler": "+experiment=nanoeuler_269m",
}


def read_params(path: Path) -> dict[str, Any]:
    """The plain values of a params.yaml; ValueError if the file is broken."""
    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=True, throw_on_missing=True)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name}: {_one_line(error)}{REGENERATE_HINT}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path.name}: expected a mapping of sections{REGENERATE_HINT}")
    return {str(section): value for section, value in values.items()}


def compose(root: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The plain values of conf/ composed with overrides, as `dvc exp run -S` does.

    Args:
        root: the folder that holds conf/.
        overrides: in Hydra's grammar.

    Raises:
        ValueError: an override is ill-formed or names no file or key, or a file in conf/ is broken.
    """
    parsed = parse(overrides)
    choices = group_choices(root, parsed)
    _check_known(parsed, choices, _hydra(root / "conf", "config", [str(one.input_line) for one in choices]))
    return _hydra(root / "conf", "config", overrides)


def apply_overrides(root: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The plain values of a run by hand: params.yaml with overrides.

    If an override chooses a file of a group, the values are composed from conf/; the differences from
    params.yaml are printed on standard error.

    Raises:
        ValueError: as in read_params and compose.
    """
    current = read_params(root / "params.yaml")
    parsed = parse(overrides)
    choices = group_choices(root, parsed)
    _check_known(parsed, choices, current)
    if choices:
        values = _hydra(root / "conf", "config", overrides)
        differences = _differences(current, values) or "nothing"
        print(f"composed from conf/; differs from params.yaml: {differences}", file=sys.stderr)
        return values
    return _hydra(root, "params", overrides) if overrides else current


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings -> one mapping with dotted keys. Lists are values."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: its new name, else the closest known name, else all known
    names.

    Args:
        name: the key with its section, or the file with its group: "pretrain.lr", "model.euler_1m".
        known: the valid names, with or without their section.
    """
    if name in RENAMED:
        return f"; it is now called {RENAMED[name]}"
    names = sorted(known)
    name = name if any("." in one for one in names) else name.rpartition(".")[2]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(names)}"


def parse(overrides: Sequence[str]) -> list[Override]:
    """Parses overrides in Hydra's grammar; ValueError if one is ill-formed or has several values."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ValueError(f"{' '.join(overrides)}: expected key=value: {_one_line(error)}") from None
    for override in parsed:
        if override.is_sweep_override():
            raise ValueError(
                f"{override.input_line}: one run takes one value; `dvc exp run --queue -S ...` takes several"
            )
    return parsed


def group_choices(root: Path, overrides: Sequence[Override]) -> list[Override]:
    """The overrides that choose a file of a group; ValueError if there is no such file."""
    return [override for override in overrides if _chooses_group(root, override)]


def _chooses_group(root: Path, override: Override) -> bool:
    """Whether an override chooses a file of a group; ValueError if there is no such file."""
    group = override.key_or_group
    if not (root / "conf" / group).is_dir():
        return False
    files = sorted(path.stem for path in (root / "conf" / group).glob("*.yaml"))
    value = override.value()
    if not override.is_delete() and value not in files:
        hint = nearest(f"{group}.{value}", files)
        raise ValueError(f"{group}: no file conf/{group}/{value}.yaml{hint}")
    return True


def _check_known(
    overrides: Sequence[Override], choices: Sequence[Override], values: Mapping[str, Any]
) -> None:
    """Raises ValueError for an override of an unknown key; overrides that choose a file or add a key are
    skipped.
    """
    for override in overrides:
        if override not in choices and not override.is_add() and not _has(values, override.key_or_group):
            raise ValueError(
                f"unknown key {override.key_or_group}{nearest(override.key_or_group, flat(values))}"
            )


def _has(values: Mapping[str, Any], key: str) -> bool:
    """Whether the values contain a dotted key."""
    name, _, rest = key.partition(".")
    if name not in values:
        return False
    return not rest or (isinstance(values[name], Mapping) and _has(values[name], rest))


def _hydra(folder: Path, name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Composes folder/name.yaml by Hydra, with version_base=None as DVC does."""
    try:
        with hydra.initialize_config_dir(str(folder.resolve()), version_base=None):
            config = hydra.compose(name, overrides=list(overrides))
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ValueError(f"{folder.name}/{name}.yaml {' '.join(overrides)}: {_one_line(error)}") from None
    assert isinstance(values, dict)
    return {str(section): value for section, value in values.items()}


MISSING = object()


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """One line: `key=value` for every value of `new` that differs from `old`."""
    known = flat(old)
    return ", ".join(f"{key}={value}" for key, value in flat(new).items() if known.get(key, MISSING) != value)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
