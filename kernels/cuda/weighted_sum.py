"""Launcher of weighted_sum.cu. Contract: kernels/cpu/weighted_sum.py."""

from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import Array, Kernel

_FORWARD = Kernel("weighted_sum.cu", "weighted_sum_forward", ((),))
_BLOCK = 1024


def weighted_sum_forward(device: Device, total: Array, nll: Array, weight: Array) -> None:
    """See kernels/cpu/weighted_sum.py.

    Precision: products and sums in fp64.
    Determinism: one block sums in a fixed order.
    """
    device.launch(_FORWARD, (), 1, _BLOCK, total=total, nll=nll, weight=weight, rows=nll.size)
