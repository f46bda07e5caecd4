"""Launchers of swiglu.cu. Mathematics and contracts: kernels/cpu/swiglu.py."""

from typing import Any

from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import Array, Kernel
from kernels.cuda.runtime.vectors import VECTOR_TEMPLATES, vector_size

_FORWARD = Kernel("swiglu.cu", "swiglu_forward", VECTOR_TEMPLATES)
_BACKWARD = Kernel("swiglu.cu", "swiglu_backward", VECTOR_TEMPLATES)
_BLOCK = 256  # not tuned


def swiglu_forward(device: Device, out: Array, inp: Array) -> None:
    """See kernels/cpu/swiglu.py. Reads and writes each element once."""
    _launch(device, _FORWARD, out.shape, out=out, inp=inp)


def swiglu_backward(device: Device, dinp: Array, dout: Array, inp: Array) -> None:
    """See kernels/cpu/swiglu.py. Reads and writes each element once. dinp may be inp."""
    _launch(device, _BACKWARD, dout.shape, dinp=dinp, dout=dout, inp=inp)


def _launch(device: Device, kernel: Kernel, shape: tuple[int, ...], **arrays: Any) -> None:
    rows, width = shape
    size = vector_size(width, *arrays.values())
    count = rows * width // size
    device.launch(
        kernel,
        (arrays["inp"].dtype, size),
        -(-count // _BLOCK),
        _BLOCK,
        count=count,
        row_vectors=width // size,
        **arrays,
    )
