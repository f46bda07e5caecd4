"""Launcher of rounding.cu."""

from kernels.cuda.device import Device
from kernels.cuda.launch import BF16, Array, Kernel
from kernels.cuda.vectors import vector_size

_BLOCK = 256
_ROUNDING = Kernel("rounding.cu", "rounding", ((BF16, 8), (BF16, 1)))


def rounding(device: Device, out: Array, inp: Array) -> None:
    """out, bf16 and overwritten, = inp, fp32 of as many elements, rounded to nearest."""
    size = vector_size(out.size, out, inp)
    count = out.size // size
    device.launch(_ROUNDING, (out.dtype, size), -(-count // _BLOCK), _BLOCK, out=out, inp=inp, count=count)
