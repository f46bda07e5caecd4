"""Checkpoints: the trained model that a training stage passes to later stages.

A folder with weights.safetensors (fp32) and model.json; the same weights give the same bytes. model.json is
written last. It holds the sha256 of the weights and of itself, so that an incomplete or edited folder is
detected.
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
from stages.text_files import atomic_replace, file_sha256, unwritable, write_text

WEIGHTS = "weights.safetensors"
MODEL = "model.json"
REGENERATE_HINT = "run `make repro` to regenerate it"


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
    """Writes a checkpoint, each file atomically; the same model gives the same bytes.

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
    """Writes a safetensors file atomically; ValueError if it cannot be written."""
    with atomic_replace(path) as partial:
        try:
            save_file(
                {name: np.asarray(array, order="C") for name, array in arrays.items()}, partial, metadata
            )
        except SafetensorError as error:  # safetensors raises no OSError
            raise unwritable(path, error) from None


def load(folder: Path, tokenizer_sha256: str | None = None, *, hint: str = REGENERATE_HINT) -> Checkpoint:
    """Reads and validates a checkpoint.

    Args:
        folder: written by save.
        tokenizer_sha256: of the tokenizer that will be used with the model; None: not checked.
        hint: what to do if the checkpoint is missing or damaged, for the message.

    Raises:
        ValueError: a file is missing, incomplete or edited, or the checkpoint belongs to another tokenizer.
    """
    for name in (MODEL, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name}: expected a file of a checkpoint, found none; {hint}")
    try:
        model = json.loads((folder / MODEL).read_text(encoding="utf-8"))
        if model.pop("sha256") != _json_sha256(model):
            raise ValueError("its sha256 does not match its other values")
        config = ModelConfig(**model["config"])
        expected, trained_with = model["weights_sha256"], model["tokenizer_sha256"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{folder / MODEL}: incomplete or edited ({error}); {hint}") from None
    if file_sha256(folder / WEIGHTS) != expected:
        raise ValueError(
            f"{folder / WEIGHTS}: incomplete or edited: its sha256 is not the one in {MODEL}; {hint}"
        )
    if tokenizer_sha256 not in (None, trained_with):
        own, given = trained_with[:12], str(tokenizer_sha256)[:12]
        raise ValueError(
            f"{folder}: trained with tokenizer {own}, but the one given is {given}; use tokenizer {own}, or "
            f"{hint}"
        )
    with safe_open(folder / WEIGHTS, framework="numpy") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    return Checkpoint(weights, config, trained_with)


def _json_sha256(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode("utf-8")).hexdigest()
