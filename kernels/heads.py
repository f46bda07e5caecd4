"""The prediction heads: loss and gradient of a training pass, scores of held-out text."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.model import Transformer

Array = np.ndarray[Any, Any]


class Heads:
    """The heads of one model, one after the other: their logits share a buffer.

    Args:
        model: the model, with its operations, buffers and weights.
    """

    def __init__(self, model: Transformer) -> None:
        self._model, self._arena, self._config = model, model.tensors.arena, model.config

    def loss_and_gradient(
        self, dnorm: Array, norm: Array, targets: Array, loss_weight: Array, dnll: Array, *, accumulate: bool
    ) -> None:
        """Adds each head's weighted loss to the buffer nll_sums, and its weight's gradient.

        Args:
            dnorm: (rows, C), overwritten with the gradient of norm.
            norm: (rows, C), the output of the last norm.
            targets: (K, rows) int32.
            loss_weight: (K, rows) fp32, of each target in the sums.
            dnll: (K, rows), the derivative of the whole update's loss with respect to each target's nll.
            accumulate: whether the heads' gradients are added to what is there.
        """
        ops, c, rows = self._model.tensors.ops, self._config, len(norm)
        sums, nll = self._arena.whole("nll_sums"), self._arena.rows("nll", rows)
        for k in range(c.mtp_heads):
            for part in self._parts(rows):
                # dlogits take the memory of the logits.
                dlogits = self._model.head_logits(k, norm[part])
                ops.cross_entropy_backward(
                    dlogits, nll[part], targets[k, part], dnll[k, part], vocab_size=c.vocab_size,
                    softcap=c.logit_softcap,
                )  # fmt: skip
                self._model.head_backward(
                    dnorm[part], k, dlogits, norm[part], accumulate=accumulate or part.start > 0
                )
            ops.weighted_sum_forward(sums[k : k + 1].reshape(()), nll, loss_weight[k])

    def scores(self, norm: Array, targets: Array) -> tuple[Array, NDArray[np.bool_]]:
        """The nll of each target, and whether it is the likeliest token: (heads, rows) of the host, for the
        first heads that targets (heads, rows) has.
        """
        ops, c, rows = self._model.tensors.ops, self._config, len(norm)
        nll, correct = (self._arena.rows(name, rows) for name in ("nll", "correct"))
        found = np.empty(targets.shape, ops.dtype), np.empty(targets.shape, np.bool_)
        for k in range(len(targets)):
            for part in self._parts(rows):
                ops.cross_entropy_forward(
                    nll[part], correct[part], self._model.head_logits(k, norm[part]), targets[k, part],
                    vocab_size=c.vocab_size, softcap=c.logit_softcap,
                )  # fmt: skip
            found[0][k], found[1][k] = ops.download(nll), ops.download(correct)
        return found

    def _parts(self, rows: int) -> list[slice]:
        """All positions in parts whose logits fit their buffer."""
        step = len(self._arena.whole("logits"))
        return [slice(first, first + step) for first in range(0, rows, step)]
