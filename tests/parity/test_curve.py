"""Training beside PyTorch's autograd and AdamW, from the same weights on the same tokens: the losses stay
together.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.config import ModelConfig
from kernels.parameters import initial_weights
from tests.parity import torch_model
from tests.parity.cases import EULER, GPT2, Weights, text, tokenizer
from tests.parity.curve import LIMITS, batch_at, compare, config_of, learning_rate, our_losses

STEPS, ROWS, LENGTH = 100, 8, 32
MODELS = {
    "euler": replace(EULER, layers=2, dim=96, ffn=256, context=LENGTH, mtp_heads=4),
    "gpt2": replace(GPT2, layers=2, dim=96, ffn=256, context=LENGTH),
}


def torch_losses(config: ModelConfig, weights: Weights, tokens: np.ndarray) -> list[float]:
    """PyTorch's curve, fp32."""
    p = torch_model.parameters(weights, torch.float32)
    groups = [{"params": [t for t in p.values() if (t.dim() > 1) == matrices], "weight_decay": 0.1 * matrices}
              for matrices in (True, False)]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        loss = torch_model.loss(
            config, p, batch_at(tokens, step, ROWS, LENGTH), [1 / config.mtp_heads] * config.mtp_heads
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(p.values()), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_losses_stay_within_a_thousandth(name: str) -> None:
    """Would catch a bias correction, a decay, a clip, or a rate that is off by one step, and any slow
    drift.
    """
    config = MODELS[name]
    weights = initial_weights(config, seed=3)
    tokens = tokenizer().encode(text())
    tokens = np.tile(tokens, -(-(STEPS * ROWS * LENGTH + 1) // len(tokens)))
    flat = {key: array[..., : config.vocab_size, :] if key in ("tok.weight", "head.weight") else array
            for key, array in weights.items()}  # fmt: skip
    flat["head.weight"] = (
        flat["tok.weight"] if config.tied_head else flat["head.weight"].reshape(-1, config.dim)
    )
    assert config_of(flat, config.heads, LENGTH) == config
    ours = our_losses(config, flat, tokens, steps=STEPS, rows=ROWS, length=LENGTH)
    result = compare(ours, torch_losses(config, weights, tokens))
    print(name, result)
    assert result["largest"] <= LIMITS["fp32"]
    assert result["fell"] >= 0.3
