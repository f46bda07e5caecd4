"""Launchers of embedding.cu. Mathematics and contracts: kernels/cpu/embedding.py."""

import numpy as np

from kernels.config import ModelConfig
from kernels.cuda.runtime.device import Device, Request, request_bytes
from kernels.cuda.runtime.launch import Array, Kernel
from kernels.cuda.runtime.vectors import VECTOR_TEMPLATES, vector_size

_BLOCK = 256  # not tuned
_CHUNK = 1024  # rows per block of the kernels that count keys and place rows
_SHORT = 32  # longest list that one warp sums; not tuned
_WARP = 32
_LONG_WARPS = 16  # warps that sum a longer list; not tuned
_SHORT_BLOCKS_PER_SM, _LONG_BLOCKS_PER_SM = 8, 4  # not tuned
_FORWARD = Kernel("embedding.cu", "embedding_forward", ((4,), (1,)))
_COUNT_KEYS = Kernel("embedding.cu", "embedding_count_keys", ((_CHUNK,),))
_MAKE_LISTS = Kernel("embedding.cu", "embedding_make_lists", ((_SHORT,),))
_PLACE_ROWS = Kernel("embedding.cu", "embedding_place_rows", ((_CHUNK,),))
_ADD_SHORT = Kernel("embedding.cu", "embedding_add_short", VECTOR_TEMPLATES)
_ADD_LONG = Kernel(
    "embedding.cu", "embedding_add_long", tuple((*template, _LONG_WARPS) for template in VECTOR_TEMPLATES)
)


def embedding_forward(
    device: Device, out: Array, tokens: Array, start: Array, weight: Array, position_weight: Array | None
) -> None:
    """See kernels/cpu/embedding.py. The stream and the parameters are fp32."""
    rows, dim = out.shape
    size = vector_size(dim, out, weight, position_weight)
    count = rows * dim // size
    device.launch(
        _FORWARD, (size,), -(-count // _BLOCK), _BLOCK,
        out=out, tokens=tokens, start=start, weight=weight, position_weight=position_weight, count=count,
        row_vectors=dim // size, length=tokens.shape[1],
    )  # fmt: skip


def embedding_backward(
    device: Device, dweight: Array, dposition_weight: Array | None, dout: Array, tokens: Array, start: Array
) -> None:
    """See kernels/cpu/embedding.py.

    Determinism: the rows of one token are summed in order. A token with more than 32 rows has 16 interleaved
        sums.
    Scratch memory: per token of the vocabulary, 16 bytes and 4 bytes per 1024 rows; 4 bytes per row.
    """
    _add_by_key(device, dweight, dout, tokens, start, tokens.shape[1])
    if dposition_weight is not None:
        _add_by_key(device, dposition_weight, dout, None, start, tokens.shape[1])


def _add_by_key(
    device: Device, dweight: Array, dout: Array, tokens: Array | None, start: Array, length: int
) -> None:
    (rows, dim), keys = dout.shape, dweight.shape[0]
    blocks = -(-rows // _CHUNK)
    zeroed, list_begin, list_size, short_keys, long_keys, row_lists = device.workspace(*_scratch(keys, rows))
    counts, list_counters = zeroed[: blocks * keys], zeroed[blocks * keys :]
    device.fill_zero(zeroed)
    device.launch(
        _COUNT_KEYS,
        (_CHUNK,),
        blocks,
        _CHUNK,
        counts=counts,
        tokens=tokens,
        start=start,
        rows=rows,
        length=length,
        keys=keys,
    )
    device.launch(
        _MAKE_LISTS, (_SHORT,), -(-keys // _BLOCK), _BLOCK,
        counts=counts, list_counters=list_counters, list_begin=list_begin, list_size=list_size,
        short_keys=short_keys, long_keys=long_keys, blocks=blocks, keys=keys,
    )  # fmt: skip
    device.launch(
        _PLACE_ROWS, (_CHUNK,), blocks, _CHUNK,
        row_lists=row_lists, counts=counts, list_begin=list_begin, tokens=tokens, start=start, rows=rows,
        length=length, keys=keys,
    )  # fmt: skip
    vector = vector_size(dim, dout, dweight)
    template, slices = (dout.dtype, vector), -(-dim // (_WARP * vector))
    lists = {
        "dweight": dweight,
        "dout": dout,
        "row_lists": row_lists,
        "list_begin": list_begin,
        "list_size": list_size,
        "dim": dim,
    }
    warps = _BLOCK // _WARP
    short_grid = min(-(-keys // warps), _SHORT_BLOCKS_PER_SM * device.sm_count), slices
    device.launch(
        _ADD_SHORT, template, short_grid, (_WARP, warps),
        short_keys=short_keys, key_count=list_counters[1:2], **lists,
    )  # fmt: skip
    long_grid = min(keys, _LONG_BLOCKS_PER_SM * device.sm_count), slices
    device.launch(
        _ADD_LONG, (*template, _LONG_WARPS), long_grid, (_WARP, _LONG_WARPS),
        long_keys=long_keys, key_count=list_counters[2:3], **lists,
    )  # fmt: skip


def _scratch(keys: int, rows: int) -> list[Request]:
    """Key counts per chunk followed by 3 counters, four lists over the keys, and the rows ordered by key."""
    lengths = (-(-rows // _CHUNK) * keys + 3, keys, keys, keys, keys, rows)
    return [((length,), np.int32) for length in lengths]


def scratch_bytes(device: Device, config: ModelConfig, rows: int) -> int:
    """The lists of the larger table."""
    return request_bytes(*_scratch(max(config.padded_vocab, config.context), rows))
