"""One update, its learning rate, and the loss of held-out text.

An update takes grad_accum_steps micro-batches, gradients added up, and one step of AdamW or Muon. Its loss is

    loss = sum_k mtp_loss_weights[k] * sum(weight_k * nll_k) / sum(weight_k)

over the whole update, so accumulating over small micro-batches is the same as one large one, whatever part of each counts.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from kernels.batch import Batch, head_weight_sums
from kernels.engine import Engine
from stages.training_settings import Training


@dataclass(frozen=True)
class Outcome:
    """One update: `loss` of head 0 and `total_loss` over all heads in nats, `grad_norm` before clipping."""

    loss: float
    total_loss: float
    grad_norm: float


def learning_rate(step: int, training: Training) -> float:
    """The learning rate of update `step`, counted from 0.

    Warm-up rises linearly and is never 0: (step + 1) / warmup_steps. Then cosine falls along half a cosine towards min_lr,
    which the step after the last would have; wsd stays, and falls linearly over the last cooldown_steps likewise.
    """
    warm = min(1.0, (step + 1) / max(1, training.warmup_steps))
    if training.schedule == "cosine":
        gone = (step - training.warmup_steps) / max(1, training.steps - training.warmup_steps)
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, gone))))
    else:
        share = min(1.0, (training.steps - step) / max(1, training.cooldown_steps))
    return warm * (training.min_lr + (training.lr - training.min_lr) * share)


def train_step(
    engine: Engine, batches: Sequence[Batch], mtp_loss_weights: Sequence[float], lr: float,
    meanwhile: Callable[[], None] = lambda: None, section: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Outcome:  # fmt: skip
    """One update over these micro-batches; `meanwhile` is engine.update's.

    Each micro-step runs in a `section`, which may be left: parameters and moments change in engine.update alone.

    Raises:
        ValueError: no target of head 0 counts in any of them.
    """
    weights = np.asarray(mtp_loss_weights, np.float64)
    sums = np.sum([head_weight_sums(batch, len(weights)) for batch in batches], axis=0)
    if not sums[0] > 0:
        raise ValueError(
            "an update without a single target that counts: every loss weight of its micro-batches is 0"
        )
    per_weight = np.divide(
        1.0, sums, out=np.zeros_like(sums), where=sums > 0
    )  # 0: a head that has nothing to learn here
    for batch in batches:
        with section():
            engine.micro_step(batch, weights * per_weight)
    engine.reduce()
    update = engine.update(lr, meanwhile)
    losses = update.nll_sums * per_weight
    return Outcome(float(losses[0]), float(weights @ losses), float(update.grad_norm))


def held_out_nats(engine: Engine, batches: Iterable[Batch]) -> tuple[float, float]:
    """(sum of weight * nll, sum of weight) of head 0 over held-out batches, summed in float64."""
    nats = targets = 0.0
    for batch in batches:
        nats += float(np.sum(engine.score(batch) * batch.loss_weight, dtype=np.float64))
        targets += float(np.sum(batch.loss_weight, dtype=np.float64))
    return nats, targets
