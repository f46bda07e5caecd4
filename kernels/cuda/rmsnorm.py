"""Launchers of rmsnorm.cu; the mathematics and the contracts are those of kernels.cpu.rmsnorm."""

from kernels.cuda.columns import add_rows
from kernels.cuda.device import Device
from kernels.cuda.launch import FLOAT, Array, Kernel
from kernels.cuda.rows import BACKWARD, FORWARD, row_launch, row_queue, row_templates

_FORWARD = Kernel("rmsnorm.cu", "rmsnorm_forward", row_templates(FORWARD))
_BACKWARD = Kernel("rmsnorm.cu", "rmsnorm_backward", row_templates(BACKWARD))


def rmsnorm_forward(device: Device, out: Array, rstd: Array, inp: Array, weight: Array, *, eps: float) -> None:
    """See kernels.cpu.rmsnorm.rmsnorm_forward; the stream and the weight are fp32. A row has at most 8192 elements."""
    _forward(device, None, out, rstd, inp, None, weight, eps)


def residual_rmsnorm_forward(
    device: Device, residual_out: Array, out: Array, rstd: Array, residual: Array, branch: Array, weight: Array, *, eps: float
) -> None:
    """See kernels.cpu.rmsnorm.residual_rmsnorm_forward; both streams and the weight are fp32."""
    _forward(device, residual_out, out, rstd, residual, branch, weight, eps)


def rmsnorm_backward(
    device: Device, dinp: Array, dweight: Array, dout: Array, inp: Array, weight: Array, rstd: Array
) -> None:
    """See kernels.cpu.rmsnorm.rmsnorm_backward. Workspace: at most 8 rows of fp32 a processor."""
    _backward(device, dinp, dweight, None, dout, inp, weight, rstd)


def residual_rmsnorm_backward(
    device: Device, dinp: Array, dweight: Array, dresidual_out: Array, dout: Array, residual_out: Array, weight: Array,
    rstd: Array,
) -> None:  # fmt: skip
    """See kernels.cpu.rmsnorm.residual_rmsnorm_backward. Workspace: as rmsnorm_backward's."""
    _backward(device, dinp, dweight, dresidual_out, dout, residual_out, weight, rstd)


def _forward(
    device: Device, residual_out: Array | None, out: Array, rstd: Array, residual: Array, branch: Array | None, weight: Array,
    eps: float,
) -> None:  # fmt: skip
    rows, dim = out.shape
    template, block = row_launch(FORWARD, out, residual_out, residual, branch, weight)
    blocks, stages, shared_bytes = row_queue(device, out, block, 1)
    device.launch(
        _FORWARD, template, blocks, block, shared_bytes=shared_bytes,
        residual_out=residual_out, out=out, rstd=rstd, residual=residual, branch=branch, weight=weight, rows=rows, dim=dim,
        stages=stages, eps=eps,
    )  # fmt: skip


def _backward(
    device: Device, dinp: Array, dweight: Array, dresidual: Array | None, dout: Array, inp: Array, weight: Array, rstd: Array
) -> None:
    rows, dim = inp.shape
    template, block = row_launch(BACKWARD, dout, dinp, dresidual, inp, weight)
    blocks, stages, shared_bytes = row_queue(device, dout, block, 2)
    (partial,) = device.workspace(((blocks, dim), FLOAT))
    device.launch(
        _BACKWARD, template, blocks, block, shared_bytes=shared_bytes,
        dinp=dinp, partial=partial, dresidual=dresidual, dout=dout, inp=inp, weight=weight, rstd=rstd, rows=rows, dim=dim,
        stages=stages,
    )  # fmt: skip
    add_rows(device, dweight, partial)
