"""params.yaml, conf/ and command-line overrides -> plain values, by Hydra's Compose API.

No `outputs/` folder, no change of directory, the grammar of `dvc exp run -S`. A value override edits what params.yaml
holds; choosing a file of a group composes conf/ anew.
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

REGENERATE_HINT = "; `python -m stages.params --compose` makes it anew"

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
    """The plain values of a params.yaml; ValueError where it is not one."""
    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=True, throw_on_missing=True)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name}: {_one_line(error)}{REGENERATE_HINT}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path.name}: expected a mapping of sections{REGENERATE_HINT}")
    return {str(section): value for section, value in values.items()}


def compose(root: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """conf/ composed with overrides, as `dvc exp run -S` composes it, as plain values.

    Args:
        root: the folder that holds conf/.
        overrides: in Hydra's grammar.

    Raises:
        ValueError: an override is ill-formed or names no file or key, or a file of conf/ is broken.
    """
    parsed = parse(overrides)
    choices = group_choices(root, parsed)
    _check_known(parsed, choices, _hydra(root / "conf", "config", [str(one.input_line) for one in choices]))
    return _hydra(root / "conf", "config", overrides)


def apply_overrides(root: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The values of a run by hand: params.yaml with overrides, or conf/ composed anew.

    Anew where an override chooses a file of a group; what that changes against params.yaml is printed on stderr.

    Raises:
        ValueError: as read_params and compose.
    """
    committed = read_params(root / "params.yaml")
    parsed = parse(overrides)
    choices = group_choices(root, parsed)
    _check_known(parsed, choices, committed)
    if choices:
        values = _hydra(root / "conf", "config", overrides)
        differences = _differences(committed, values) or "nothing"
        print(f"composed from conf/; unlike params.yaml: {differences}", file=sys.stderr)
        return values
    return _hydra(root, "params", overrides) if overrides else committed


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings -> one mapping with dotted keys; lists stay values."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown key: its new name, or the name that was probably meant, else all of them.

    Args:
        name: the key, with its section if it has one.
        known: the keys that would be right, with or without their section.
    """
    if name in RENAMED:
        return f"; it is now called {RENAMED[name]}"
    names = sorted(known)
    name = name if any("." in one for one in names) else name.rpartition(".")[2]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(names)}"


def parse(overrides: Sequence[str]) -> list[Override]:
    """Overrides in Hydra's grammar; ValueError where one is ill-formed or takes several values."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ValueError(f"{' '.join(overrides)}: not key=value: {_one_line(error)}") from None
    for override in parsed:
        if override.is_sweep_override():
            raise ValueError(
                f"{override.input_line}: one run takes one value; `dvc exp run --queue -S ...` takes several"
            )
    return parsed


def group_choices(root: Path, overrides: Sequence[Override]) -> list[Override]:
    """Those of the overrides that choose a file of a group; ValueError where there is no such file."""
    return [override for override in overrides if _chooses_group(root, override)]


def _chooses_group(root: Path, override: Override) -> bool:
    """Whether an override chooses a file of a group; ValueError where there is no such file."""
    group = override.key_or_group
    if not (root / "conf" / group).is_dir():
        return False
    files = sorted(path.stem for path in (root / "conf" / group).glob("*.yaml"))
    value = override.value()
    if not override.is_delete() and value not in files:
        raise ValueError(f"{group}: no file conf/{group}/{value}.yaml{nearest(f"{group}.{value}", files)}")
    return True


def _check_known(
    overrides: Sequence[Override], choices: Sequence[Override], values: Mapping[str, Any]
) -> None:
    """Raises ValueError where an override that chooses no file and adds nothing names no key of `values`."""
    for override in overrides:
        if override not in choices and not override.is_add() and not _has(values, override.key_or_group):
            raise ValueError(
                f"unknown key {override.key_or_group}{nearest(override.key_or_group, flat(values))}"
            )


def _has(values: Mapping[str, Any], key: str) -> bool:
    """Whether a dotted key leads somewhere."""
    name, _, rest = key.partition(".")
    if name not in values:
        return False
    return not rest or (isinstance(values[name], Mapping) and _has(values[name], rest))


def _hydra(folder: Path, name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Hydra's composition of folder/name.yaml; version_base=None is what DVC passes."""
    try:
        with hydra.initialize_config_dir(str(folder.resolve()), version_base=None):
            config = hydra.compose(name, overrides=list(overrides))
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ValueError(f"{folder.name}/{name}.yaml {' '.join(overrides)}: {_one_line(error)}") from None
    assert isinstance(values, dict)
    return {str(section): value for section, value in values.items()}


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """`key=value` of every key of `new` that `old` does not hold, as one line."""
    known = flat(old)
    return ", ".join(f"{key}={value}" for key, value in flat(new).items() if known.get(key, flat) != value)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
