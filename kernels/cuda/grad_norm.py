"""Launcher of grad_norm.cu. Contract: kernels/cpu/grad_norm.py."""

from kernels.config import ModelConfig
from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import FLOAT, Array, Kernel, constants
from kernels.parameters import flat_size, parameter_table

_SQUARE_SUMS = Kernel("grad_norm.cu", "square_sums", ((),))
_FINISH = Kernel("grad_norm.cu", "grad_norm_finish", ((),))
_CONSTANTS = constants("grad_norm.cu")
_CHUNK, _CHUNK_BLOCK = _CONSTANTS["CHUNK"], _CONSTANTS["CHUNK_BLOCK"]
_FINISH_BLOCK = 1024


def grad_norm(device: Device, out: Array, grads: Array) -> None:
    """See kernels/cpu/grad_norm.py. grads begin at a multiple of 16 bytes.

    Precision: fp32 within 16,384 elements, fp64 across.
    Cost: reads grads once; scratch memory of 4 bytes per 16,384 elements.
    """
    chunks = -(-grads.size // _CHUNK)
    (partial,) = device.workspace(((chunks,), FLOAT))
    device.launch(_SQUARE_SUMS, (), chunks, _CHUNK_BLOCK, partial=partial, grads=grads, size=grads.size)
    device.launch(_FINISH, (), 1, _FINISH_BLOCK, out=out, partial=partial, chunks=chunks)


def scratch_bytes(device: Device, config: ModelConfig, rows: int) -> int:
    """A partial sum per chunk of the flat gradients."""
    return FLOAT.itemsize * -(-flat_size(parameter_table(config)) // _CHUNK)
