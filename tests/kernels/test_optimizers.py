"""What every optimizer must do: tested for each of OPTIMIZERS, so that a new one needs no test of its own for
this.
"""

import numpy as np
import pytest

from kernels.config import Numerics
from kernels.engine import Engine
from kernels.optimizers import OPTIMIZERS
from tests.compare import assert_same_bits
from tests.gradient_check import MODELS, make_problem

EVERY = pytest.mark.parametrize("optimizer", OPTIMIZERS)
NAMES = pytest.mark.parametrize("name", ["euler", "gpt2"])


def make(name: str, optimizer: str, seed: int = 0) -> Engine:
    """An engine of one of the gradient check's models."""
    return Engine(
        MODELS[name], Numerics(), micro_batch=3, threads=1, seed=seed, optimizer=OPTIMIZERS[optimizer]()
    )


def train(engine: Engine, name: str, updates: int, lr: float = 1e-2) -> list[float]:
    """Updates by one batch again and again; the loss of each."""
    problem, losses = make_problem(MODELS[name], seed=0), []
    for _ in range(updates):
        engine.micro_step(problem.batch, problem.head_scale)
        engine.reduce()
        losses.append(float((engine.update(lr).nll_sums * problem.head_scale).sum()))
    return losses


# An update with the wrong sign, or of a part of the parameters only; a gradient that is not cleared adds up.
@EVERY
@NAMES
def test_the_loss_falls(name: str, optimizer: str) -> None:
    engine = make(name, optimizer)
    before, losses = engine.weights(), train(engine, name, 60)
    assert losses[-1] < 0.7 * losses[0] and losses[1] < losses[0]
    for key, weight in engine.weights().items():
        assert not np.array_equal(weight, before[key]), key


# A buffer that holds state between updates but is no moment: a resumed run would go another way.
@EVERY
@NAMES
def test_resume_is_exact(name: str, optimizer: str) -> None:
    whole, resumed = make(name, optimizer), make(name, optimizer, seed=9)
    train(whole, name, 2)
    resumed.load_state(whole.state())
    assert train(whole, name, 3) == train(resumed, name, 3)
    assert_same_bits(resumed.state(), whole.state())


# An update by a gradient that is not finite spoils every parameter.
@EVERY
def test_a_gradient_that_is_not_finite_changes_nothing(optimizer: str) -> None:
    engine = make("euler", optimizer)
    train(engine, "euler", 1)
    before, problem = engine.state(), make_problem(MODELS["euler"], seed=0)
    engine.micro_step(problem.batch, np.full_like(problem.head_scale, np.nan))
    assert not np.isfinite(engine.update(1e-2).grad_norm)
    assert_same_bits(engine.state(), before)
