"""A linear layer with the GELU behind it, as one operation."""

import numpy as np
import pytest

from kernels.cpu.bias import bias_backward
from kernels.cpu.gelu import gelu_backward, gelu_forward
from kernels.cpu.matmul import matmul_backward, matmul_forward
from kernels.cpu.matmul_gelu import matmul_gelu_backward, matmul_gelu_forward
from tests.compare import Arrays, assert_same_bits, assert_within, normal, unwritten

SHAPES = [(1, 1, 1), (5, 24, 7), (67, 130, 33)]  # rows, hidden, width


def inputs(rows: int, hidden: int, width: int) -> Arrays:
    """Random arrays; up comes to lie where GELU is curved."""
    rng = np.random.default_rng([rows, hidden, width])
    sizes = {
        "inp": (rows, width),
        "weight": (hidden, width),
        "bias": (hidden,),
        "dout": (rows, width),
        "down": (width, hidden),
    }
    return {name: normal(rng, *size) / np.sqrt(size[-1]) for name, size in sizes.items()} | {
        "dweight": normal(rng, width, hidden),
        "dbias": normal(rng, hidden),
    }


# The parts in another order, a bias left out, an array for another: it must be its parts, each tested by
# itself.
@pytest.mark.parametrize("shape", SHAPES)
def test_is_its_parts(shape: tuple[int, int, int]) -> None:
    a = inputs(*shape)
    act, up, dup, dweight = *(unwritten(a["dout"], shape[0], shape[1]) for _ in range(3)), a["dweight"].copy()
    dbias = a["dbias"].copy()
    matmul_gelu_forward(act, up, a["inp"], a["weight"], a["bias"])
    matmul_gelu_backward(dup, dweight, a["dout"], act, up, a["down"], dbias)
    parts = {name: unwritten(act) for name in ("act", "up", "dact", "dup")} | {"dweight": a["dweight"].copy()}
    parts["dbias"] = a["dbias"].copy()
    matmul_forward(parts["up"], a["inp"], a["weight"], a["bias"])
    gelu_forward(parts["act"], parts["up"])
    matmul_backward(parts["dact"], parts["dweight"], a["dout"], parts["act"], a["down"])
    gelu_backward(parts["dup"], parts.pop("dact"), parts["up"])
    bias_backward(parts["dbias"], parts["dup"])
    assert_same_bits({"act": act, "up": up, "dup": dup, "dweight": dweight, "dbias": dbias}, parts)


# A derivative taken at act, or of another function: the loss sum(dout * (act @ down^T)), moved by a little of
# the input's bias.
def test_gradient_by_differences() -> None:
    a = inputs(67, 130, 33)
    act, up, dup = (unwritten(a["dout"], 67, 130) for _ in range(3))
    matmul_gelu_forward(act, up, a["inp"], a["weight"], a["bias"])
    matmul_gelu_backward(dup, a["dweight"].copy(), a["dout"], act, up, a["down"])
    direction, step, losses = normal(np.random.default_rng(0), 130), 1e-4, []
    for sign in (1, -1):
        matmul_gelu_forward(act, up, a["inp"], a["weight"], a["bias"] + sign * step * direction)
        losses.append(float((a["dout"] * (act @ a["down"].T)).sum()))
    # The central difference errs by a term of the third derivative, below 2, times step^2.
    bound = step**2 * float(np.abs(a["dout"] @ a["down"]).sum() * np.abs(direction).max() ** 3)
    assert_within("slope", np.array((losses[0] - losses[1]) / (2 * step)), (dup @ direction).sum(), bound)
