"""The second kernel of every gradient that is a sum over all positions: it reduces the partial sums."""

from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import Array, Kernel

_ADD_ROWS = Kernel("sum_rows.cu", "add_rows", ((),))
_COLUMNS = 32  # per block


def add_rows(
    device: Device, partial: Array, out: Array, second: Array | None = None, third: Array | None = None
) -> None:
    """out (columns,) += sum over rows of partial[0]. All fp32.

    partial is (outs, rows, columns). second gets partial[1] and third partial[2] in the same way.
    """
    outs, rows, columns = partial.shape
    device.launch(
        _ADD_ROWS, (), (-(-columns // _COLUMNS), outs), (_COLUMNS, 32),
        out=out, second=second, third=third, partial=partial, rows=rows, columns=columns,
    )  # fmt: skip
