"""Launchers of gelu.cu. Mathematics and contracts: kernels/cpu/gelu.py."""

from typing import Any

from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import Array, Kernel
from kernels.cuda.runtime.vectors import VECTOR_TEMPLATES, vector_size

_BLOCK = 256  # not tuned
_VECTORS = 2  # per thread; not tuned
_TEMPLATES = tuple((*template, _VECTORS) for template in VECTOR_TEMPLATES)
_FORWARD = Kernel("gelu.cu", "gelu_forward", _TEMPLATES)
_BACKWARD = Kernel("gelu.cu", "gelu_backward", _TEMPLATES)


def gelu_forward(device: Device, out: Array, inp: Array) -> None:
    """See kernels/cpu/gelu.py. Reads and writes each element once."""
    _launch(device, _FORWARD, out=out, inp=inp)


def gelu_backward(device: Device, dinp: Array, dout: Array, inp: Array) -> None:
    """See kernels/cpu/gelu.py. Reads two elements and writes one per result."""
    _launch(device, _BACKWARD, dinp=dinp, dout=dout, inp=inp)


def _launch(device: Device, kernel: Kernel, **arrays: Any) -> None:
    inp = arrays["inp"]
    size = vector_size(inp.size, *arrays.values())
    count = inp.size // size
    device.launch(
        kernel, (inp.dtype, size, _VECTORS), -(-count // (_BLOCK * _VECTORS)), _BLOCK, count=count, **arrays
    )
