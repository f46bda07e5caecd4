"""A product of small matrices whose sums stay in vector registers: what attention on the CPU is made of.

    c (+)= a @ b        c (m, n)        a (m, k), of any strides, so that a transpose costs nothing        b (k, n)

The product is made of tiles of ROWS x WIDTH elements of c. A tile's sums are registers from the first of the k terms to the
last; each term loads WIDTH elements of one row of b, which all ROWS share, and ROWS single elements of a, each spread over a
vector: ROWS * 2 fused multiply-adds on ROWS + 2 loads, where a loop that adds to memory makes one on three. LLVM does not find
this in a loop over arrays, so the tile is emitted as its instructions. Sums run over k in order.

Source: Goto and van de Geijn 2008, Anatomy of High-Performance Matrix Multiplication (the innermost kernel).
"""

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic, overload

from kernels.cpu.jit import jit

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]

ROWS = 4
VECTORS = 2
VECTOR_BYTES = 64 if binding.get_host_cpu_features().get("avx512f") else 32


def width(itemsize: int) -> int:
    """Columns of a tile: n has to be a multiple of it, and m of ROWS."""
    return VECTORS * VECTOR_BYTES // itemsize


@jit
def multiply(c, a, b, add):  # type: ignore[no-untyped-def]
    """c = a @ b, or c += a @ b with add.

    Args:
        c: (m, n), overwritten or accumulated; m a multiple of ROWS, n of width(itemsize), rows contiguous.
        a: (m, k).
        b: (at least k, at least n), rows contiguous; what lies beyond is not read.
        add: whether c's elements are where the sums begin.
    """
    step = VECTORS * VECTOR_BYTES // c.itemsize
    for j in range(0, c.shape[1], step):
        for i in range(0, c.shape[0], ROWS):
            _tile(c, a, b, i, j, add)


def _tile(c: Array, a: Array, b: Array, i: int, j: int, add: bool) -> None:
    rows, columns = slice(i, i + ROWS), slice(j, j + width(c.itemsize))
    c[rows, columns] = a[rows] @ b[: a.shape[1], columns] + (c[rows, columns] if add else 0)


@overload(_tile, inline="always")
def _tile_compiled(c, a, b, i, j, add):  # type: ignore[no-untyped-def]
    def tile(c, a, b, i, j, add):  # type: ignore[no-untyped-def]
        _emitted_tile(c, a, b, i, j, add)

    return tile


@intrinsic  # type: ignore[untyped-decorator]
def _emitted_tile(typing_context, c, a, b, i, j, add):  # type: ignore[no-untyped-def]
    def emit(context, builder, signature, args):  # type: ignore[no-untyped-def]
        arrays = [context.make_array(t)(context, builder, x) for t, x in zip(signature.args[:3], args[:3], strict=True)]
        (c_row, _), (a_row, a_column), (b_row, _) = (cgutils.unpack_tuple(builder, x.strides) for x in arrays)
        depth = cgutils.unpack_tuple(builder, arrays[1].shape)[1]
        element = context.get_value_type(c.dtype)
        vector = ir.VectorType(element, VECTOR_BYTES // c.dtype.bitwidth * 8)
        index, itemsize = context.get_value_type(types.intp), c.dtype.bitwidth // 8

        def address(base, *offsets):  # type: ignore[no-untyped-def]
            """A pointer in bytes."""
            for offset in offsets:
                base = builder.gep(base, [offset if isinstance(offset, ir.Value) else ir.Constant(index, offset)])
            return base

        def load(kind, pointer):  # type: ignore[no-untyped-def]
            return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=itemsize)

        first, column = args[3], builder.mul(args[4], ir.Constant(index, itemsize))
        c_base, a_base, b_base = (builder.bitcast(x.data, ir.IntType(8).as_pointer()) for x in arrays)
        row = [builder.add(first, ir.Constant(index, r)) for r in range(ROWS)]
        c_tile = [
            [address(c_base, builder.mul(r, c_row), column, v * VECTOR_BYTES) for v in range(VECTORS)] for r in row
        ]
        a_rows = [address(a_base, builder.mul(r, a_row)) for r in row]
        b_columns = address(b_base, column)
        sums = [[cgutils.alloca_once(builder, vector) for _ in range(VECTORS)] for _ in range(ROWS)]
        tile = [(r, v) for r in range(ROWS) for v in range(VECTORS)]
        with builder.if_else(args[5]) as (adding, overwriting):
            with adding:
                for r, v in tile:
                    builder.store(load(vector, c_tile[r][v]), sums[r][v])
            with overwriting:
                for r, v in tile:
                    builder.store(ir.Constant(vector, None), sums[r][v])
        name = f"llvm.fma.v{vector.count}f{c.dtype.bitwidth}"
        fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), name)
        spread = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None)
        with cgutils.for_range(builder, depth) as loop:
            b_term = address(b_columns, builder.mul(loop.index, b_row))
            b_vectors = [load(vector, address(b_term, v * VECTOR_BYTES)) for v in range(VECTORS)]
            for r in range(ROWS):
                single = load(element, address(a_rows[r], builder.mul(loop.index, a_column)))
                single = builder.insert_element(ir.Constant(vector, ir.Undefined), single, ir.Constant(ir.IntType(32), 0))
                factor = builder.shuffle_vector(single, single, spread)
                for v in range(VECTORS):
                    builder.store(builder.call(fma, [factor, b_vectors[v], builder.load(sums[r][v])]), sums[r][v])
        for r, v in tile:
            builder.store(builder.load(sums[r][v]), builder.bitcast(c_tile[r][v], vector.as_pointer()), align=itemsize)
        return context.get_dummy_value()

    return types.void(c, a, b, types.intp, types.intp, types.boolean), emit
