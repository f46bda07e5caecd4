"""Gradients of one step, tensor by tensor, against autograd: through the export, and with every prediction
head.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.batch import Batch, head_weight_sums
from kernels.config import ModelConfig
from stages.hf_format import gpt2_weights, llama_weights
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
    scaled_up,
    trained,
)

NAMES = pytest.mark.parametrize("name", MODELS)
MTP_WEIGHTS = (1.0, 0.3, 0.1)
LIMIT = 1e-4
# Of two float32 gradients of the same mathematics whose sums run in another order, as the operations' tests
# allow it.
OTHER_ORDER = 3
# A key bias adds the same to all scores of a query, which softmax doesn't see: its gradient is a sum that
# cancels, and what is left is rounding. It is compared with the query bias's gradient, whose terms are as
# large and don't cancel.
FLOOR = 1e-4


def step_gradients(
    config: ModelConfig, weights: Weights, batch: Batch, mtp_loss_weights: tuple[float, ...]
) -> Weights:
    """Our gradients of one update's loss, in float32."""
    engine = engine_with(config, weights)
    engine.micro_step(batch, np.array(mtp_loss_weights) / head_weight_sums(batch, config.mtp_heads))
    return engine.gradients()


def batch_of(seed: int, *, documents: bool) -> Batch:
    """Random tokens; with documents, borders within the rows and weights of which some are 0."""
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(VOCAB, size=(2, ROWS, CONTEXT)).astype(np.int32)
    document, weight = np.zeros(tokens.shape, np.int32), np.ones(tokens.shape, np.float32)
    if documents:
        document = np.cumsum(rng.random(tokens.shape) < 0.2, axis=1).astype(np.int32)
        weight = (rng.random(tokens.shape) * (rng.random(tokens.shape) < 0.8)).astype(np.float32)
    return Batch(tokens, targets, document, weight)


def errors(found: Mapping[str, np.ndarray], exact: Mapping[str, np.ndarray]) -> dict[str, float]:
    """||found - exact|| / ||exact|| of every tensor but the key biases."""
    assert found.keys() == exact.keys() and len(found) > 20
    out = {}
    for name in (name for name in exact if not name.endswith(".key")):
        size = float(np.linalg.norm(exact[name]))
        assert found[name].shape == exact[name].shape and size > 0, name
        out[name] = float(np.linalg.norm(found[name] - exact[name])) / size
    return out


def assert_key_biases_vanish(found: Mapping[str, np.ndarray]) -> None:
    """Every key bias's gradient is at most FLOOR times the query bias's."""
    for name in (name for name in found if name.endswith(".key")):
        query = float(np.linalg.norm(found[name.removesuffix("key") + "query"]))
        assert float(np.linalg.norm(found[name])) <= FLOOR * query and query > 0, name


def split_bias(gradients: Mapping[str, np.ndarray]) -> Weights:
    """The gradients with each bias of queries, keys and values in three."""
    out = dict(gradients)
    for name in [name for name in gradients if name.endswith(("qkv.bias", "c_attn.bias"))]:
        parts = np.split(out.pop(name), 3)
        out |= {f"{name}.{part}": array for part, array in zip(("query", "key", "value"), parts, strict=True)}
    return out


def transformers_gradients(model: Any, batch: Batch) -> Weights:
    """Autograd's gradients of the mean loss, by transformers' names."""
    model.zero_grad()
    logits = model(torch.from_numpy(batch.tokens).long()).logits
    torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(batch.targets).flatten().long()
    ).backward()
    return split_bias({name: parameter.grad.numpy().copy() for name, parameter in model.named_parameters()})


@NAMES
@pytest.mark.parametrize("kind", ["trained", "scaled_up"])
def test_through_the_export(name: str, kind: str, tmp_path: Path) -> None:
    """Would catch a backward pass that is not the forward's, against the model that transformers makes of the
    export.

    Where attention looks at one token, the gradient of queries and keys is a difference of nearly equal
    numbers, of which no float32 keeps four digits: there, a tensor may have OTHER_ORDER times the error of
    PyTorch's float32 gradient.
    """
    config, batch = MODELS[name], batch_of(1, documents=False)
    weights = {"trained": trained, "scaled_up": scaled_up}[kind](config)
    model = exported(config, weights, tmp_path)
    theirs = transformers_gradients(model, batch)
    exact = transformers_gradients(in_float64(model, config), batch)
    gradients = step_gradients(config, weights, batch, (1.0,) + (0.0,) * (config.mtp_heads - 1))
    ours = split_bias((llama_weights if config.position == "rope" else gpt2_weights)(gradients, config))
    found, peer = errors(ours, exact), errors(theirs, exact)
    worst = max(found, key=lambda tensor: found[tensor])
    print(
        f"{name}, {kind}: worst {worst} {found[worst]:.2g}, PyTorch's {peer[worst]:.2g}, its worst "
        f"{max(peer.values()):.2g}"
    )
    for tensor, error in found.items():
        allowed = LIMIT if kind == "trained" else max(LIMIT, OTHER_ORDER * peer[tensor])
        assert error <= allowed, f"{tensor}: {error}, allowed {allowed}"
    assert sum(tensor.endswith(".key") for tensor in ours) == (config.layers if name == "gpt2" else 0)
    assert_key_biases_vanish(ours)
    assert_key_biases_vanish(theirs)


@NAMES
@pytest.mark.parametrize("documents", [False, True])
def test_every_prediction_head(name: str, documents: bool) -> None:
    """Would catch a head trained on the wrong token, across a border, with the wrong weight, or its gradient
    lost.
    """
    config = MODELS[name]
    weights, batch = trained(config), batch_of(2, documents=documents)
    p = torch_model.parameters(weights, torch.float64)
    mtp_loss_weights = MTP_WEIGHTS[: config.mtp_heads]
    torch_model.loss(config, p, batch, mtp_loss_weights).backward()
    exact = {key: parameter.grad.numpy() for key, parameter in p.items() if parameter.grad is not None}
    ours = split_bias(step_gradients(config, weights, batch, mtp_loss_weights))
    found = errors(ours, split_bias(exact))
    worst = max(found, key=lambda tensor: found[tensor])
    print(f"{name}: {len(found)} tensors, worst {worst} {found[worst]:.2g}")
    assert found[worst] <= LIMIT, worst
    assert_key_biases_vanish(ours)
