"""Launchers of layernorm.cu; the mathematics and the contracts are those of kernels.cpu.layernorm."""

from kernels.cuda.columns import add_rows
from kernels.cuda.device import Device
from kernels.cuda.launch import FLOAT, Array, Kernel
from kernels.cuda.rows import BACKWARD, FORWARD, row_launch, row_queue, row_templates

_FORWARD = Kernel("layernorm.cu", "layernorm_forward", row_templates(FORWARD))
_BACKWARD = Kernel("layernorm.cu", "layernorm_backward", row_templates(BACKWARD))


def layernorm_forward(
    device: Device, out: Array, mean: Array, rstd: Array, inp: Array, weight: Array, bias: Array, *, eps: float
) -> None:
    """See kernels.cpu.layernorm.layernorm_forward; the stream and the parameters are fp32. A row has at most 8192 elements."""
    _forward(device, None, out, mean, rstd, inp, None, weight, bias, eps)


def residual_layernorm_forward(
    device: Device, residual_out: Array, out: Array, mean: Array, rstd: Array, residual: Array, branch: Array, weight: Array,
    bias: Array, *, eps: float,
) -> None:  # fmt: skip
    """See kernels.cpu.layernorm.residual_layernorm_forward; both streams and the parameters are fp32."""
    _forward(device, residual_out, out, mean, rstd, residual, branch, weight, bias, eps)


def layernorm_backward(
    device: Device, dinp: Array, dweight: Array, dbias: Array, dout: Array, inp: Array, weight: Array, mean: Array, rstd: Array
) -> None:
    """See kernels.cpu.layernorm.layernorm_backward. Workspace: at most 16 rows of fp32 a processor."""
    _backward(device, dinp, dweight, dbias, None, dout, inp, weight, mean, rstd)


def residual_layernorm_backward(
    device: Device, dinp: Array, dweight: Array, dbias: Array, dresidual_out: Array, dout: Array, residual_out: Array,
    weight: Array, mean: Array, rstd: Array,
) -> None:  # fmt: skip
    """See kernels.cpu.layernorm.residual_layernorm_backward. Workspace: as layernorm_backward's."""
    _backward(device, dinp, dweight, dbias, dresidual_out, dout, residual_out, weight, mean, rstd)


def _forward(
    device: Device, residual_out: Array | None, out: Array, mean: Array, rstd: Array, residual: Array,
    branch: Array | None, weight: Array, bias: Array, eps: float,
) -> None:  # fmt: skip
    rows, dim = out.shape
    template, block = row_launch(FORWARD, out, residual_out, residual, branch, weight, bias)
    blocks, stages, shared_bytes = row_queue(device, out, block, 1)
    device.launch(
        _FORWARD, template, blocks, block, shared_bytes=shared_bytes,
        residual_out=residual_out, out=out, mean=mean, rstd=rstd, residual=residual, branch=branch, weight=weight, bias=bias,
        rows=rows, dim=dim, stages=stages, eps=eps,
    )  # fmt: skip


def _backward(
    device: Device, dinp: Array, dweight: Array, dbias: Array, dresidual: Array | None, dout: Array, inp: Array, weight: Array,
    mean: Array, rstd: Array,
) -> None:  # fmt: skip
    rows, dim = inp.shape
    template, block = row_launch(BACKWARD, dout, dinp, dresidual, inp, weight)
    blocks, stages, shared_bytes = row_queue(device, dout, block, 2)
    partial_weight, partial_bias = device.workspace(((blocks, dim), FLOAT), ((blocks, dim), FLOAT))
    device.launch(
        _BACKWARD, template, blocks, block, shared_bytes=shared_bytes,
        dinp=dinp, partial_weight=partial_weight, partial_bias=partial_bias, dresidual=dresidual, dout=dout, inp=inp,
        weight=weight, mean=mean, rstd=rstd, rows=rows, dim=dim,
        stages=stages,
    )  # fmt: skip
    add_rows(device, dweight, partial_weight, dbias, partial_bias)
