"""Launchers of layernorm.cu. Mathematics and contracts: kernels/cpu/layernorm.py."""

from kernels.config import ModelConfig
from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import FLOAT, Array, Kernel
from kernels.cuda.runtime.rows import (
    BACKWARD,
    FORWARD,
    row_launch,
    row_queue,
    row_scratch_bytes,
    row_templates,
    with_branch_bias,
)
from kernels.cuda.sum_rows import add_rows

_FORWARD = Kernel("layernorm.cu", "layernorm_forward", row_templates(FORWARD))
_BACKWARD = Kernel("layernorm.cu", "layernorm_backward", with_branch_bias(row_templates(BACKWARD)))


def layernorm_forward(
    device: Device,
    out: Array,
    mean: Array,
    rstd: Array,
    inp: Array,
    weight: Array,
    bias: Array,
    *,
    eps: float,
) -> None:
    """See kernels/cpu/layernorm.py. inp and the parameters are fp32. A row has at most 8192 elements."""
    _forward(device, None, out, mean, rstd, inp, None, None, weight, bias, eps)


def residual_layernorm_forward(
    device: Device, residual_out: Array, out: Array, mean: Array, rstd: Array, residual: Array, branch: Array,
    branch_bias: Array | None, weight: Array, bias: Array, *, eps: float,
) -> None:  # fmt: skip
    """See kernels/cpu/layernorm.py. residual, residual_out and the parameters are fp32."""
    _forward(device, residual_out, out, mean, rstd, residual, branch, branch_bias, weight, bias, eps)


def layernorm_backward(
    device: Device,
    dinp: Array,
    dweight: Array,
    dbias: Array,
    dout: Array,
    inp: Array,
    weight: Array,
    mean: Array,
    rstd: Array,
) -> None:
    """See kernels/cpu/layernorm.py. Scratch memory: at most 16 fp32 rows per SM."""
    residual_layernorm_backward(device, dinp, dweight, dbias, None, None, dout, inp, weight, mean, rstd)


def residual_layernorm_backward(
    device: Device, dinp: Array, dweight: Array, dbias: Array, dbranch_bias: Array | None,
    dresidual_out: Array | None, dout: Array, residual_out: Array, weight: Array, mean: Array, rstd: Array,
) -> None:  # fmt: skip
    """See kernels/cpu/layernorm.py. dbranch_bias sums dinp before it is rounded.

    Scratch memory: at most 24 fp32 rows per SM.
    """
    rows, dim = dout.shape
    template, block = row_launch(BACKWARD, dout, dinp, dresidual_out, residual_out, weight)
    blocks, stages, shared_bytes = row_queue(device, dout, block, 2)
    (partial,) = device.workspace(((2 if dbranch_bias is None else 3, blocks, dim), FLOAT))
    device.launch(
        _BACKWARD, (*template, dbranch_bias is not None), blocks, block, shared_bytes=shared_bytes,
        dinp=dinp, partial=partial, dresidual=dresidual_out, dout=dout, inp=residual_out, weight=weight,
        mean=mean, rstd=rstd, rows=rows, dim=dim, stages=stages,
    )  # fmt: skip
    add_rows(device, partial, dweight, dbias, dbranch_bias)


def _forward(
    device: Device, residual_out: Array | None, out: Array, mean: Array, rstd: Array, residual: Array,
    branch: Array | None, branch_bias: Array | None, weight: Array, bias: Array, eps: float,
) -> None:  # fmt: skip
    rows, dim = out.shape
    template, block = row_launch(FORWARD, out, residual_out, residual, branch, branch_bias, weight, bias)
    blocks, stages, shared_bytes = row_queue(device, out, block, 1)
    device.launch(
        _FORWARD, template, blocks, block, shared_bytes=shared_bytes,
        residual_out=residual_out, out=out, mean=mean, rstd=rstd, residual=residual, branch=branch,
        branch_bias=branch_bias, weight=weight, bias=bias, rows=rows, dim=dim, stages=stages, eps=eps,
    )  # fmt: skip


def scratch_bytes(device: Device, config: ModelConfig, rows: int) -> int:
    """The partial sums of dweight, dbias and dbranch_bias."""
    return row_scratch_bytes(device, config, sums=3)
