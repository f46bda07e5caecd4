"""The loss curve of our engine over that of another, from the same weights on the same tokens.

    python -m tests.parity.curve --weights init.npz --losses curve.json --shard train_00000.bin --heads 4

The other engine trained a model of the euler or GPT-2 parts: step s on the tokens s*B*T to (s+1)*B*T
(inclusive) of the shard, row by row, at a learning rate of 6e-4 * min(1, (s+1) / 20), with AdamW (0.9, 0.95,
eps 1e-8, decay 0.1 on matrices) after clipping the gradient to norm 1; its loss is the mean of its prediction
heads' means.

--weights   its initial weights by our names, .npz; `head.weight` may stack its heads' vocabularies in one
axis, without padding
--losses    a line of JSON with `losses`, `batch` (B) and `seq` (T)
--heads     query heads, which no shape tells
--device, --precision    what ours computes on and in: auto and fp32 where they are not given

Prints a line of JSON; the exit code is 1 where a loss differs by more than 0.1 % (tf32: 0.2 %, bf16: 0.5 %).

A curve can be compared only where it is determined: while a loss lies on a plateau, as that of euler_1m does
with 16 or more rows of 128 tokens, rounding errors grow a hundredfold in twenty steps, and our own weights,
changed by 1e-7 of themselves, part from themselves by 0.09 % within 85 steps. With 8 rows of 128 that stays
at 0.001 % over 200. PyTorch compiled and not compiled part by 0.16 % with 32 rows.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kernels.batch import Batch, head_weight_sums
from kernels.config import ModelConfig, Numerics
from kernels.engine import Engine
from kernels.optimizers import AdamW
from stages.shard_format import read_shard

LIMITS = {"fp32": 1e-3, "tf32": 2e-3, "bf16": 5e-3}
PEAK, WARMUP = 6e-4, 20


def config_of(weights: Mapping[str, np.ndarray], heads: int, context: int) -> ModelConfig:
    """The model that these weights belong to."""
    vocab_size, dim = weights["tok.weight"].shape
    rows = weights["blocks.0.qkv.weight"].shape[0]
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "layers": 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks.")),
        "heads": heads,
        "kv_heads": (rows - dim) // 2 // (dim // heads),
        "dim": dim,
        "ffn": weights["blocks.0.down.weight"].shape[1],
        "mtp_heads": weights["head.weight"].size // (vocab_size * dim),
    }
    if "pos.weight" in weights:
        parts: dict[str, Any] = {
            "norm": "layernorm",
            "position": "learned",
            "mlp": "gelu",
            "bias": True,
            "tied_head": True,
        }
        return ModelConfig(**sizes, context=len(weights["pos.weight"]), **parts)
    return ModelConfig(**sizes, context=context)


def padded(weights: Mapping[str, np.ndarray], config: ModelConfig) -> dict[str, np.ndarray]:
    """The weights as our engine takes them: heads on an axis of their own, zero rows behind each
    vocabulary.
    """
    out = dict(weights)
    shape = {
        "tok.weight": (config.vocab_size, config.dim),
        "head.weight": (config.mtp_heads, config.vocab_size, config.dim),
    }
    for name in shape if not config.tied_head else ("tok.weight",):
        array = out[name].reshape(shape[name])
        rows = [(0, 0)] * array.ndim
        rows[-2] = (0, config.padded_vocab - config.vocab_size)
        out[name] = np.pad(array, rows)
    if config.tied_head:
        assert config.mtp_heads == 1 and np.array_equal(out.pop("head.weight"), weights["tok.weight"])
    return out


def batch_at(tokens: np.ndarray, step: int, rows: int, length: int) -> Batch:
    """The micro-batch of a step."""
    first, shape = step * rows * length, (rows, length)
    inp, targets = (
        np.array(tokens[first + shift : first + shift + rows * length], np.int32).reshape(shape)
        for shift in (0, 1)
    )
    return Batch(inp, targets, np.zeros(shape, np.int32), np.ones(shape, np.float32))


def learning_rate(step: int) -> float:
    """Warm-up, then constant."""
    return PEAK * min(1.0, (step + 1) / WARMUP)


def our_losses(
    config: ModelConfig,
    weights: Mapping[str, np.ndarray],
    tokens: np.ndarray,
    *,
    steps: int,
    rows: int,
    length: int,
    numerics: Numerics = Numerics(),  # noqa: B008 (immutable)
    device: str = "auto",
) -> list[float]:
    """The mean of all heads' means before each update."""
    optimizer = AdamW(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_clip=1.0)
    engine = Engine(config, numerics, micro_batch=rows, device=device, optimizer=optimizer)
    engine.load(padded(weights, config))
    losses = []
    for step in range(steps):
        batch = batch_at(tokens, step, rows, length)
        sums = head_weight_sums(batch, config.mtp_heads)
        engine.micro_step(batch, 1 / (config.mtp_heads * sums))
        update = engine.update(learning_rate(step))
        losses.append(float((update.nll_sums / sums).mean()))
    return losses


def compare(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """The largest relative difference, at which step, and how far the loss fell to its lowest."""
    difference = np.abs(np.array(ours) - theirs) / theirs
    worst = int(difference.argmax())
    fell = 1 - min(theirs) / theirs[0]
    return {"steps": len(theirs), "largest": float(difference[worst]), "at_step": worst, "first": theirs[0],
            "last": theirs[-1], "fell": fell}  # fmt: skip


def main() -> None:
    """Runs the comparison that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option in ("--weights", "--losses", "--shard"):
        parser.add_argument(option, type=Path, required=True)
    parser.add_argument("--heads", type=int, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", choices=LIMITS, default="fp32")
    args = parser.parse_args()
    curve = json.loads(args.losses.read_text(encoding="utf-8").splitlines()[-1])
    with np.load(args.weights) as file:
        weights = {name: file[name] for name in file.files}
    tokens = read_shard(args.shard)
    config = config_of(weights, args.heads, curve["seq"])
    sizes = {"steps": len(curve["losses"]), "rows": curve["batch"], "length": curve["seq"]}
    computed: dict[str, Any] = {"numerics": Numerics(precision=args.precision), "device": args.device}
    result = compare(our_losses(config, weights, tokens, **sizes, **computed), curve["losses"])
    print(json.dumps(result))
    sys.exit(int(not result["largest"] <= LIMITS[args.precision]))


if __name__ == "__main__":
    main()
