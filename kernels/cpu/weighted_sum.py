"""The weighted sum of the rows' losses."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]


def weighted_sum_forward(total: Array, nll: Array, weight: Array) -> None:
    """total += sum of weight * nll, in fp64.

    A row of weight 0 adds nothing, even if its nll is not finite.

    Args:
        total:  () fp64, accumulated.
        nll:    (rows,), nats.
        weight: (rows,).
    """
    total += np.sum(np.where(weight == 0, 0, nll) * weight, dtype=np.float64)
