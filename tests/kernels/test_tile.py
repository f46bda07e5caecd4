"""The product of small matrices that attention and the linear layers are made of."""

import numpy as np
import pytest

from kernels.cpu.tile import multiply, width
from tests.compare import Array, assert_within, normal


def product(c: Array, a: Array, b: Array, add: bool) -> Array:
    """What multiply makes of a copy of c."""
    result = c.copy()
    multiply(result, a, b, add)
    return result


# A tile left out or made twice: rows that four does not divide, half tiles, no term at all, sums that do not
# begin at c.
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 5])
@pytest.mark.parametrize("tiles", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [1, 4, 7, 8])
def test_is_the_product(rows: int, tiles: int, depth: int, add: bool) -> None:
    rng = np.random.default_rng([rows, tiles, depth])
    columns = tiles * width(8)
    c, a, b = normal(rng, rows, columns), normal(rng, rows, depth), normal(rng, depth, columns)
    expected = a @ b + (c if add else 0)
    assert_within("c", product(c, a, b, add), expected, 1e-14 * (1 + depth))


# A stride taken for the other, and a read or write beside the part that was asked for.
def test_takes_transposed_and_cut_out_arrays() -> None:
    rng, columns = np.random.default_rng(0), width(8)
    a, b, c = normal(rng, 6, 9).T, normal(rng, 8, columns + 5), normal(rng, 11, columns + 7)
    b[6:], b[:, columns + 3 :], expected = np.nan, np.nan, c.copy()
    expected[1:10, 2 : 2 + columns] = a @ b[:6, 3 : 3 + columns]
    multiply(c[1:10, 2 : 2 + columns], a, b[:, 3 : 3 + columns], False)
    assert_within("c", c, expected, 1e-13)


# Float32 sums whose order depends on where an element lies, so on how a larger product is cut into blocks.
def test_an_element_is_the_same_in_every_tile() -> None:
    rng, columns = np.random.default_rng(1), 3 * width(4)
    a, b = normal(rng, 7, 50).astype(np.float32), normal(rng, 50, columns).astype(np.float32)
    whole = product(np.zeros((7, columns), np.float32), a, b, False)
    for row in range(7):
        assert np.array_equal(
            product(np.zeros((1, columns), np.float32), a[row : row + 1], b, False)[0], whole[row]
        )
    for tile in range(3):
        part = np.s_[:, tile * width(4) : (tile + 1) * width(4)]
        assert np.array_equal(product(np.zeros((7, width(4)), np.float32), a, b[part], False), whole[part])
