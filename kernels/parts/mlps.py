"""MLPs: the second half of a block."""

from typing import Any, Protocol

import numpy as np

from kernels.config import ModelConfig
from kernels.parts.tensors import Tensors

Array = np.ndarray[Any, Any]


class Mlp(Protocol):
    """The MLP of a block: linear layer `up`, activation, linear layer `down`.

    down's bias is added by the next norm, which also sums its gradient.

    Attributes:
        in_decode_step: whether decode_step.cu computes it.
    """

    in_decode_step: bool

    def activations(self, c: ModelConfig) -> dict[str, int]:
        """Width of each activation that is saved, by buffer name."""

    def gradients(self, c: ModelConfig) -> dict[str, int]:
        """Width of each activation gradient, by buffer name."""

    def muon_splits(self, c: ModelConfig) -> tuple[int, ...]:
        """Rows of each matrix that is stacked in up's weight."""

    def forward(self, t: Tensors, block: str, i: int, out: Array, inp: Array, *, training: bool) -> None:
        """out (rows, C), without down's bias, from inp (rows, C); `i` is the layer, `block` the prefix of its
        names.
        """

    def backward(
        self, t: Tensors, block: str, i: int, dinp: Array, dout: Array, inp: Array, *, accumulate: bool
    ) -> None:
        """dinp and the weights' gradients from dout; the latter are overwritten unless `accumulate`."""


class Swiglu:
    """down(silu(gate) * up). The first linear layer computes gate and up side by side."""

    in_decode_step = True

    def activations(self, c: ModelConfig) -> dict[str, int]:
        return {"up": c.up_dim, "act": c.ffn}

    def gradients(self, c: ModelConfig) -> dict[str, int]:
        return {"dup": c.up_dim, "dact": c.ffn}

    def muon_splits(self, c: ModelConfig) -> tuple[int, ...]:
        return c.ffn, c.ffn

    def forward(self, t: Tensors, block: str, i: int, out: Array, inp: Array, *, training: bool) -> None:
        up, act = (t.arena.rows(name, len(inp), i) for name in ("up", "act"))
        t.ops.matmul_forward(up, inp, t.weight(f"{block}up", training=training), t.bias(f"{block}up"))
        t.ops.swiglu_forward(act, up)
        t.ops.matmul_forward(out, act, t.weight(f"{block}down", training=training))

    def backward(
        self, t: Tensors, block: str, i: int, dinp: Array, dout: Array, inp: Array, *, accumulate: bool
    ) -> None:
        up, act, dup, dact = (t.arena.rows(name, len(inp), i) for name in ("up", "act", "dup", "dact"))
        if t.numerics.recompute == "mlp":
            t.ops.swiglu_forward(act, up)
        t.matmul_backward(f"{block}down", dact, dout, act, accumulate=accumulate)
        t.ops.swiglu_backward(dup, dact, up)
        t.matmul_backward(f"{block}up", dinp, dup, inp, accumulate=accumulate)
        t.bias_backward(f"{block}up", dup)


class Gelu:
    """down(gelu(up)). GELU is fused with a matmul: forward with up's, backward with down's."""

    in_decode_step = True

    def activations(self, c: ModelConfig) -> dict[str, int]:
        return {"up": c.up_dim, "act": c.ffn}

    def gradients(self, c: ModelConfig) -> dict[str, int]:
        return {"dup": c.up_dim}

    def muon_splits(self, c: ModelConfig) -> tuple[int, ...]:
        return (c.ffn,)

    def forward(self, t: Tensors, block: str, i: int, out: Array, inp: Array, *, training: bool) -> None:
        up, act = (t.arena.rows(name, len(inp), i) for name in ("up", "act"))
        bias = t.bias(f"{block}up")
        weight, down = (t.weight(f"{block}{linear}", training=training) for linear in ("up", "down"))
        if training and t.ops.fp8:  # one operation, so that act is cast without being stored
            t.ops.fp8.fp8_mlp_forward(out, act, up, inp, weight, bias, down)
        else:
            t.ops.matmul_gelu_forward(act, up, inp, weight, bias)
            t.ops.matmul_forward(out, act, down)

    def backward(
        self, t: Tensors, block: str, i: int, dinp: Array, dout: Array, inp: Array, *, accumulate: bool
    ) -> None:
        up, act, dup = (t.arena.rows(name, len(inp), i) for name in ("up", "act", "dup"))
        dweight, ddown = (t.grads[f"{block}{linear}.weight"] for linear in ("up", "down"))
        weight, down = (t.weight(f"{block}{linear}", training=True) for linear in ("up", "down"))
        dbias = t.grads.get(f"{block}up.bias")
        if t.ops.fp8:
            t.ops.fp8.fp8_mlp_backward(
                dinp, dup, dweight, dbias, ddown, dout, up, weight, down, add_dweight=accumulate
            )
            return
        if t.numerics.recompute == "mlp":
            t.ops.gelu_forward(act, up)
        t.ops.matmul_gelu_backward(dup, ddown, dout, act, up, down, dbias, add_dweight=accumulate)
        t.matmul_backward(f"{block}up", dinp, dup, inp, accumulate=accumulate)
