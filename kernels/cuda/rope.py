"""Launchers of rope.cu. Mathematics and contracts: kernels/cpu/rope.py."""

from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import Array, Kernel
from kernels.cuda.runtime.vectors import VECTOR_TEMPLATES, vector_size

_BLOCK = 256  # not tuned
_HEADS = 4  # per thread; not tuned
_ROTATE = Kernel("rope.cu", "rope_rotate", tuple((*template, _HEADS) for template in VECTOR_TEMPLATES))


def rope_forward(device: Device, qkv: Array, start: Array, table: Array, *, rotated: int) -> None:
    """See kernels/cpu/rope.py. The table is fp32. Reads and writes each rotated element once."""
    _rotate(device, qkv, start, table, rotated, 1.0)


def rope_backward(device: Device, dqkv: Array, start: Array, table: Array, *, rotated: int) -> None:
    """See kernels/cpu/rope.py. The table is fp32. Reads and writes each rotated element once."""
    _rotate(device, dqkv, start, table, rotated, -1.0)


def _rotate(device: Device, qkv: Array, start: Array, table: Array, rotated: int, direction: float) -> None:
    batch, length, heads, head_dim = qkv.shape
    size = vector_size(head_dim // 2, qkv, table) if head_dim % 2 == 0 else 1
    groups = -(-rotated // _HEADS)
    count = batch * length * groups * (head_dim // 2 // size)
    if count == 0:  # a head of one element has no pair to rotate
        return
    device.launch(
        _ROTATE, (qkv.dtype, size, _HEADS), -(-count // _BLOCK), _BLOCK,
        qkv=qkv, start=start, table=table, count=count, length=length, heads=heads, head_dim=head_dim,
        width=table.shape[2], rotated=rotated, groups=groups, direction=direction,
    )  # fmt: skip
