"""Norms: what a block applies to the residual stream before attention and before the MLP."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kernels.ops import Ops


@dataclass(frozen=True)
class Norm:
    """A norm: alone before the first block, fused with the residual addition before it everywhere else.

    Args:
        parameter_std: standard deviation of each parameter's initial values; None: ones.
        statistics: what is saved per position for the backward pass.
        forward: the operation (out, *statistics, inp, *parameters, eps=).
        residual_forward: the operation (residual_out, out, *statistics, residual, branch, branch_bias,
            *parameters, eps=).
        residual_backward: the operation (dinp, *dparameters, dbranch_bias, dresidual_out, dout, residual_out,
            weight, *statistics).
        in_decode_step: whether decode_step.cu computes it.
    """

    parameter_std: dict[str, float | None]
    statistics: tuple[str, ...]
    forward: Callable[[Ops], Callable[..., Any]]
    residual_forward: Callable[[Ops], Callable[..., Any]]
    residual_backward: Callable[[Ops], Callable[..., Any]]
    in_decode_step: bool = True


RMSNORM = Norm(
    parameter_std={"weight": None},
    statistics=("rstd",),
    forward=lambda ops: ops.rmsnorm_forward,
    residual_forward=lambda ops: ops.residual_rmsnorm_forward,
    residual_backward=lambda ops: ops.residual_rmsnorm_backward,
)
LAYERNORM = Norm(
    parameter_std={"weight": None, "bias": 0.0},
    statistics=("mean", "rstd"),
    forward=lambda ops: ops.layernorm_forward,
    residual_forward=lambda ops: ops.residual_layernorm_forward,
    residual_backward=lambda ops: ops.residual_layernorm_backward,
)
