"""Launchers of bias.cu. Mathematics and contracts: kernels/cpu/bias.py."""

from kernels.config import ModelConfig
from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import FLOAT, Array, Kernel, constants
from kernels.cuda.runtime.vectors import VECTOR_TEMPLATES, vector_size
from kernels.cuda.sum_rows import add_rows

_FORWARD = Kernel("bias.cu", "bias_forward", VECTOR_TEMPLATES)
_BACKWARD = Kernel("bias.cu", "bias_backward", VECTOR_TEMPLATES)
_BLOCK = 256  # not tuned
_WARPS = constants("bias.cu")["WARPS"]  # warps per block, backward
_BLOCKS_PER_SM = 2  # backward: as many as an SM holds at once; not tuned
_MIN_ROWS = 64  # rows per block, backward


def bias_forward(device: Device, out: Array, inp: Array, bias: Array) -> None:
    """See kernels/cpu/bias.py. Reads and writes each element once."""
    rows, columns = inp.shape
    size = vector_size(columns, out, inp, bias)
    count = rows * columns // size
    device.launch(
        _FORWARD, (inp.dtype, size), -(-count // _BLOCK), _BLOCK,
        out=out, inp=inp, bias=bias, count=count, row_vectors=columns // size,
    )  # fmt: skip


def bias_backward(device: Device, dbias: Array, dout: Array) -> None:
    """See kernels/cpu/bias.py.

    Determinism: the sums have a fixed order.
    Scratch memory: one fp32 row per 64 rows, but at most 2 blocks per SM in total.
    """
    rows, columns = dout.shape
    size = vector_size(columns, dout)
    across = -(-columns // (32 * size))
    down = min(-(-rows // _MIN_ROWS), max(1, _BLOCKS_PER_SM * device.sm_count // across))
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
    """The partial sums of the widest linear layer. A block owns at most 256 columns."""
    widest = max(outputs for outputs, _ in config.linears.values())
    return FLOAT.itemsize * (widest + 256) * _BLOCKS_PER_SM * device.sm_count
