"""A micro-batch, and what the engine reads from it: where documents begin, and what each prediction head is trained on."""

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
        document:    (B, T) int32, equal within a document, whose tokens stand together; attention and positions stay within it.
        loss_weight: (B, T) fp32, the weight of each target in the loss; 0 leaves it out.

    What is made of them is kept, so that it can be made while a device still computes another batch (`prepare`): the arrays
    must not change after that.
    """

    tokens: NDArray[np.int32]
    targets: NDArray[np.int32]
    document: NDArray[np.int32]
    loss_weight: NDArray[np.float32]

    @cached_property
    def start(self) -> NDArray[np.int32]:
        """document_start of its documents."""
        return document_start(self.document)

    @cached_property
    def _heads(self) -> dict[int, tuple[NDArray[np.int32], NDArray[np.float32]]]:
        """What head_targets has made, by the number of heads."""
        return {}


def prepare(batch: Batch, mtp_heads: int) -> None:
    """Make what an engine's micro_step will need of the batch."""
    _ = batch.start
    head_targets(batch, mtp_heads)


def check(batch: Batch, micro_batch: int, context: int, vocab_size: int) -> None:
    """Refuse a batch that is larger than (micro_batch, context), of other types, or with ids from vocab_size on.

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
    """(B, T) int32: the index in its row at which each position's document begins."""
    index = np.arange(document.shape[1], dtype=np.int32)
    begins = np.ones(document.shape, np.bool_)
    begins[:, 1:] = document[:, 1:] != document[:, :-1]
    return np.maximum.accumulate(np.where(begins, index, 0), axis=1).astype(np.int32)


def head_targets(batch: Batch, mtp_heads: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Targets and weights (K, B, T) of every prediction head.

    Head k at position t is trained on targets[t + k], with that target's weight, where t + k lies in the row and in the
    same document; elsewhere the weight is 0.
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
    """(K,) fp64: the sum of each head's weights over the batch, what its loss is divided by."""
    return head_targets(batch, mtp_heads)[1].sum(axis=(1, 2), dtype=np.float64)
