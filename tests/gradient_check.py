"""Every parameter's hand-written gradient against central differences of sixth order, in float64.

    python -m tests.gradient_check [--seeds 3] [--elements 64]

prints, for each architecture, the largest relative error of each tensor over
max(|analytic|, |numeric|, 1e-4 of the tensor's largest gradient), and fails where one exceeds 1e-6.
"""

import argparse
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.batch import Batch, head_targets, head_weight_sums
from kernels.config import ModelConfig, Numerics
from kernels.engine import Engine

# Odd sizes on purpose: a head width that no vector divides, a vocabulary with padding, three queries a key.
SIZES: dict[str, Any] = {"vocab_size": 61, "layers": 2, "dim": 30, "ffn": 22, "context": 11}
MODELS = {
    "euler": ModelConfig(**SIZES, heads=3, kv_heads=1, mtp_heads=3),
    "gpt2": ModelConfig(
        **SIZES,
        heads=5,
        kv_heads=5,
        norm="layernorm",
        position="learned",
        mlp="gelu",
        bias=True,
        tied_head=True,
    ),
    "rotary": ModelConfig(**SIZES, heads=3, kv_heads=1, bias=True),
    "qk_norm": ModelConfig(**SIZES, heads=3, kv_heads=1, bias=True, qk_norm="weighted"),
    "qk_norm_learned": ModelConfig(
        **SIZES,
        heads=3,
        kv_heads=3,
        position="learned",
        tied_head=True,
        qk_norm="unweighted",
        logit_softcap=5.0,
    ),
    "mixed": ModelConfig(
        **SIZES, heads=3, kv_heads=3, mtp_heads=2, norm="layernorm", mlp="gelu", tied_head=True
    ),
}
MTP_WEIGHTS = (1.0, 0.4, 0.7)
FLOOR = 1e-4
LIMIT = 1e-6

# f'(x) = sum_i C_i (f(x + i h) - f(x - i h)) / h, exact for polynomials of degree 6.
COEFFICIENTS = (45 / 60, -9 / 60, 1 / 60)
STEPS = (0.008, 0.004, 0.002, 0.001)
SMALLER_STEPS = (1e-4, 5e-5, 2.5e-5, 1.25e-5)


@dataclass
class Problem:
    """A float64 engine with random weights, one batch with documents and unweighted targets, and the loss
    over it.
    """

    engine: Engine
    batch: Batch
    head_scale: NDArray[np.float64]

    def loss(self) -> float:
        """sum over heads of head_scale * sum of weight * nll, in nats."""
        evaluation = self.engine.evaluate(self.batch)
        weighted = (evaluation.weight.astype(np.float64) * evaluation.nll).sum(axis=(1, 2))
        return float(weighted @ self.head_scale)


def make_problem(config: ModelConfig, seed: int, recompute: bool = False) -> Problem:
    """Weights larger than at the start of training, so that no path's gradient hides behind another's."""
    rng = np.random.default_rng(seed)
    numerics = Numerics(recompute="mlp" if recompute else "none")
    engine = Engine(config, numerics, micro_batch=3, threads=1, seed=seed, dtype=np.float64)
    weights = engine.weights()
    for name, weight in weights.items():
        weight += 0.3 * rng.standard_normal(weight.shape).astype(np.float32)
        if name in ("tok.weight", "head.weight"):
            weight[..., config.vocab_size :, :] = 0
    engine.load(weights)
    shape = (3, config.context)
    tokens = rng.integers(config.vocab_size, size=(3, config.context + 1), dtype=np.int32)
    document = np.cumsum(rng.random(shape) < 0.25, axis=1, dtype=np.int32)
    loss_weight = (rng.random(shape) * (rng.random(shape) < 0.8)).astype(np.float32)
    batch = Batch(
        np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:]), document, loss_weight
    )
    scale = np.array(MTP_WEIGHTS[: config.mtp_heads]) / head_weight_sums(batch, config.mtp_heads)
    assert (head_targets(batch, config.mtp_heads)[1] > 0).any(axis=(1, 2)).all()
    return Problem(engine, batch, scale)


def numeric_derivative(problem: Problem, element: NDArray[np.float64], floor: float = np.inf) -> float:
    """d loss / d element, element being a 0-d view into the engine's weights.

    Of the estimates at decreasing steps, the one that differs least from its neighbour: a larger step is
    wrong by truncation, a smaller one by rounding. If no two agree, a bend lies within the steps (squared
    ReLU has one), and smaller ones follow. The analytic value takes no part in the choice.
    """
    estimates: list[float] = []
    origin = element.copy()
    for number, step in enumerate((*STEPS, *SMALLER_STEPS)):
        if number >= len(STEPS) and agree(estimates, floor):
            break
        total = 0.0
        for i, coefficient in enumerate(COEFFICIENTS, start=1):
            for sign in (1, -1):
                element[...] = origin + sign * i * step
                total += sign * coefficient * problem.loss()
        estimates.append(total / step)
    element[...] = origin
    pairs = zip(estimates[1:], estimates, strict=False)
    return min(pairs, key=lambda pair: abs(pair[0] - pair[1]))[0]


def agree(estimates: list[float], floor: float) -> bool:
    """Whether two neighbours differ by much less than the error that is allowed."""
    return any(abs(a - b) <= LIMIT / 10 * max(abs(a), floor) for a, b in pairwise(estimates))


def check_model(config: ModelConfig, seed: int, elements: int, recompute: bool = False) -> dict[str, float]:
    """The largest relative error of each tensor over `elements` entries drawn from those with a gradient.

    Raises:
        AssertionError: a tensor has no gradient at all, or an entry without one changes the loss.
    """
    problem, rng = make_problem(config, seed, recompute), np.random.default_rng(seed)
    problem.engine.micro_step(problem.batch, problem.head_scale)
    errors = {}
    for name, grad in problem.engine.gradients().items():
        flat, weight = grad.reshape(-1), problem.engine.parameter(name).reshape(-1)
        touched, untouched = np.flatnonzero(flat), np.flatnonzero(flat == 0)
        assert len(touched), f"{name} has no gradient"
        for index in rng.permutation(untouched)[:2]:
            assert abs(numeric_derivative(problem, weight[index : index + 1].reshape(()))) < 1e-10, name
        floor, worst = FLOOR * np.abs(flat).max(), 0.0
        for index in rng.permutation(touched)[:elements]:
            numeric = numeric_derivative(problem, weight[index : index + 1].reshape(()), floor)
            worst = max(worst, abs(numeric - flat[index]) / max(abs(numeric), abs(flat[index]), floor))
        errors[name] = worst
    return errors


def main() -> None:
    """Print the table of all architectures and seeds; exit 1 where an error exceeds the limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--elements", type=int, default=64)
    args = parser.parse_args()
    if args.seeds < 1 or args.elements < 1:
        parser.error("--seeds and --elements: expected at least 1")
    worst = 0.0
    for label, config in MODELS.items():
        columns = [check_model(config, seed, args.elements) for seed in range(args.seeds)]
        print(
            f"{label}: largest relative error of {args.elements} elements a tensor, seeds 0 to "
            f"{args.seeds - 1}"
        )
        for name in columns[0]:
            row = [column[name] for column in columns]
            print(f"  {name:<24}" + "".join(f"{error:>11.1e}" for error in row), flush=True)
            worst = max(worst, *row)
    verdict = "pass" if worst <= LIMIT else "FAIL"
    print(f"largest of all: {worst:.2e}, allowed {LIMIT:.0e}: {verdict}")
    sys.exit(int(worst > LIMIT))


if __name__ == "__main__":
    main()
