"""One update, its learning rate, and the loss on held-out text.

An update accumulates the gradients of grad_accum_steps micro-batches and applies AdamW or Muon once. Its loss
is

    loss = sum_k mtp_loss_weights[k] * sum(weight_k * nll_k) / sum(weight_k)

where nll_k and weight_k are the losses and loss weights of the targets of head k (weight 0: masked), and both
inner sums go over the whole update. So gradient accumulation equals one large batch, even with masked
tokens.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kernels.batch import Batch, head_weight_sums
from kernels.engine import Engine
from stages.training_settings import Training


@dataclass(frozen=True)
class Outcome:
    """The result of an update: the `loss` of head 0 and the `total_loss` of all heads, weighted by
    mtp_loss_weights, in nats; `grad_norm` before clipping.
    """

    loss: float
    total_loss: float
    grad_norm: float


def learning_rate(step: int, training: Training) -> float:
    """The learning rate of update `step`, counted from 0.

    Warm-up is linear and never 0: (step + 1) / warmup_steps. Then cosine falls along half a cosine; wsd stays
    constant and falls linearly over the last cooldown_steps. Both would reach min_lr one step after the last.
    """
    warmup = min(1.0, (step + 1) / max(1, training.warmup_steps))
    if training.schedule == "cosine":
        progress = (step - training.warmup_steps) / max(1, training.steps - training.warmup_steps)
        factor = 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress))))
    else:
        factor = min(1.0, (training.steps - step) / max(1, training.cooldown_steps))
    return warmup * (training.min_lr + (training.lr - training.min_lr) * factor)


def train_step(
    engine: Engine, batches: Sequence[Batch], mtp_loss_weights: Sequence[float], lr: float,
    while_gpu_computes: Callable[[], None] = lambda: None,
    interruptible: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Outcome:  # fmt: skip
    """One update over these micro-batches.

    Args:
        engine: the model.
        batches: this rank's micro-batches.
        mtp_loss_weights: the weight of each prediction head in the loss.
        lr: the learning rate.
        while_gpu_computes: called while a GPU still computes the update.
        interruptible: makes the context in which a micro-step runs. An interrupt may end it without harm,
            because only engine.update changes parameters and moments.

    Raises:
        ValueError: every target of head 0 has weight 0.
    """
    head_weights = np.asarray(mtp_loss_weights, np.float64)
    own_sums = [head_weight_sums(batch, len(head_weights)) for batch in batches]
    sums = np.sum([one for of_rank in engine.ranks.all_gather_object(own_sums) for one in of_rank], axis=0)
    if not sums[0] > 0:
        raise ValueError(
            "no target in this update is supervised: every loss weight of its micro-batches is 0"
        )
    inverse_sums = np.divide(1.0, sums, out=np.zeros_like(sums), where=sums > 0)  # 0: a head without targets
    for index, batch in enumerate(batches, start=1):
        with interruptible():
            engine.micro_step(batch, head_weights * inverse_sums, last=index == len(batches))
    engine.reduce()
    update = engine.update(lr, while_gpu_computes)
    losses = update.nll_sums * inverse_sums
    return Outcome(float(losses[0]), float(head_weights @ losses), float(update.grad_norm))


class HeldOut(Protocol):
    """Held-out batches: EvalWindows or EvalConversations."""

    def __len__(self) -> int:
        """Number of batches."""

    def batch(self, index: int) -> Batch:
        """Batch `index`."""


def held_out_nats(
    engine: Engine, held_out: HeldOut, check: Callable[[], None] = lambda: None
) -> tuple[float, float]:
    """(sum of weight * nll, sum of weight) of head 0 over held-out batches, in float64.

    Args:
        engine: the model. Ranks share the batches, and all get the sums.
        held_out: the batches.
        check: called before each round of batches; may raise Interrupted.
    """

    def measure(index: int) -> tuple[float, float]:
        batch = held_out.batch(index)
        nats = np.sum(engine.score(batch) * batch.loss_weight, dtype=np.float64)
        return float(nats), float(np.sum(batch.loss_weight, dtype=np.float64))

    nats = targets = 0.0
    for more_nats, more_targets in engine.ranks.spread(len(held_out), measure, check):
        nats += more_nats
        targets += more_targets
    return nats, targets
