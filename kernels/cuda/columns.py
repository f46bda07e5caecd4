"""The second half of every gradient that is a sum over all positions: partial sums to the gradient."""

from kernels.cuda.device import Device
from kernels.cuda.launch import Array, Kernel

_ADD_ROWS = Kernel("columns.cu", "add_rows", ((),))
_COLUMNS = 32  # of a block


def add_rows(
    device: Device, out: Array, partial: Array, other_out: Array | None = None, other_partial: Array | None = None
) -> None:
    """out (columns,) += sum over rows of partial (rows, columns), both fp32; and a second pair of the same shapes."""
    rows, columns = partial.shape
    device.launch(
        _ADD_ROWS, (), (-(-columns // _COLUMNS), 1 if other_out is None else 2), (_COLUMNS, 32),
        out=out, partial=partial, other_out=other_out, other_partial=other_partial, rows=rows, columns=columns,
    )  # fmt: skip
