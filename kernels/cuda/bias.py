"""Launchers of bias.cu; the mathematics and the contracts are those of kernels.cpu.bias."""

from kernels.config import ModelConfig
from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import FLOAT, Array, Kernel, constants
from kernels.cuda.runtime.vectors import VECTOR_TEMPLATES, vector_size
from kernels.cuda.sum_rows import add_rows

_FORWARD = Kernel("bias.cu", "bias_forward", VECTOR_TEMPLATES)
_BACKWARD = Kernel("bias.cu", "bias_backward", VECTOR_TEMPLATES)
_BLOCK = 256  # not tuned
_WARPS = constants("bias.cu")["WARPS"]  # of a block of the backward pass
_BLOCKS_A_PROCESSOR = 2  # of the backward pass: as many as it holds at once; not tuned
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

    Deterministic: a fixed order of summation. Workspace: a row of fp32 for each 64 rows, or fewer: 2 blocks a processor in all.
    """
    rows, columns = dout.shape
    size = vector_size(columns, dout)
    across = -(-columns // (32 * size))
    down = min(-(-rows // _LEAST_ROWS), max(1, _BLOCKS_A_PROCESSOR * device.sm_count // across))
    (partial,) = device.workspace(((1, down, columns), FLOAT))
    device.launch(
        _BACKWARD,
        (dout.dtype, size),
        (across, down),
        (32, _WARPS),
        partial=partial,
        dout=dout,
        rows=rows,
        columns=columns,
    )
    add_rows(device, partial, dbias)


def scratch_bytes(device: Device, config: ModelConfig, rows: int) -> int:
    """Rows of partial sums of the widest linear layer; a block owns at most 32 columns."""
    widest = max(outputs for outputs, _ in config.linears.values())
    return FLOAT.itemsize * (widest + 256) * _BLOCKS_A_PROCESSOR * device.sm_count
