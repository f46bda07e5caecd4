"""Checkpoints: what a training stage leaves for later stages.

A folder of weights.safetensors (fp32) and model.json, the same bytes for the same weights. model.json is written last and
holds the weights' sha256 and its own, so that half a folder or an edited one shows.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kernels.config import ModelConfig
from stages.text_files import file_sha256, replacing, unwritable, write_text

WEIGHTS = "weights.safetensors"
MODEL = "model.json"
REGENERATE_HINT = "run `make repro` to make it anew"


@dataclass(frozen=True)
class Checkpoint:
    """A trained model.

    Args:
        weights: fp32 arrays by parameter name, as Engine.load takes them.
        config: the model's shape and parts.
        tokenizer_sha256: of the tokenizer.json whose ids the model was trained on.
    """

    weights: dict[str, np.ndarray]
    config: ModelConfig
    tokenizer_sha256: str


def save(folder: Path, weights: Mapping[str, np.ndarray], config: ModelConfig, tokenizer_sha256: str) -> None:
    """Writes a checkpoint: each file whole or not at all, the same bytes for the same model.

    Raises:
        ValueError: the folder cannot be written.
    """
    write_arrays(folder / WEIGHTS, weights)
    model = {
        "config": config.to_dict(),
        "tokenizer_sha256": tokenizer_sha256,
        "weights_sha256": file_sha256(folder / WEIGHTS),
    }
    write_text(folder / MODEL, json.dumps({**model, "sha256": _json_sha256(model)}, indent=2) + "\n")


def write_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None
) -> None:
    """Writes a safetensors file whole or not at all; ValueError where it cannot be written."""
    with replacing(path) as partial:
        try:
            save_file(
                {name: np.asarray(array, order="C") for name, array in arrays.items()}, partial, metadata
            )
        except SafetensorError as error:  # it knows no OSError
            raise unwritable(path, error) from None


def load(folder: Path, tokenizer_sha256: str | None = None, *, hint: str = REGENERATE_HINT) -> Checkpoint:
    """Reads and validates a checkpoint.

    Args:
        folder: what save wrote.
        tokenizer_sha256: of the tokenizer that will be used with it; None asks for no match.
        hint: what to do about a checkpoint that is missing or damaged, for the message.

    Raises:
        ValueError: a file is missing, half written or edited, or the checkpoint belongs to another tokenizer.
    """
    for name in (MODEL, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name}: expected a file of a checkpoint, found none; {hint}")
    try:
        model = json.loads((folder / MODEL).read_text(encoding="utf-8"))
        if model.pop("sha256") != _json_sha256(model):
            raise ValueError("its sha256 is not that of its other values")
        config = ModelConfig(**model["config"])
        expected, trained_with = model["weights_sha256"], model["tokenizer_sha256"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{folder / MODEL}: half written or edited ({error}); {hint}") from None
    if file_sha256(folder / WEIGHTS) != expected:
        raise ValueError(
            f"{folder / WEIGHTS}: half written or edited: its sha256 is not the one in {MODEL}; {hint}"
        )
    if tokenizer_sha256 not in (None, trained_with):
        here = f"the tokenizer here is {str(tokenizer_sha256)[:12]}"
        raise ValueError(
            f"{folder}: trained with the tokenizer {trained_with[:12]}, but {here}; use that or {hint}"
        )
    with safe_open(folder / WEIGHTS, framework="numpy") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    return Checkpoint(weights, config, trained_with)


def _json_sha256(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode("utf-8")).hexdigest()
