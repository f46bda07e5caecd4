"""Launch shapes of the kernels that pass over a row more than once and have the next on its way (rows.cuh)."""

from typing import Any

import numpy as np

from kernels.config import ModelConfig
from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import BF16, FLOAT, Array, Template
from kernels.cuda.runtime.vectors import VECTOR_BYTES, vector_size

_WARP = 32
_WARPS = 8  # of a block whose warps own rows; not tuned
RESIDENT_WARPS = 16  # that a processor holds at once, by their registers; not tuned
_STAGES = 2  # rows of a warp or block that are there or on their way
_OTHER_SHARED_BYTES = 1024  # of shared memory, at most, for a block's sums
_LARGEST_BLOCK = 512  # the kernels' __launch_bounds__
_ONE_BY_ONE = 8  # elements a thread where rows allow no vectors
LONGEST_ROW = 8192  # where 16 bytes divide its length; else half of it

Choice = dict[np.dtype[Any], tuple[int, ...]]
# Elements that a thread may hold: as many as registers allow.
FORWARD: Choice = {BF16: (8, 16, 24, 32), FLOAT: (8, 16, 24)}
BACKWARD: Choice = {BF16: (8, 16, 24), FLOAT: (8, 16)}


def row_templates(choice: Choice) -> tuple[Template, ...]:
    """Every template of a kernel over rows: type, elements a vector, vectors a thread."""
    templates: list[Template] = []
    for dtype, numbers in choice.items():
        size = VECTOR_BYTES // dtype.itemsize
        templates += [*((dtype, size, elements // size) for elements in numbers), (dtype, 1, _ONE_BY_ONE)]
    return tuple(templates)


def with_branch_bias(templates: tuple[Template, ...]) -> tuple[Template, ...]:
    """Each template twice: without the sums of a branch's bias, and with them."""
    return tuple((*template, given) for template in templates for given in (False, True))


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
    return (inp.dtype, size, elements // size), (threads, min(_WARPS, len(inp)) if threads == _WARP else 1)


def row_queue(device: Device, inp: Array, block: tuple[int, int], arrays: int) -> tuple[int, int, int]:
    """Blocks that a GPU holds at once, but no more than have rows; stages of their queues; bytes of shared memory for these.

    Args:
        inp: one of the arrays of the storage type.
        arrays: how many of these are queued beside the stream.
    """
    rows, dim = inp.shape
    blocks = device.sm_count * max(1, RESIDENT_WARPS * _WARP // (block[0] * block[1]))
    stage_bytes = block[1] * dim * (FLOAT.itemsize + arrays * inp.dtype.itemsize)
    stages = _STAGES if _STAGES * stage_bytes <= device.shared_bytes - _OTHER_SHARED_BYTES else 1
    return min(blocks, -(-rows // block[1])), stages, stages * stage_bytes


def row_scratch_bytes(device: Device, config: ModelConfig, *, sums: int) -> int:
    """Scratch memory of a backward pass over the model's rows: a row of fp32 for each sum of each block.

    Raises:
        ValueError: the model's rows are too long.
    """
    longest = LONGEST_ROW if config.dim % 8 == 0 else LONGEST_ROW // 2
    if config.dim > longest:
        raise ValueError(
            f"model.dim: norms on the GPU take rows of at most {LONGEST_ROW}, or {LONGEST_ROW // 2} if not a multiple of 8, "
            f"got {config.dim}; set it smaller, or runtime.device to cpu"
        )
    blocks = (
        device.sm_count * RESIDENT_WARPS // 2
    )  # see row_queue: a block of a long row has at least two warps
    return sums * blocks * config.dim * FLOAT.itemsize
