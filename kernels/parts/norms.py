"""Norms: what a block applies to the residual stream before attention and before the MLP."""

from typing import Any, ClassVar, Protocol

import numpy as np

from kernels.ops import Ops

Array = np.ndarray[Any, Any]


class Norm(Protocol):
    """A norm, alone before the first block and after a residual addition elsewhere.

    Attributes:
        parameters: standard deviation of the initial values of each parameter; None: ones.
        statistics: what is saved per position for the backward pass.
        one_launch: whether decode_step.cu computes it.
    """

    parameters: ClassVar[dict[str, float | None]]
    statistics: ClassVar[tuple[str, ...]]
    one_launch: bool

    def forward(
        self, ops: Ops, out: Array, saved: list[Array], inp: Array, weights: list[Array], eps: float
    ) -> None: ...

    def residual_forward(
        self, ops: Ops, residual_out: Array, out: Array, saved: list[Array], residual: Array, branch: Array,
        branch_bias: Array | None, weights: list[Array], eps: float,
    ) -> None: ...  # fmt: skip

    def residual_backward(
        self, ops: Ops, dinp: Array, dweights: list[Array], dbranch_bias: Array | None, dresidual_out: Array | None,
        dout: Array, residual_out: Array, weight: Array, saved: list[Array],
    ) -> None: ...  # fmt: skip


class RmsNorm:
    """out = x / rms(x) * weight."""

    parameters: ClassVar[dict[str, float | None]] = {"weight": None}
    statistics: ClassVar[tuple[str, ...]] = ("rstd",)
    one_launch = True

    def forward(
        self, ops: Ops, out: Array, saved: list[Array], inp: Array, weights: list[Array], eps: float
    ) -> None:
        (rstd,), (weight,) = saved, weights
        ops.rmsnorm_forward(out, rstd, inp, weight, eps=eps)

    def residual_forward(
        self, ops: Ops, residual_out: Array, out: Array, saved: list[Array], residual: Array, branch: Array,
        branch_bias: Array | None, weights: list[Array], eps: float,
    ) -> None:  # fmt: skip
        (rstd,), (weight,) = saved, weights
        ops.residual_rmsnorm_forward(residual_out, out, rstd, residual, branch, branch_bias, weight, eps=eps)

    def residual_backward(
        self, ops: Ops, dinp: Array, dweights: list[Array], dbranch_bias: Array | None, dresidual_out: Array | None,
        dout: Array, residual_out: Array, weight: Array, saved: list[Array],
    ) -> None:  # fmt: skip
        (rstd,), (dweight,) = saved, dweights
        ops.residual_rmsnorm_backward(
            dinp, dweight, dbranch_bias, dresidual_out, dout, residual_out, weight, rstd
        )


class LayerNorm:
    """out = (x - mean(x)) / std(x) * weight + bias."""

    parameters: ClassVar[dict[str, float | None]] = {"weight": None, "bias": 0.0}
    statistics: ClassVar[tuple[str, ...]] = ("mean", "rstd")
    one_launch = True

    def forward(
        self, ops: Ops, out: Array, saved: list[Array], inp: Array, weights: list[Array], eps: float
    ) -> None:
        (mean, rstd), (weight, bias) = saved, weights
        ops.layernorm_forward(out, mean, rstd, inp, weight, bias, eps=eps)

    def residual_forward(
        self, ops: Ops, residual_out: Array, out: Array, saved: list[Array], residual: Array, branch: Array,
        branch_bias: Array | None, weights: list[Array], eps: float,
    ) -> None:  # fmt: skip
        (mean, rstd), (weight, bias) = saved, weights
        ops.residual_layernorm_forward(
            residual_out, out, mean, rstd, residual, branch, branch_bias, weight, bias, eps=eps
        )

    def residual_backward(
        self, ops: Ops, dinp: Array, dweights: list[Array], dbranch_bias: Array | None, dresidual_out: Array | None,
        dout: Array, residual_out: Array, weight: Array, saved: list[Array],
    ) -> None:  # fmt: skip
        (mean, rstd), (dweight, dbias) = saved, dweights
        ops.residual_layernorm_backward(
            dinp, dweight, dbias, dbranch_bias, dresidual_out, dout, residual_out, weight, mean, rstd
        )
