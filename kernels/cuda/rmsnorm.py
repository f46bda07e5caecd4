"""Launchers of rmsnorm.cu; the mathematics and the contracts are those of kernels.cpu.rmsnorm."""

from kernels.cuda.columns import add_rows
from kernels.cuda.device import Device
from kernels.cuda.launch import BF16, FLOAT, Array, Kernel

_TYPES = ((FLOAT,), (BF16,))
_FORWARD = Kernel("rmsnorm.cu", "rmsnorm_forward", _TYPES)
_RESIDUAL_FORWARD = Kernel("rmsnorm.cu", "residual_rmsnorm_forward", _TYPES)
_BACKWARD = Kernel("rmsnorm.cu", "rmsnorm_backward", _TYPES)
_BLOCK = 256  # not tuned
_BLOCKS_A_PROCESSOR = 4  # of the backward pass: rows of partial sums; not tuned


def rmsnorm_forward(device: Device, out: Array, rstd: Array, inp: Array, weight: Array, *, eps: float) -> None:
    """See kernels.cpu.rmsnorm.rmsnorm_forward."""
    rows, dim = inp.shape
    device.launch(_FORWARD, (inp.dtype,), rows, _BLOCK, out=out, rstd=rstd, inp=inp, weight=weight, dim=dim, eps=eps)


def residual_rmsnorm_forward(
    device: Device, residual_out: Array, out: Array, rstd: Array, residual: Array, branch: Array, weight: Array, *, eps: float
) -> None:
    """See kernels.cpu.rmsnorm.residual_rmsnorm_forward."""
    rows, dim = branch.shape
    device.launch(
        _RESIDUAL_FORWARD, (branch.dtype,), rows, _BLOCK,
        residual_out=residual_out, out=out, rstd=rstd, residual=residual, branch=branch, weight=weight, dim=dim, eps=eps,
    )  # fmt: skip


def rmsnorm_backward(
    device: Device, dinp: Array, dweight: Array, dout: Array, inp: Array, weight: Array, rstd: Array
) -> None:
    """See kernels.cpu.rmsnorm.rmsnorm_backward."""
    _backward(device, dinp, dweight, None, dout, inp, weight, rstd)


def residual_rmsnorm_backward(
    device: Device, dinp: Array, dweight: Array, dresidual_out: Array, dout: Array, residual_out: Array, weight: Array,
    rstd: Array,
) -> None:  # fmt: skip
    """See kernels.cpu.rmsnorm.residual_rmsnorm_backward."""
    _backward(device, dinp, dweight, dresidual_out, dout, residual_out, weight, rstd)


def _backward(
    device: Device, dinp: Array, dweight: Array, dresidual: Array | None, dout: Array, inp: Array, weight: Array, rstd: Array
) -> None:
    rows, dim = inp.shape
    blocks = min(rows, _BLOCKS_A_PROCESSOR * device.processors)
    (partial,) = device.workspace(((blocks, dim), FLOAT))
    device.launch(
        _BACKWARD, (inp.dtype,), blocks, _BLOCK, shared_bytes=4 * dim,
        dinp=dinp, partial=partial, dresidual=dresidual, dout=dout, inp=inp, weight=weight, rstd=rstd, rows=rows, dim=dim,
    )  # fmt: skip
    add_rows(device, dweight, partial)
