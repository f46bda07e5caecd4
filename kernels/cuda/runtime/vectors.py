"""The number of elements that a kernel loads or stores with one instruction."""

from typing import Any

from kernels.cuda.runtime.launch import BF16, FLOAT, Template

VECTOR_BYTES = 16
# Templates (type, elements per vector) of a vectorized kernel.
VECTOR_TEMPLATES: tuple[Template, ...] = tuple(
    (dtype, size) for dtype in (FLOAT, BF16) for size in (VECTOR_BYTES // dtype.itemsize, 1)
)


def vector_size(length: int, *arrays: Any) -> int:
    """Elements per vector: 16 bytes of the first array's type, or 1 if a row is not aligned to 16 bytes.

    Args:
        length: elements per row.
        arrays: the arrays that are loaded or stored in vectors. None is ignored.
    """
    size = VECTOR_BYTES // arrays[0].dtype.itemsize
    aligned = all(array is None or array.data.ptr % VECTOR_BYTES == 0 for array in arrays)
    return size if aligned and length % size == 0 else 1
