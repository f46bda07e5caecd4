"""Launch shapes of the kernels that read a row more than once and prefetch the next row (rows.cuh)."""

from typing import Any

import numpy as np

from kernels.config import ModelConfig
from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import BF16, FLOAT, Array, Template
from kernels.cuda.runtime.vectors import VECTOR_BYTES, vector_size

_WARP = 32
_WARPS = 8  # per block, if each warp owns a row; not tuned
RESIDENT_WARPS = 16  # per SM, limited by registers; not tuned
_STAGES = 2  # rows per warp or block in shared memory: the current one and the prefetched one
_OTHER_SHARED_BYTES = 1024  # upper bound of the shared memory for a block's sums
_MAX_BLOCK = 512  # the kernels' __launch_bounds__
_SCALAR_ELEMENTS = 8  # elements per thread, if rows allow no vectors
MAX_ROW_ELEMENTS = 8192  # if rows are multiples of 16 bytes; otherwise half

ElementCounts = dict[np.dtype[Any], tuple[int, ...]]
# Elements per thread by type. Registers limit them.
FORWARD: ElementCounts = {BF16: (8, 16, 24, 32), FLOAT: (8, 16, 24)}
BACKWARD: ElementCounts = {BF16: (8, 16, 24), FLOAT: (8, 16)}


def row_templates(element_counts: ElementCounts) -> tuple[Template, ...]:
    """Every template of a row kernel: type, elements per vector, vectors per thread."""
    templates: list[Template] = []
    for dtype, counts in element_counts.items():
        size = VECTOR_BYTES // dtype.itemsize
        templates += [*((dtype, size, elements // size) for elements in counts), (dtype, 1, _SCALAR_ELEMENTS)]
    return tuple(templates)


def with_branch_bias(templates: tuple[Template, ...]) -> tuple[Template, ...]:
    """Each template without and with the sums of a branch's bias."""
    return tuple((*template, has_bias) for template in templates for has_bias in (False, True))


def row_launch(
    element_counts: ElementCounts, inp: Array, *arrays: Array | None
) -> tuple[Template, tuple[int, int]]:
    """The template and the block (threads per row, rows per block) for the rows of inp.

    A row may have 4096 elements, or 8192 if it is a multiple of 16 bytes.

    Args:
        element_counts: FORWARD or BACKWARD.
        inp: (rows, dim).
        arrays: the other arrays that the kernel loads or stores in vectors.
    """
    dim = inp.shape[1]
    size = vector_size(dim, inp, *arrays)
    counts = element_counts[inp.dtype] if size > 1 else (_SCALAR_ELEMENTS,)
    elements = next((count for count in counts if count * _WARP >= dim), counts[-1])
    threads = _WARP * -(-dim // (_WARP * elements))
    assert threads <= _MAX_BLOCK, f"rows of {dim} elements are too long"
    return (inp.dtype, size, elements // size), (threads, min(_WARPS, len(inp)) if threads == _WARP else 1)


def row_queue(device: Device, inp: Array, block: tuple[int, int], arrays: int) -> tuple[int, int, int]:
    """The grid of a row kernel, the stages of its row queue, and the bytes of shared memory for them.

    The grid has as many blocks as the GPU holds at once, but none without a row.

    Args:
        device: the GPU.
        inp: one of the queued arrays of the storage type.
        block: threads per row and rows per block, from row_launch.
        arrays: number of queued arrays of the storage type. One fp32 array is also queued.
    """
    rows, dim = inp.shape
    blocks = device.sm_count * max(1, RESIDENT_WARPS * _WARP // (block[0] * block[1]))
    stage_bytes = block[1] * dim * (FLOAT.itemsize + arrays * inp.dtype.itemsize)
    stages = _STAGES if _STAGES * stage_bytes <= device.shared_bytes - _OTHER_SHARED_BYTES else 1
    return min(blocks, -(-rows // block[1])), stages, stages * stage_bytes


def row_scratch_bytes(device: Device, config: ModelConfig, *, sums: int) -> int:
    """Scratch memory of a backward pass over the model's rows: one fp32 row per sum and block.

    Raises:
        ValueError: the model's rows are too long.
    """
    longest = MAX_ROW_ELEMENTS if config.dim % 8 == 0 else MAX_ROW_ELEMENTS // 2
    if config.dim > longest:
        raise ValueError(
            f"model.dim: norms on the GPU take rows of at most {MAX_ROW_ELEMENTS}, "
            f"or {MAX_ROW_ELEMENTS // 2} if not a multiple of 8, got {config.dim}; "
            "set it smaller, or runtime.device to cpu"
        )
    # See row_queue. A block with one long row has at least two warps.
    blocks = device.sm_count * RESIDENT_WARPS // 2
    return sums * blocks * config.dim * FLOAT.itemsize
