"""The same transformer in PyTorch, over our parameter names, in any precision: autograd is the judge of our
gradients.

x <- x + attention(norm(x))        x <- x + mlp(norm(x))
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.batch import Batch, head_targets
from kernels.config import ModelConfig

Parameters = Mapping[str, Tensor]


def parameters(weights: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Leaves of autograd with these weights."""
    return {name: torch.tensor(array).to(dtype).requires_grad_() for name, array in weights.items()}


def norm_of(c: ModelConfig, p: Parameters, name: str, x: Tensor) -> Tensor:
    """RMSNorm or LayerNorm over the last axis."""
    if c.norm == "rmsnorm":
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + c.norm_eps) * p[f"{name}.weight"]
    return F.layer_norm(x, (c.dim,), p[f"{name}.weight"], p[f"{name}.bias"], c.norm_eps)


def rotated(x: Tensor, position: Tensor, base: float) -> Tensor:
    """RoPE on x (B, H, T, D): the pair (i, i + D / 2) turned by position * base^(-2 i / D)."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = (position.double()[:, None, :, None] * frequency).to(torch.float64)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def final_stream(c: ModelConfig, p: Parameters, tokens: Tensor, document: Tensor) -> Tensor:
    """The normalised stream (B, T, C) after the last block; attention and positions stay within a
    document.
    """
    batch, length = tokens.shape
    index = torch.arange(length)
    begins = torch.ones_like(document, dtype=torch.bool)
    begins[:, 1:] = document[:, 1:] != document[:, :-1]
    start = torch.where(begins, index, 0).cummax(dim=1).values
    seen = (index[None, None] <= index[None, :, None]) & (index[None, None] >= start[:, :, None])  # (B, T, T)

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"] if c.bias else None)

    x = F.embedding(tokens, p["tok.weight"])
    if c.position == "learned":
        x = x + F.embedding(index - start, p["pos.weight"])
    for i in range(c.layers):
        block = f"blocks.{i}."
        qkv = (
            linear(f"{block}qkv", norm_of(c, p, f"{block}norm1", x))
            .view(batch, length, -1, c.head_dim)
            .transpose(1, 2)
        )
        q, k, v = qkv.split((c.heads, c.kv_heads, c.kv_heads), dim=1)
        if c.qk_norm != "none":
            q, k = (
                F.rms_norm(t, (c.head_dim,), p.get(f"{block}{name}.weight"), c.norm_eps)
                for t, name in ((q, "q_norm"), (k, "k_norm"))
            )
        if c.position == "rope":
            q, k = rotated(q, index - start, c.rope_base), rotated(k, index - start, c.rope_base)
        k, v = (t.repeat_interleave(c.heads // c.kv_heads, dim=1) for t in (k, v))
        scores = (q @ k.transpose(-1, -2)) * c.head_dim**-0.5
        attended = torch.softmax(scores.masked_fill(~seen[:, None], float("-inf")), dim=-1) @ v
        x = x + linear(f"{block}proj", attended.transpose(1, 2).reshape(batch, length, c.dim))
        up = linear(f"{block}up", norm_of(c, p, f"{block}norm2", x))
        if c.mlp == "swiglu":
            gate, value = up.chunk(2, dim=-1)
            act = F.silu(gate) * value
        else:
            act = F.gelu(up, approximate="tanh")
        x = x + linear(f"{block}down", act)
    return norm_of(c, p, "norm", x)


def logits(c: ModelConfig, p: Parameters, stream: Tensor, head: int = 0) -> Tensor:
    """(B, T, V) of one prediction head."""
    weights = [*p.get("head.weight", ())]
    if c.tied_head:
        weights.insert(0, p["tok.weight"])
    return F.linear(stream, weights[head][: c.vocab_size])


def loss(c: ModelConfig, p: Parameters, batch: Batch, mtp_loss_weights: Sequence[float]) -> Tensor:
    """sum over heads k of mtp_loss_weights[k] * (sum of weight * nll) / (sum of weight), each sum over the
    head's own targets.
    """
    stream = final_stream(c, p, torch.from_numpy(batch.tokens).long(), torch.from_numpy(batch.document))
    targets, weights = (torch.from_numpy(array) for array in head_targets(batch, c.mtp_heads))
    total = stream.new_zeros(())
    for k in range(c.mtp_heads):
        nll = F.cross_entropy(
            logits(c, p, stream, k).flatten(0, 1), targets[k].flatten().long(), reduction="none"
        )
        weight = weights[k].flatten().to(nll.dtype)
        total = total + mtp_loss_weights[k] * (weight * nll).sum() / weight.sum()
    return total
