"""Our logits against PyTorch's, through the export: as exact as PyTorch in float32, measured from float64."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from stages.export import MTP_HEADS_FILE
from tests.parity import torch_model
from tests.parity.cases import (
    CONTEXT,
    MODELS,
    ROWS,
    VOCAB,
    Weights,
    engine_with,
    exported,
    in_float64,
    our_logits,
    scaled_up,
    trained,
)

NAMES = pytest.mark.parametrize("name", MODELS)
KINDS = pytest.mark.parametrize("weights_of", [trained, scaled_up], ids=["trained", "scaled_up"])
# Sets of tokens whose errors are pooled: rounding errors are random, and the ratio of two of them scatters
# the less the more logits stand in it.
SEEDS = 8

Make = Callable[..., Weights]


def norm(array: np.ndarray) -> float:
    """Euclidean norm over all elements."""
    return float(np.linalg.norm(array.astype(np.float64)))


def tokens_of(seed: int) -> np.ndarray:
    """(B, T) random ids, every one of the vocabulary likely in some set."""
    return np.random.default_rng(seed).integers(VOCAB, size=(ROWS, CONTEXT)).astype(np.int32)


@NAMES
@KINDS
@torch.inference_mode()
def test_logits_are_as_exact_as_pytorchs(name: str, weights_of: Make, tmp_path: Path) -> None:
    """Would catch any difference in the mathematics, in a name, a transposition or an order, and a careless
    sum.

    The error is the Euclidean norm of (float32 logits - float64 logits) over SEEDS sets of tokens, and the
    largest of them. That PyTorch's own error is a rounding error and no wrong export, which would make room
    for ours: the float64 model agrees with another PyTorch model of the same mathematics, and the float32 one
    with it to 1e-5, which no exchanged tensor does.
    """
    config, weights = MODELS[name], weights_of(MODELS[name])
    sets = [tokens_of(seed) for seed in range(SEEDS)]
    model = exported(config, weights, tmp_path)
    theirs = np.stack([model(torch.from_numpy(tokens).long()).logits.numpy() for tokens in sets])
    model = in_float64(model, config)
    exact = np.stack([model(torch.from_numpy(tokens).long()).logits.numpy() for tokens in sets])
    engine = engine_with(config, weights)
    ours = np.stack([our_logits(engine, tokens) for tokens in sets])

    p = torch_model.parameters(weights, torch.float64)
    one = torch.zeros(sets[0].shape, dtype=torch.int32)
    streams = [torch_model.final_stream(config, p, torch.from_numpy(tokens).long(), one) for tokens in sets]
    second = np.stack([torch_model.logits(config, p, stream).numpy() for stream in streams])
    assert exact.dtype == np.float64 and norm(second - exact) <= 1e-12 * norm(exact)
    assert norm(theirs - exact) <= 1e-5 * norm(exact)

    error, allowed = norm(ours - exact), norm(theirs - exact)
    largest, largest_allowed = np.abs(ours - exact).max(), np.abs(theirs - exact).max()
    print(f"{name}: |logits| {norm(exact):.3g}; norm of the error {error:.3g} / PyTorch {allowed:.3g} = "
          f"{error / allowed:.2f}; "
          f"largest {largest:.3g} / {largest_allowed:.3g} = {largest / largest_allowed:.2f}")  # fmt: skip
    assert error <= 2 * allowed
    assert largest <= 2 * largest_allowed


@NAMES
@KINDS
@torch.inference_mode()
def test_float64_is_pytorchs_float64(name: str, weights_of: Make, tmp_path: Path) -> None:
    """Would catch a difference that is smaller than float32's rounding: eps of a norm, a constant of GELU, an
    angle.
    """
    config, weights = MODELS[name], weights_of(MODELS[name])
    model = in_float64(exported(config, weights, tmp_path), config)
    exact = model(torch.from_numpy(tokens_of(0)).long()).logits.numpy()
    ours = our_logits(engine_with(config, weights, dtype=np.float64), tokens_of(0))
    print(f"{name}: {norm(ours - exact) / norm(exact):.2g}")
    assert norm(ours - exact) <= 1e-12 * norm(exact)


@torch.inference_mode()
def test_further_heads_are_beside_the_model(tmp_path: Path) -> None:
    """Would catch heads in another order, or head 0 among them, in the file that no class of transformers
    reads.
    """
    config = MODELS["euler"]
    model = exported(config, trained(config), tmp_path)
    heads = torch.from_numpy(load_file(tmp_path / MTP_HEADS_FILE)["heads.weight"])
    engine, tokens = engine_with(config, trained(config)), tokens_of(0)
    stream = model.model(torch.from_numpy(tokens).long()).last_hidden_state
    for k in range(1, config.mtp_heads):
        theirs = torch.nn.functional.linear(stream, heads[k - 1]).numpy()
        assert norm(our_logits(engine, tokens, k) - theirs) <= 1e-5 * norm(theirs)
