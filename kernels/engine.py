"""The engine: one model with its parameters, gradients, moments and activations on one device."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    Args:
        tokens:      (B, T) int32, the input ids.
        targets:     (B, T) int32, the id that follows each token.
        document:    (B, T) int32, equal within a document; attention and positions stay within it.
        loss_weight: (B, T) fp32, the weight of each target in the loss; 0 leaves it out.
    """

    tokens: NDArray[np.int32]
    targets: NDArray[np.int32]
    document: NDArray[np.int32]
    loss_weight: NDArray[np.float32]
