"""Launch shapes of the kernels that hold a row in registers (rows.cuh)."""

from typing import Any

import numpy as np

from kernels.cuda.launch import BF16, FLOAT, Array, Template
from kernels.cuda.vectors import VECTOR_BYTES, vector_size

_WARP = 32
_WARPS = 8  # of a block whose warps own rows; not tuned
_LARGEST_BLOCK = 512  # the kernels' __launch_bounds__
_ONE_BY_ONE = 8  # elements a thread where rows allow no vectors
LONGEST_ROW = 8192  # where 16 bytes divide its length; else half of it

Choice = dict[np.dtype[Any], tuple[int, ...]]
# Elements that a thread may hold: as many as registers allow.
FORWARD: Choice = {BF16: (8, 16, 24, 32), FLOAT: (8, 16, 24, 32)}
BACKWARD: Choice = {BF16: (8, 16), FLOAT: (8, 16)}


def row_templates(choice: Choice) -> tuple[Template, ...]:
    """Every template of a kernel over rows: type, elements a vector, vectors a thread."""
    templates: list[Template] = []
    for dtype, numbers in choice.items():
        size = VECTOR_BYTES // dtype.itemsize
        templates += [*((dtype, size, elements // size) for elements in numbers), (dtype, 1, _ONE_BY_ONE)]
    return tuple(templates)


def row_launch(choice: Choice, inp: Array, *arrays: Array | None) -> tuple[Template, tuple[int, int]]:
    """Template and block (threads a row, rows a block) for rows as long as inp's; `arrays`, what else is read by vectors.

    A row may have 4096 elements, or 8192 where 16 bytes divide its length.
    """
    dim = inp.shape[1]
    size = vector_size(dim, inp, *arrays)
    numbers = choice[inp.dtype] if size > 1 else (_ONE_BY_ONE,)
    elements = next((number for number in numbers if number * _WARP >= dim), numbers[-1])
    threads = _WARP * -(-dim // (_WARP * elements))
    assert threads <= _LARGEST_BLOCK, f"rows of {dim} elements are too long"
    return (inp.dtype, size, elements // size), (threads, _WARPS if threads == _WARP else 1)


def persistent_blocks(processors: int, rows: int, block: tuple[int, int]) -> int:
    """Blocks that a GPU holds at once, 16 warps to a processor, but no more than have rows."""
    resident = processors * max(1, 2 * _WARPS * _WARP // (block[0] * block[1]))
    return min(resident, -(-rows // block[1]))
