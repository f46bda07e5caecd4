"""The product of a linear layer."""

import numpy as np
import pytest

from kernels.cpu.matmul import matmul_backward, matmul_forward
from tests.cases import MATMUL
from tests.compare import (
    Arrays,
    assert_accumulates,
    assert_float32,
    assert_gradients,
    assert_repeats,
    assert_same_bits,
    assert_within,
    normal,
    unwritten,
)


def inputs(rows: int, outputs: int, width: int) -> Arrays:
    """Random arrays, with a dinp to accumulate into."""
    rng = np.random.default_rng([rows, outputs, width])
    sizes = {
        "inp": (rows, width),
        "weight": (outputs, width),
        "dout": (rows, outputs),
        "first": (rows, width),
    }
    return {name: normal(rng, *shape) for name, shape in sizes.items()}


def run(a: Arrays, before: float = 0.0) -> Arrays:
    """Also, as dinp_added, the gradient of inp on top of `first`; the scratch is larger than needed and holds
    NaN.
    """
    inp, weight, dout = a["inp"], a["weight"], a["dout"]
    out, dinp, dinp_added = unwritten(dout), unwritten(inp), a["first"].copy()
    dweight, again = np.full_like(weight, before), unwritten(weight)
    matmul_forward(out, inp, weight)
    matmul_backward(dinp, dweight, dout, inp, weight)
    matmul_backward(dinp_added, again, dout, inp, weight, add_dinp=True, add_dweight=False)
    return {"out": out, "dinp": dinp, "dweight": dweight, "dinp_added": dinp_added, "dweight_alone": again}


# A weight that is not transposed passes wherever it is square.
@pytest.mark.parametrize("shape", MATMUL)
def test_forward_is_the_product(shape: tuple[int, int, int]) -> None:
    a = inputs(*shape)
    expected = np.einsum("ri,oi->ro", a["inp"], a["weight"])
    assert_within("out", run(a)["out"], expected, 1e-13 * np.abs(expected).max())


# dinp and dweight through the wrong factor or transposition.
@pytest.mark.parametrize("shape", MATMUL)
def test_gradient(shape: tuple[int, int, int]) -> None:
    assert_gradients(run, inputs(*shape), {"out": "dout"}, ("inp", "weight"))


# A product carried out in another precision than its arrays'. The longest sum has the largest extent's terms.
@pytest.mark.parametrize("shape", MATMUL)
def test_float32(shape: tuple[int, int, int]) -> None:
    a = inputs(*shape)
    rows, outputs, width = shape
    scale = {"out": width**0.5, "dinp": outputs**0.5, "dinp_added": outputs**0.5}
    scale |= dict.fromkeys(("dweight", "dweight_alone"), rows**0.5)
    assert_float32(run, a, max(shape), {name: 9 * size for name, size in scale.items()})


# A run that can't be repeated, on this machine or with another number of threads; a sum that depends on the
# tile it is made in.
@pytest.mark.parametrize("shape", [(64, 33, 128), (256, 384, 320), (1030, 70, 600)])
def test_same_bits_again_and_on_one_thread(shape: tuple[int, int, int]) -> None:
    assert_repeats(run, inputs(*shape))


# Gradient accumulation would keep only the last micro-batch.
def test_weight_gradient_accumulates() -> None:
    assert_accumulates(run, inputs(17, 5, 64), ("dweight",))


# An update's first micro-batch would add to the gradient of the update before.
@pytest.mark.parametrize("shape", MATMUL)
def test_weight_gradient_overwrites_where_asked(shape: tuple[int, int, int]) -> None:
    got = run(inputs(*shape))
    assert_same_bits({"dweight": got["dweight_alone"]}, {"dweight": got["dweight"]})


# Several prediction heads read one input: the second head's gradient would replace the first's.
@pytest.mark.parametrize("shape", MATMUL)
def test_input_gradient_accumulates_where_asked(shape: tuple[int, int, int]) -> None:
    a = inputs(*shape)
    got = run(a)
    assert_within(
        "dinp_added", got["dinp_added"], got["dinp"] + a["first"], 1e-14 * (4 + np.abs(got["dinp"]).max())
    )
