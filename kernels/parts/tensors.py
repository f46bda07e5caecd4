"""What a pass of the model works on: operations, buffers, weights and gradients."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernels.arena import Arena
from kernels.config import ModelConfig, Numerics
from kernels.ops import Ops

Array = np.ndarray[Any, Any]


class Tensors:
    """What a pass works on: the device's operations, its buffers, and the weights and gradients by parameter
    name.

    Args:
        config, numerics: what to compute.
        ops: the operations.
        arena: the buffers of kernels.memory.activation_plan.
        compute_weights: in the precision that matmuls read.
        stream_weights: as they are trained. The embedding, the norms and the biases that norms add read
            these, because they make up the residual stream.
        fp8_weights: handles of the blocks' weights in FP8, which training passes read instead; empty without
            fp8.
        grads: empty if only forward passes are made.
    """

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        ops: Ops,
        arena: Arena,
        compute_weights: Mapping[str, Array],
        stream_weights: Mapping[str, Array],
        fp8_weights: Mapping[str, Any],
        grads: Mapping[str, Array],
    ) -> None:
        self.config, self.numerics, self.ops, self.arena = config, numerics, ops, arena
        self.compute_weights, self.stream_weights = compute_weights, stream_weights
        self.fp8_weights, self.grads = fp8_weights, grads

    def weight(self, linear: str, *, training: bool) -> Any:
        """A linear layer's weight as matmuls read it; `linear` is the parameter's name without its end."""
        name = f"{linear}.weight"
        return (
            self.fp8_weights.get(name, self.compute_weights[name]) if training else self.compute_weights[name]
        )

    def bias(self, linear: str) -> Array | None:
        """A linear layer's bias in the precision of matmuls, if it has one."""
        return self.compute_weights.get(f"{linear}.bias")

    def matmul_backward(self, linear: str, dinp: Array, dout: Array, inp: Array, *, accumulate: bool) -> None:
        """dinp, and the weight's gradient, which is overwritten unless `accumulate`."""
        weight = self.weight(linear, training=True)
        self.ops.matmul_backward(
            dinp, self.grads[f"{linear}.weight"], dout, inp, weight, add_dweight=accumulate
        )

    def bias_backward(self, linear: str, dout: Array) -> None:
        """The bias's gradient, if there is a bias."""
        if self.config.bias:
            self.ops.bias_backward(self.grads[f"{linear}.bias"], dout)
