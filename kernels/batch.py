"""A micro-batch, what the engine derives from it, and what the engine measures."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    Args:
        tokens:      (B, T) int32, the input ids.
        targets:     (B, T) int32, the id that follows each token.
        document:    (B, T) int32, one number per document. Attention and positions stay within a document.
        loss_weight: (B, T) fp32, the weight of each target in the loss; 0 leaves it out.

    Derived arrays are cached, so the arrays must not change. `prepare` computes them while the GPU is busy
    with another batch.
    """

    tokens: NDArray[np.int32]
    targets: NDArray[np.int32]
    document: NDArray[np.int32]
    loss_weight: NDArray[np.float32]

    @cached_property
    def document_start(self) -> NDArray[np.int32]:
        """(B, T) int32: the index in its sequence at which each position's document begins."""
        return document_start(self.document)

    @cached_property
    def _heads(self) -> dict[int, tuple[NDArray[np.int32], NDArray[np.float32]]]:
        """Results of head_targets, by the number of heads."""
        return {}


def prepare(batch: Batch, mtp_heads: int) -> None:
    """Derive what an engine's micro_step needs of the batch."""
    _ = batch.document_start
    head_targets(batch, mtp_heads)


def validate_batch(batch: Batch, micro_batch: int, context: int, vocab_size: int) -> None:
    """Refuse a batch that is larger than (micro_batch, context), of other types, or with ids from vocab_size
    on.

    Raises:
        ValueError: it is; the message names the array.
    """
    shape = batch.tokens.shape
    if len(shape) != 2 or not 1 <= shape[0] <= micro_batch or not 1 <= shape[1] <= context:
        raise ValueError(f"tokens: expected at most ({micro_batch}, {context}), got {shape}")
    for name, dtype in (
        ("tokens", np.int32),
        ("targets", np.int32),
        ("document", np.int32),
        ("loss_weight", np.float32),
    ):
        array = getattr(batch, name)
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(f"{name}: expected {shape} {np.dtype(dtype)}, got {array.shape} {array.dtype}")
    for name in ("tokens", "targets"):
        array = getattr(batch, name)
        if array.min() < 0 or array.max() >= vocab_size:
            raise ValueError(
                f"{name}: expected ids 0 to {vocab_size - 1}, got {array.min()} to {array.max()}"
            )


def document_start(document: NDArray[np.int32]) -> NDArray[np.int32]:
    """(B, T) int32: the index in its sequence at which each position's document begins."""
    index = np.arange(document.shape[1], dtype=np.int32)
    begins = np.ones(document.shape, np.bool_)
    begins[:, 1:] = document[:, 1:] != document[:, :-1]
    return np.maximum.accumulate(np.where(begins, index, 0), axis=1).astype(np.int32)


def head_targets(batch: Batch, mtp_heads: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Targets and weights (K, B, T) of every prediction head.

    Head k at position t is trained on targets[t + k] with that target's weight, if t + k lies in the same
    sequence and document. Otherwise the weight is 0.
    """
    if mtp_heads in batch._heads:
        return batch._heads[mtp_heads]
    targets = np.zeros((mtp_heads, *batch.targets.shape), np.int32)
    weight = np.zeros(targets.shape, np.float32)
    for k in range(mtp_heads):
        end = batch.targets.shape[1] - k
        targets[k, :, :end] = batch.targets[:, k:]
        same = batch.document[:, k:] == batch.document[:, :end]
        weight[k, :, :end] = np.where(same, batch.loss_weight[:, k:], 0)
    batch._heads[mtp_heads] = targets, weight
    return targets, weight


def head_weight_sums(batch: Batch, mtp_heads: int) -> NDArray[np.float64]:
    """(K,) fp64: the sum of each head's weights over the batch. The head's loss is divided by it."""
    return head_targets(batch, mtp_heads)[1].sum(axis=(1, 2), dtype=np.float64)


@dataclass(frozen=True)
class Update:
    """What an update measured.

    Args:
        nll_sums: (K,) fp64, the sum of loss_weight * nll of each prediction head, in nats.
        grad_norm: the gradient's L2 norm before clipping.
    """

    nll_sums: NDArray[np.float64]
    grad_norm: float


@dataclass(frozen=True)
class HeadScores:
    """What each prediction head makes of a batch.

    Args:
        nll: (K, B, T) fp32, nats.
        correct: (K, B, T) bool, whether the target was the likeliest token.
        weight: (K, B, T) fp32, the weight of each position.
    """

    nll: NDArray[np.float32]
    correct: NDArray[np.bool_]
    weight: NDArray[np.float32]
