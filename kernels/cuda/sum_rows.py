"""The second half of every gradient that is a sum over all positions: partial sums to the gradient."""

from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import Array, Kernel

_ADD_ROWS = Kernel("sum_rows.cu", "add_rows", ((),))
_COLUMNS = 32  # of a block


def add_rows(
    device: Device, partial: Array, out: Array, second: Array | None = None, third: Array | None = None
) -> None:
    """out (columns,) += sum over rows of partial[0], of partial (outs, rows, columns), and so on for further ones; all fp32."""
    outs, rows, columns = partial.shape
    device.launch(
        _ADD_ROWS, (), (-(-columns // _COLUMNS), outs), (_COLUMNS, 32),
        out=out, second=second, third=third, partial=partial, rows=rows, columns=columns,
    )  # fmt: skip
