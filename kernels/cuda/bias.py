"""Launchers of bias.cu; the mathematics and the contracts are those of kernels.cpu.bias."""

from kernels.cuda.columns import add_rows
from kernels.cuda.device import Device
from kernels.cuda.launch import FLOAT, Array, Kernel
from kernels.cuda.vectors import VECTOR_TEMPLATES, vector_size

_FORWARD = Kernel("bias.cu", "bias_forward", VECTOR_TEMPLATES)
_BACKWARD = Kernel("bias.cu", "bias_backward", VECTOR_TEMPLATES)
_BLOCK = 256  # not tuned, nor is the number of the backward pass's blocks
_BLOCKS_A_PROCESSOR = 8
_LEAST_ROWS = 64  # of a block of the backward pass


def bias_forward(device: Device, out: Array, inp: Array, bias: Array) -> None:
    """See kernels.cpu.bias.bias_forward. Reads and writes each element once."""
    rows, columns = inp.shape
    size = vector_size(columns, out, inp, bias)
    count = rows * columns // size
    device.launch(
        _FORWARD, (inp.dtype, size), -(-count // _BLOCK), _BLOCK,
        out=out, inp=inp, bias=bias, count=count, row_vectors=columns // size,
    )  # fmt: skip


def bias_backward(device: Device, dbias: Array, dout: Array) -> None:
    """See kernels.cpu.bias.bias_backward.

    Deterministic: a fixed order of summation. Workspace: a row of fp32 for each 64 rows, or fewer: 8 blocks a processor in all.
    """
    rows, columns = dout.shape
    size = vector_size(columns, dout)
    across = -(-columns // (32 * size))
    down = min(-(-rows // _LEAST_ROWS), -(-_BLOCKS_A_PROCESSOR * device.processors // across))
    block_rows = -(-rows // down)
    down = -(-rows // block_rows)
    (partial,) = device.workspace(((down, columns), FLOAT))
    device.launch(
        _BACKWARD, (dout.dtype, size), (across, down), (32, 8),
        partial=partial, dout=dout, rows=rows, columns=columns, block_rows=block_rows,
    )  # fmt: skip
    add_rows(device, dbias, partial)
