"""Launcher of cast.cu."""

from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import BF16, Array, Kernel
from kernels.cuda.runtime.vectors import vector_size

_BLOCK = 256
_CAST = Kernel("cast.cu", "cast", ((BF16, 8), (BF16, 1)))


def cast(device: Device, out: Array, inp: Array) -> None:
    """out = inp, rounded to nearest. out is bf16, inp is fp32 of the same size."""
    size = vector_size(out.size, out, inp)
    count = out.size // size
    device.launch(_CAST, (out.dtype, size), -(-count // _BLOCK), _BLOCK, out=out, inp=inp, count=count)
