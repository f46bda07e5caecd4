"""The micro-kernel of all CPU matmuls: a product of small matrices with its sums in vector registers.

    c (+)= a @ b        c (m, n)        a (m, k), of any strides: a transpose is free        b (k, n)

A tile is ROWS rows and 4 or 2 vectors of c. Its sums stay in registers over all k terms. A term loads the
vectors of one row of b, shared by the tile's rows, and broadcasts one element of a per row. With 4 vectors
that is 16 fused multiply-adds for 8 loads; a plain loop over memory has one for three. LLVM does not find
this form in a loop over arrays, so _emit writes a tile's LLVM instructions. An element's sum runs over k in
order, in every kind of tile.

Source: Goto and van de Geijn 2008, Anatomy of High-Performance Matrix Multiplication (the innermost kernel).
"""

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic, overload

from kernels.cpu.jit import jit

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]

# AVX-512 has 32 registers of 64 bytes: they hold 4 x 4 vectors of sums. AVX2 has 16 of 32 bytes: they hold 4
# x 2.
_WIDE = bool(binding.get_host_cpu_features().get("avx512f"))
VECTOR_BYTES = 64 if _WIDE else 32
ROWS, FULL, HALF = 4, 4 if _WIDE else 2, 2


def _tile(rows: int, vectors: int) -> Any:
    """The function that computes a tile of c. Python runs its body; compiled code runs what _emit emits."""

    def tile(c, a, b, i, j, add):  # type: ignore[no-untyped-def]
        block = np.s_[i : i + rows, j : j + vectors * VECTOR_BYTES // c.itemsize]
        c[block] = a[block[0]] @ b[: a.shape[1], block[1]] + (c[block] if add else 0)

    @intrinsic  # type: ignore[untyped-decorator]
    def emitted(typing_context, c, a, b, i, j, add):  # type: ignore[no-untyped-def]
        def emit(context, builder, signature, args):  # type: ignore[no-untyped-def]
            _emit(rows, vectors, context, builder, signature.args[:3], args)
            return context.get_dummy_value()

        return types.void(c, a, b, types.intp, types.intp, types.boolean), emit

    @overload(tile, inline="always")
    def compiled(c, a, b, i, j, add):  # type: ignore[no-untyped-def]
        return lambda c, a, b, i, j, add: emitted(c, a, b, i, j, add)

    return tile


def _emit(rows: int, vectors: int, context: Any, builder: Any, array_types: Any, args: Any) -> None:
    """Emit a tile: load the sums from c or zero them, loop over k, store the sums to c."""
    c, a, b = (context.make_array(t)(context, builder, x) for t, x in zip(array_types, args[:3], strict=True))
    dtype = array_types[0].dtype
    element, index, itemsize = (
        context.get_value_type(dtype),
        context.get_value_type(types.intp),
        dtype.bitwidth // 8,
    )
    vector = ir.VectorType(element, VECTOR_BYTES // itemsize)
    (c_row, _), (a_row, a_column), (b_row, _) = (cgutils.unpack_tuple(builder, x.strides) for x in (c, a, b))
    depth = cgutils.unpack_tuple(builder, a.shape)[1]

    def advance(base: Any, *offsets: Any) -> Any:
        """The pointer advanced by the offsets, in bytes."""
        for offset in offsets:
            base = builder.gep(base, [offset])
        return base

    def typed(pointer: Any, kind: Any) -> Any:
        return builder.bitcast(pointer, kind.as_pointer())

    def constant(value: int) -> Any:
        return ir.Constant(index, value)

    column_offset = builder.mul(args[4], constant(itemsize))
    row = [builder.add(args[3], constant(r)) for r in range(rows)]
    c_start, a_start, b_start = (typed(x.data, ir.IntType(8)) for x in (c, a, b))
    a_rows = [advance(a_start, builder.mul(r, a_row)) for r in row]
    c_rows = [advance(c_start, builder.mul(r, c_row), column_offset) for r in row]
    c_tile = [[typed(advance(x, constant(v * VECTOR_BYTES)), vector) for v in range(vectors)] for x in c_rows]
    # LLVM turns these stack slots into registers.
    sums = [[cgutils.alloca_once(builder, vector) for _ in range(vectors)] for _ in range(rows)]
    pairs = [(c_tile[r][v], sums[r][v]) for r in range(rows) for v in range(vectors)]
    with builder.if_else(args[5]) as (adding, overwriting):
        with adding:
            for memory, register in pairs:
                builder.store(builder.load(memory, align=itemsize), register)
        with overwriting:
            for _, register in pairs:
                builder.store(ir.Constant(vector, None), register)
    fma_type = ir.FunctionType(vector, [vector] * 3)
    fma = cgutils.get_or_insert_function(
        builder.module, fma_type, f"llvm.fma.v{vector.count}f{dtype.bitwidth}"
    )
    lane0, all_lanes = (
        ir.Constant(ir.IntType(32), 0),
        ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None),
    )
    with cgutils.for_range(builder, depth) as loop:
        b_term = advance(b_start, builder.mul(loop.index, b_row), column_offset)
        b_vectors = [
            builder.load(typed(advance(b_term, constant(v * VECTOR_BYTES)), vector), align=itemsize)
            for v in range(vectors)
        ]
        for r in range(rows):
            single = builder.load(
                typed(advance(a_rows[r], builder.mul(loop.index, a_column)), element), align=itemsize
            )
            single = builder.insert_element(ir.Constant(vector, ir.Undefined), single, lane0)
            broadcast = builder.shuffle_vector(single, single, all_lanes)
            for v in range(vectors):
                builder.store(
                    builder.call(fma, [broadcast, b_vectors[v], builder.load(sums[r][v])]), sums[r][v]
                )
    for memory, register in pairs:
        builder.store(builder.load(register), memory, align=itemsize)


_full_tile, _half_tile, _row_tile = _tile(ROWS, FULL), _tile(ROWS, HALF), _tile(1, HALF)


def width(itemsize: int) -> int:
    """The number of columns that c must be a multiple of: the width of a half tile."""
    return HALF * VECTOR_BYTES // itemsize


@jit
def multiply(c, a, b, add):  # type: ignore[no-untyped-def]
    """c = a @ b, or c += a @ b with add.

    Args:
        c: (m, n), overwritten or accumulated; n a multiple of width(itemsize), rows contiguous.
        a: (m, k).
        b: (at least k, at least n), rows contiguous. Rows and columns beyond are not read.
        add: whether to add to c or to overwrite it.
    """
    rows, columns = c.shape
    half, full = HALF * VECTOR_BYTES // c.itemsize, FULL * VECTOR_BYTES // c.itemsize
    whole = rows - rows % ROWS
    j = 0
    while j < columns:
        if columns - j >= full:
            for i in range(0, whole, ROWS):
                _full_tile(c, a, b, i, j, add)
        else:
            for i in range(0, whole, ROWS):
                _half_tile(c, a, b, i, j, add)
        step = full if columns - j >= full else half
        for i in range(whole, rows):
            for column in range(j, j + step, half):
                _row_tile(c, a, b, i, column, add)
        j += step
