"""The gradient check on every run of the tests: one seed and few elements; `make gradcheck` takes more of
both.
"""

import numpy as np
import pytest

from kernels.engine import Engine
from kernels.parameters import parameter_table
from tests.gradient_check import LIMIT, MODELS, check_model, make_problem


# Any wrong term of any backward pass, and a saved array that a later operation overwrites.
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter(name: str) -> None:
    errors = check_model(MODELS[name], seed=11, elements=2)
    assert errors.keys() == {p.name for p in parameter_table(MODELS[name])}
    assert max(errors.values()) <= LIMIT, errors


# Hidden activations computed again from an array that has changed in between.
@pytest.mark.parametrize("name", MODELS)
def test_recompute_gives_the_same_bits(name: str) -> None:
    gradients = []
    for recompute in (False, True):
        problem = make_problem(MODELS[name], seed=11, recompute=recompute)
        problem.engine.micro_step(problem.batch, problem.head_scale)
        gradients.append(problem.engine.gradients())
    for key, gradient in gradients[0].items():
        np.testing.assert_array_equal(gradients[1][key], gradient, err_msg=key)


# A check that can't fail: one wrong entry of one gradient must show.
def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    true = Engine.gradients

    def planted(self: Engine) -> dict[str, np.ndarray]:
        gradients = true(self)
        gradients["blocks.0.qkv.weight"] *= 1 + 1e-5
        return gradients

    monkeypatch.setattr(Engine, "gradients", planted)
    errors = check_model(MODELS["euler"], seed=11, elements=1)
    assert errors["blocks.0.qkv.weight"] > LIMIT
    assert max(error for name, error in errors.items() if name != "blocks.0.qkv.weight") <= LIMIT
