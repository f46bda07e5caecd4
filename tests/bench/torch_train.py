"""An euler model trained the way a PyTorch user writes it, compiled: the other side of tests.bench.training.

    python -m tests.bench.torch_train [--compile 0] [--batch 32] [--seq 128]        needs PyTorch

Fused attention and RMSNorm, heads weighted equally, clipping, fused AdamW, fp32, all threads: as fast as
stock PyTorch does it.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.config import ModelConfig
from tests.bench.engine import MODELS


class Block(nn.Module):
    """Attention and MLP, each added to the stream."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        self.norm1, self.norm2 = nn.RMSNorm(c.dim, eps=c.norm_eps), nn.RMSNorm(c.dim, eps=c.norm_eps)
        self.qkv = nn.Linear(c.dim, (c.heads + 2 * c.kv_heads) * c.head_dim, bias=False)
        self.proj = nn.Linear(c.dim, c.dim, bias=False)
        self.up = nn.Linear(c.dim, 2 * c.ffn, bias=False)
        self.down = nn.Linear(c.ffn, c.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        c, (batch, length, _) = self.c, x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, -1, c.head_dim).transpose(1, 2)
        q, k, v = qkv.split((c.heads, c.kv_heads, c.kv_heads), dim=1)

        def turn(t: Tensor) -> Tensor:
            first, second = t.chunk(2, dim=-1)
            return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)

        attended = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True, enable_gqa=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, c.dim))
        gate, up = self.up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Euler(nn.Module):
    """The whole model, to its loss."""

    def __init__(self, c: ModelConfig, length: int) -> None:
        super().__init__()
        self.c, self.tok = c, nn.Embedding(c.vocab_size, c.dim)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.dim, eps=c.norm_eps)
        self.heads = nn.ModuleList(nn.Linear(c.dim, c.vocab_size, bias=False) for _ in range(c.mtp_heads))
        frequency = c.rope_base ** (-torch.arange(0, c.head_dim, 2) / c.head_dim)
        angle = torch.outer(torch.arange(length), frequency)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean over the heads of each head's own mean."""
        x, length = self.tok(tokens), tokens.shape[1]
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        x = self.norm(x)
        losses = [
            F.cross_entropy(head(x[:, : length - k]).flatten(0, 1), targets[:, k:].flatten())
            for k, head in enumerate(self.heads)
        ]
        return torch.stack(losses).mean()


def main() -> None:
    """Train on random tokens and print the median update as a line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", choices=[name for name in MODELS if name.startswith("euler")], default="euler_1m"
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--compile", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=5)
    args = parser.parse_args()
    config = MODELS[args.model]
    model = Euler(config, args.seq)
    step = torch.compile(model) if args.compile else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    times = []
    for _ in range(args.warmup + args.steps):
        batch = torch.randint(config.vocab_size, (args.batch, args.seq + 1))
        begin = time.perf_counter()
        step(batch[:, :-1], batch[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times[args.warmup :])
    row = {
        "engine": f"torch {torch.__version__}",
        "compile": args.compile,
        "ms_per_step": round(seconds * 1e3, 1),
    }
    print(json.dumps({**row, "tokens_per_s": round(args.batch * args.seq / seconds)}))


if __name__ == "__main__":
    main()
