"""The engine: one model with its parameters, gradients, moments and activations on one device.

An update is micro_step x n, reduce, update. Gradients accumulate over the micro-steps; what a micro-step needs to know of
the whole update, the weight of each position in the loss, comes in with it. Not to be shared between threads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.batch import Batch, document_start, head_targets
from kernels.config import ModelConfig, Numerics
from kernels.cpu import CpuOps
from kernels.memory import Arena, check_fits, memory_plan, report
from kernels.model import Cache, Transformer
from kernels.parameters import decay_runs, initial_weights, named, parameter_table

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class AdamW:
    """The optimizer's constants; grad_clip 0 does not clip."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    grad_clip: float = 1.0


@dataclass(frozen=True)
class Update:
    """What an update measured: nll_sums (K,) fp64, nats summed with loss_weight by head, and the norm before clipping."""

    nll_sums: NDArray[np.float64]
    grad_norm: float


@dataclass(frozen=True)
class Evaluation:
    """By head: nll (K, B, T) nats, whether the target was the likeliest token, and the weight of each position."""

    nll: NDArray[np.float32]
    correct: NDArray[np.bool_]
    weight: NDArray[np.float32]


class Engine:
    """One model on one device.

    Args:
        config: the model.
        numerics: how it computes.
        micro_batch: most sequences in a batch.
        device: "auto" or "cpu".
        threads: CPU threads, 0 for all.
        seed: of the initial weights; None leaves them zero, for load to fill.
        training: whether gradients, moments and each layer's activations are held.
        dtype: np.float64 makes an engine whose gradients can be checked by differences.

    Raises:
        ValueError: the device or precision is not to be had, or the model does not fit; the message says what to set.
    """

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        *,
        micro_batch: int,
        device: str = "auto",
        threads: int = 0,
        seed: int | None = 0,
        training: bool = True,
        dtype: type[np.floating[Any]] = np.float32,
    ) -> None:
        if device not in ("auto", "cpu"):
            raise ValueError(f"runtime.device: expected auto or cpu, got {device!r}")
        if numerics.precision != "fp32":
            raise ValueError(f"numerics.precision: the CPU computes in fp32, got {numerics.precision}; set it to fp32")
        self.config, self.micro_batch, self.training, self.device = config, micro_batch, training, "cpu"
        self.ops = CpuOps(dtype, threads)
        self.threads = self.ops.threads
        self._table = parameter_table(config)
        self._plan = memory_plan(config, numerics, micro_batch, training=training, dtype=self.ops.dtype)
        check_fits(self._plan, micro_batch, self.ops.memory_bytes())
        arena = Arena(self._plan, self.ops.allocate)
        self._flat = {buffer.name: arena.view(buffer.name, buffer.shape) for buffer in self._plan if buffer.fixed}
        grads = named(self._flat["gradients"], self._table) if training else {}
        self._weights = named(self._flat["parameters"], self._table)
        self._model = Transformer(config, numerics, self.ops, self._weights, grads, arena)
        self._arena, self._grads, self._decays = arena, grads, decay_runs(self._table)
        self._step, self._nll_sums = np.zeros((), np.int64), np.zeros(config.mtp_heads)
        if seed is not None:
            self.load(initial_weights(config, seed))

    def describe(self) -> str:
        """What was chosen, in a line."""
        count = sum(p.size for p in self._table)
        return f"{self.ops.describe()}; {count:,} parameters"

    def plan_report(self) -> str:
        """The memory plan, a line a kind."""
        return report(self._plan)

    def load(self, weights: Mapping[str, Array]) -> None:
        """Take fp32 weights by parameter name.

        Raises:
            ValueError: a name is missing or unknown, or a shape differs.
        """
        expected = {p.name: p.shape for p in self._table}
        for name in expected.keys() ^ weights.keys():
            raise ValueError(f"weights: {name} is {'missing' if name in expected else 'unknown to this model'}")
        for name, shape in expected.items():
            if weights[name].shape != shape:
                raise ValueError(f"weights: {name} expected shape {shape}, got {weights[name].shape}")
            self._weights[name][...] = weights[name]

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """A copy of the weights by parameter name, fp32."""
        return {name: np.array(weight, np.float32) for name, weight in self._weights.items()}

    def parameter(self, name: str) -> Array:
        """One parameter itself, in the precision that it is held in: a write changes the model."""
        return self._weights[name]

    def gradients(self) -> dict[str, Array]:
        """A copy of the gradients accumulated since the last update, by parameter name."""
        return {name: np.array(grad) for name, grad in self._grads.items()}

    def micro_step(self, batch: Batch, head_scale: Array) -> None:
        """Forward and backward over one micro-batch; gradients and loss sums accumulate.

        head_scale (K,) is the derivative of the whole update's loss with respect to each head's weighted nll: the head's
        weight in the loss over the sum of head_weight_sums of all micro-batches of the update.
        """
        assert self.training
        start, (targets, weight) = self._start(batch), head_targets(batch, self.config.mtp_heads)
        norm = self._model.forward(batch.tokens, start)
        nll = self._arena.view("nll", (norm.shape[0],))
        dnorm = norm
        for k in range(self.config.mtp_heads):
            logits = self._model.head_logits(k, norm)
            scaled = (weight[k].reshape(-1) * head_scale[k]).astype(self.ops.dtype)
            self.ops.cross_entropy_backward(
                logits, nll, targets[k].reshape(-1), scaled, vocab_size=self.config.vocab_size
            )
            self.ops.weighted_sum_forward(self._nll_sums[k : k + 1].reshape(()), nll, weight[k].reshape(-1))
            dnorm = self._model.head_backward(k, logits, norm)
        self._model.backward(dnorm, batch.tokens, start)

    def use_ops(self, ops: Any) -> None:
        """Compute with other operations from now on, as a benchmark that times each does."""
        self.ops = self._model.ops = ops

    def reduce(self) -> None:
        """Sum gradients and losses over all ranks; one device has nothing to sum."""

    def update(self, optimizer: AdamW, lr: float) -> Update:
        """Clip the accumulated gradient, apply AdamW once and clear the gradient.

        A gradient whose norm is not finite is neither applied nor cleared, so that first_nonfinite can name its tensor.
        """
        norm = np.empty((), np.float64)
        grads, o = self._flat["gradients"], optimizer
        self.ops.grad_norm(norm, grads)
        sums = self._nll_sums.copy()
        self._nll_sums[...] = 0
        if not np.isfinite(norm):
            return Update(sums, float(norm))
        self._step += 1
        self.ops.adamw(
            self._flat["parameters"],
            self._flat["exp_avg"],
            self._flat["exp_avg_sq"],
            grads,
            self._decays,
            norm,
            np.array(lr),
            self._step,
            beta1=o.beta1,
            beta2=o.beta2,
            eps=o.eps,
            weight_decay=o.weight_decay,
            grad_clip=o.grad_clip,
        )
        grads[...] = 0
        return Update(sums, float(norm))

    def evaluate(self, batch: Batch) -> Evaluation:
        """Loss and accuracy of every prediction head; gradients and loss sums stay as they are."""
        start = self._start(batch)
        return self._evaluate(batch.tokens, start, *head_targets(batch, self.config.mtp_heads))

    def score(self, batch: Batch) -> NDArray[np.float32]:
        """(B, T) nats of every target under head 0."""
        return self._evaluate(batch.tokens, self._start(batch), batch.targets[None], batch.loss_weight[None]).nll[0]

    def _evaluate(self, tokens: Array, start: Array, targets: Array, weight: Array) -> Evaluation:
        norm = self._model.forward(tokens, start)
        correct = np.empty(targets.shape, np.bool_)
        nll = np.empty(targets.shape, self.ops.dtype)
        for k in range(len(targets)):
            self.ops.cross_entropy_forward(
                nll[k].reshape(-1),
                correct[k].reshape(-1),
                self._model.head_logits(k, norm),
                targets[k].reshape(-1),
                vocab_size=self.config.vocab_size,
            )
        return Evaluation(nll, correct, weight)

    def cache(self, batch: int = 1) -> Cache:
        """An empty cache for `batch` sequences of up to `context` tokens."""
        c = self.config
        shape = (c.layers, batch, c.context, c.kv_heads, c.head_dim)
        return Cache(np.zeros(shape, self.ops.dtype), np.zeros(shape, self.ops.dtype))

    def decode(self, tokens: NDArray[np.int32], cache: Cache) -> NDArray[np.float32]:
        """Append tokens (B, n) to the cache; return head 0's logits (B, V) after the last of them.

        Raises:
            ValueError: the cache has no room for n more tokens.
        """
        count = tokens.shape[1]
        if cache.length + count > self.config.context:
            raise ValueError(f"context: {cache.length} + {count} tokens exceed model.context = {self.config.context}")
        start = np.full(tokens.shape, -cache.length, np.int32)
        norm = self._model.forward(tokens, start, cache)
        cache.length += count
        last = np.ascontiguousarray(norm[count - 1 :: count])
        return np.array(self._model.head_logits(0, last)[:, : self.config.vocab_size], np.float32)

    def state(self) -> dict[str, Array]:
        """A copy of all that training needs to go on bit for bit: parameters, moments and the count of updates."""
        names = ("parameters", "exp_avg", "exp_avg_sq")
        return {**{name: np.array(self._flat[name]) for name in names}, "step": self._step.copy()}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Go on from a state of an engine of the same configuration."""
        for name in ("parameters", "exp_avg", "exp_avg_sq"):
            self._flat[name][...] = state[name]
        self._flat["gradients"][...] = 0
        self._nll_sums[...] = 0
        self._step[...] = state["step"]

    def first_nonfinite(self) -> str | None:
        """The first parameter whose value or gradient is not finite, in the order of the forward pass."""
        for p in reversed(self._table):
            for kind, tensors in (("", self._weights), ("gradient of ", self._grads)):
                if p.name in tensors and not np.isfinite(tensors[p.name]).all():
                    return kind + p.name
        return None

    def _start(self, batch: Batch) -> NDArray[np.int32]:
        """Check a batch and find where its documents begin."""
        c, shape = self.config, batch.tokens.shape
        if len(shape) != 2 or not 1 <= shape[0] <= self.micro_batch or not 1 <= shape[1] <= c.context:
            raise ValueError(f"tokens: expected at most ({self.micro_batch}, {c.context}), got {shape}")
        for name, dtype in (("tokens", np.int32), ("targets", np.int32), ("document", np.int32), ("loss_weight", np.float32)):
            array = getattr(batch, name)
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(f"{name}: expected {shape} {np.dtype(dtype)}, got {array.shape} {array.dtype}")
        for name in ("tokens", "targets"):
            array = getattr(batch, name)
            if array.min() < 0 or array.max() >= c.vocab_size:
                raise ValueError(f"{name}: expected ids 0 to {c.vocab_size - 1}, got {array.min()} to {array.max()}")
        return document_start(batch.document)
