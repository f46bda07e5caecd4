"""Trains small models on the ranks of `mpiexec`, and saves what rank 0 holds afterwards.

    mpiexec -n 3 python -m tests.kernels.ranks_program OUT.npz

Keys of the file: MODEL/OPTIMIZER/{sharded,plain}/NAME.
"""

import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from kernels.batch import Batch, head_weight_sums
from kernels.config import ModelConfig, Numerics
from kernels.engine import Engine
from kernels.optimizers import OPTIMIZERS
from kernels.ranks import Alone, Link, MpiLink
from tests.compare import Arrays
from tests.gradient_check import MODELS, MTP_WEIGHTS

UPDATES, ROWS, LR = 3, 2, 1e-2


def micro_batch(model: str, number: int) -> Batch:
    """Micro-batch `number` of a run: documents, and loss weights of which the share that is 0 differs."""
    return micro_batch_of(MODELS[model], number)


def micro_batch_of(config: ModelConfig, number: int) -> Batch:
    """See micro_batch."""
    rng = np.random.default_rng([3, number])
    shape = ROWS, config.context
    ids = rng.integers(config.vocab_size, size=(ROWS, config.context + 1), dtype=np.int32)
    document = np.cumsum(rng.random(shape) < 0.2, axis=1, dtype=np.int32)
    weight = (rng.random(shape) * (rng.random(shape) < 0.2 + 0.2 * (number % 4))).astype(np.float32)
    return Batch(ids[:, :-1].copy(), ids[:, 1:].copy(), document, weight)


def make(model: str, optimizer: str, link: Link | None = None, **kind: Any) -> Engine:
    """An engine of one of the gradient check's models."""
    return Engine(
        MODELS[model], Numerics(), micro_batch=ROWS, threads=1, link=link or Alone(),
        optimizer=OPTIMIZERS[optimizer](grad_clip=0.5), **kind,
    )  # fmt: skip


def head_scale(engine: Engine, batches: list[Batch]) -> np.ndarray[Any, Any]:
    """head_scale of an update over these micro-batches."""
    heads = engine.config.mtp_heads
    return np.array(MTP_WEIGHTS[:heads]) / sum(head_weight_sums(batch, heads) for batch in batches)


def train(engine: Engine, model: str, updates: range, accum: int) -> Arrays:
    """Updates of `accum` micro-batches each, of which every rank makes its share; then the state."""
    norms, sums, share = [], [], accum // engine.ranks.size
    first = engine.ranks.rank * share
    for update in updates:
        batches = [micro_batch(model, update * accum + i) for i in range(accum)]
        scale = head_scale(engine, batches)
        for i in range(first, first + share):
            engine.micro_step(batches[i], scale, last=i == first + share - 1)
        engine.reduce()
        result = engine.update(LR)
        norms.append(result.grad_norm)
        sums.append(result.nll_sums)
    return {**engine.state(), "norms": np.array(norms), "sums": np.array(sums)}


def main() -> None:
    """Every model, optimizer and way to share; a resume in the middle of each."""
    link, results = MpiLink(), dict[str, np.ndarray[Any, Any]]()
    accum = link.size if link.size != 3 else 6
    for model, optimizer, sharded in product(("euler", "gpt2"), OPTIMIZERS, (True, False)):
        engine = make(model, optimizer, link, shard_optimizer=sharded)
        found = train(engine, model, range(UPDATES), accum)
        before = make(model, optimizer, link, shard_optimizer=sharded)
        state = train(before, model, range(1), accum)
        after = make(model, optimizer, link, shard_optimizer=not sharded, seed=7)
        after.load_state(state if link.rank == 0 else None)
        resumed = train(after, model, range(1, UPDATES), accum)
        names = ("parameters", *engine.moments, "norms", "sums")
        found |= {f"resumed_{name}": resumed[name] for name in names if name in resumed}
        overlapping = make(model, optimizer, link, shard_optimizer=sharded, overlap=True)
        overlapped = train(overlapping, model, range(UPDATES), accum)
        found |= {f"overlapped_{name}": overlapped[name] for name in names if name in overlapped}
        weights = engine.weights()
        found |= {f"weights_{name}": weight for name, weight in weights.items()}
        results |= {
            f"{model}/{optimizer}/{'sharded' if sharded else 'plain'}/{name}": array
            for name, array in found.items()
        }
    if link.rank == 0:
        np.savez(Path(sys.argv[1]), allow_pickle=False, **results)


if __name__ == "__main__":
    main()
