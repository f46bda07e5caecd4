"""How many elements a kernel loads and stores by one instruction."""

from typing import Any

from kernels.cuda.runtime.launch import BF16, FLOAT, Template

VECTOR_BYTES = 16
# Templates (type, elements a vector) of a kernel over vectors.
VECTOR_TEMPLATES: tuple[Template, ...] = tuple(
    (dtype, size) for dtype in (FLOAT, BF16) for size in (VECTOR_BYTES // dtype.itemsize, 1)
)


def vector_size(length: int, *arrays: Any) -> int:
    """16 bytes' worth of elements of the first array's type, or 1 where the arrays' rows do not begin at multiples of 16 bytes.

    Args:
        length: of a row, in elements.
        arrays: what is loaded and stored so; None is passed over.
    """
    size = VECTOR_BYTES // arrays[0].dtype.itemsize
    aligned = all(array is None or array.data.ptr % VECTOR_BYTES == 0 for array in arrays)
    return size if aligned and length % size == 0 else 1
