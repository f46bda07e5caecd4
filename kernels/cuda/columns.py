"""The second half of every gradient that is a sum over all positions: partial sums to the gradient."""

from kernels.cuda.device import Device
from kernels.cuda.launch import Array, Kernel

_ADD_ROWS = Kernel("columns.cu", "add_rows", ((),))
_BLOCK = 128


def add_rows(device: Device, out: Array, partial: Array) -> None:
    """out (columns,) += sum over rows of partial (rows, columns), both fp32."""
    rows, columns = partial.shape
    device.launch(_ADD_ROWS, (), -(-columns // _BLOCK), _BLOCK, out=out, partial=partial, rows=rows, columns=columns)
