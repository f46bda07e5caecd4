"""Launchers of grad_norm.cu. Contract: kernels/cpu/grad_norm.py."""

from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import Array, Kernel, constants

_SQUARE_SUMS = Kernel("grad_norm.cu", "square_sums", ((),))
_FINISH = Kernel("grad_norm.cu", "grad_norm_finish", ((),))
_CONSTANTS = constants("grad_norm.cu")
CHUNK, _CHUNK_BLOCK = _CONSTANTS["CHUNK"], _CONSTANTS["CHUNK_BLOCK"]
_FINISH_BLOCK = 1024


def square_sums(device: Device, out: Array, grads: Array) -> None:
    """See kernels/cpu/grad_norm.py. grads begin at a multiple of 16 bytes.

    Precision: fp32. Cost: reads grads once.
    """
    device.launch(_SQUARE_SUMS, (), out.size, _CHUNK_BLOCK, partial=out, grads=grads, size=grads.size)


def grad_norm(device: Device, out: Array, sums: Array) -> None:
    """See kernels/cpu/grad_norm.py. Precision: fp64."""
    device.launch(_FINISH, (), 1, _FINISH_BLOCK, out=out, partial=sums, chunks=sums.size)
