"""A product of small matrices whose sums stay in vector registers: what every other product on the CPU is made of.

    c (+)= a @ b        c (m, n)        a (m, k), of any strides, so that a transpose costs nothing        b (k, n)

The product is made of tiles of ROWS rows and 4 or 2 vectors of c. A tile's sums are registers from the first of the k terms to
the last; each term loads the vectors of one row of b, which all rows share, and a single element of a for each row, spread over
a vector: 16 fused multiply-adds on 8 loads, where a loop that adds to memory makes one on three. LLVM does not find this in a
loop over arrays, so a tile is emitted as its instructions. An element's sum runs over k in order, whatever tile it lies in.

Source: Goto and van de Geijn 2008, Anatomy of High-Performance Matrix Multiplication (the innermost kernel).
"""

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic, overload

from kernels.cpu.jit import jit

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]

# A processor with 32 registers of 64 bytes holds 4 x 4 sums; one with 16 of 32 bytes only 4 x 2.
_WIDE = bool(binding.get_host_cpu_features().get("avx512f"))
VECTOR_BYTES = 64 if _WIDE else 32
ROWS, FULL, HALF = 4, 4 if _WIDE else 2, 2


def _tile(rows: int, vectors: int) -> Any:
    """The function that makes a tile of c: in Python what is written here, compiled what _emit writes."""

    def tile(c, a, b, i, j, add):  # type: ignore[no-untyped-def]
        part = np.s_[i : i + rows, j : j + vectors * VECTOR_BYTES // c.itemsize]
        c[part] = a[part[0]] @ b[: a.shape[1], part[1]] + (c[part] if add else 0)

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
    """Write a tile's instructions: the sums from c or zero, a loop over k, the sums to c."""
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

    def at(base: Any, *offsets: Any) -> Any:
        """The pointer that many bytes on."""
        for offset in offsets:
            base = builder.gep(base, [offset])
        return base

    def of(pointer: Any, kind: Any) -> Any:
        return builder.bitcast(pointer, kind.as_pointer())

    def constant(value: int) -> Any:
        return ir.Constant(index, value)

    left = builder.mul(args[4], constant(itemsize))
    row = [builder.add(args[3], constant(r)) for r in range(rows)]
    c_start, a_start, b_start = (of(x.data, ir.IntType(8)) for x in (c, a, b))
    a_rows = [at(a_start, builder.mul(r, a_row)) for r in row]
    c_rows = [at(c_start, builder.mul(r, c_row), left) for r in row]
    c_tile = [[of(at(x, constant(v * VECTOR_BYTES)), vector) for v in range(vectors)] for x in c_rows]
    sums = [
        [cgutils.alloca_once(builder, vector) for _ in range(vectors)] for _ in range(rows)
    ]  # become registers
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
        b_term = at(b_start, builder.mul(loop.index, b_row), left)
        shared = [
            builder.load(of(at(b_term, constant(v * VECTOR_BYTES)), vector), align=itemsize)
            for v in range(vectors)
        ]
        for r in range(rows):
            single = builder.load(
                of(at(a_rows[r], builder.mul(loop.index, a_column)), element), align=itemsize
            )
            single = builder.insert_element(ir.Constant(vector, ir.Undefined), single, lane0)
            factor = builder.shuffle_vector(single, single, all_lanes)
            for v in range(vectors):
                builder.store(builder.call(fma, [factor, shared[v], builder.load(sums[r][v])]), sums[r][v])
    for memory, register in pairs:
        builder.store(builder.load(register), memory, align=itemsize)


_full_tile, _half_tile, _row_tile = _tile(ROWS, FULL), _tile(ROWS, HALF), _tile(1, HALF)


def width(itemsize: int) -> int:
    """What the columns of c have to be a multiple of: those of a half tile."""
    return HALF * VECTOR_BYTES // itemsize


@jit
def multiply(c, a, b, add):  # type: ignore[no-untyped-def]
    """c = a @ b, or c += a @ b with add.

    Args:
        c: (m, n), overwritten or accumulated; n a multiple of width(itemsize), rows contiguous.
        a: (m, k).
        b: (at least k, at least n), rows contiguous; what lies beyond is not read.
        add: whether c's elements are where the sums begin.
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
            for part in range(j, j + step, half):
                _row_tile(c, a, b, i, part, add)
        j += step
