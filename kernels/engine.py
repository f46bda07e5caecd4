"""The engine: one model with its parameters, gradients, moments and activations on one device.

An update is micro_step x n, reduce, update. Gradients accumulate over the micro-steps; what a micro-step needs to know of
the whole update, the weight of each position in the loss, comes in with it. Decoding token by token is decoding.py's. Not to
be shared between threads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.arena import Arena
from kernels.batch import Batch, check, head_targets
from kernels.config import ModelConfig, Numerics, Optimizer
from kernels.decoding import Decoding
from kernels.devices import open_ops
from kernels.fp8 import fp8_weights
from kernels.memory import check_fits, plan, report
from kernels.model import Transformer
from kernels.parameters import Matrices, hidden_matrices, initial_weights, named, parameter_table, run_flags

Array = np.ndarray[Any, Any]

# Flat arrays that an update leaves to the next, those that there are.
STATE = ("parameters", "exp_avg", "exp_avg_sq", "fp8_scales")


@dataclass(frozen=True)
class AdamW:
    """The optimizer's constants; grad_clip 0 does not clip. Where Muon updates a matrix it takes the last two."""

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


class Engine(Decoding):
    """One model on one device.

    Args:
        config: the model.
        numerics: how it computes.
        micro_batch: most sequences in a batch.
        device: "auto" (the GPU where one is visible), "cpu" or "cuda".
        threads: CPU threads, 0 for all.
        seed: of the initial weights; None leaves them zero, for load to fill.
        training: whether gradients, moments and each layer's activations are held.
        dtype: np.float64 makes an engine whose gradients can be checked by differences.
        optimizer: "muon" updates the blocks' matrices by kernels.cpu.muon, all else by AdamW, which "adamw" does with everything.

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
        optimizer: Optimizer = "adamw",
    ) -> None:
        self.ops = open_ops(device, numerics, threads=threads, dtype=dtype)
        self.config, self.micro_batch, self.training, self.device = (
            config,
            micro_batch,
            training,
            self.ops.name,
        )
        self._table, self._step = parameter_table(config), 0
        self._first = True  # whether the next micro-batch is its update's first, which overwrites the products' gradients
        self._hidden = hidden_matrices(config) if optimizer == "muon" else []
        self._plan = plan(config, numerics, micro_batch, self.ops, training=training, optimizer=optimizer)
        check_fits(self._plan, micro_batch, self.ops.memory_bytes())
        self._arena = Arena(self._plan, self.ops.allocate)
        self._flat = {
            buffer.name: self._arena.view(buffer.name, buffer.shape) for buffer in self._plan if buffer.fixed
        }
        self._grads = named(self._flat["gradients"], self._table) if training else {}
        self._weights = named(self._flat["parameters"], self._table)
        read = named(self._flat["weights"], self._table) if "weights" in self._flat else self._weights
        self._narrow = fp8_weights(self.ops, self._plan, self._arena, self._table, read)
        self._model = Transformer(
            config, numerics, self.ops, read, self._narrow, self._weights, self._grads, self._arena
        )
        if "workspace" in self._arena:
            self.ops.use_workspace(self._arena.view("workspace", self._plan[-1].shape))
        if training:
            self.ops.upload(self._flat["flags"], run_flags(self._table, optimizer))
        if seed is not None:
            self.load(initial_weights(config, seed))

    def describe(self) -> str:
        """What was chosen, in a line."""
        count = sum(p.size for p in self._table)
        muons = f"Muon for {sum(p.size for p in self._table if p.hidden):,} of " if self._hidden else ""
        return f"{self.ops.describe(self.config)}; {muons}{count:,} parameters"

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
            raise ValueError(
                f"weights: {name} is {'missing' if name in expected else 'unknown to this model'}"
            )
        for name, shape in expected.items():
            if weights[name].shape != shape:
                raise ValueError(f"weights: {name} expected shape {shape}, got {weights[name].shape}")
            self.ops.upload(self._weights[name], weights[name])
        self._copy_weights()

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """A copy of the weights by parameter name, fp32."""
        return {name: self.ops.download(weight).astype(np.float32) for name, weight in self._weights.items()}

    def parameter(self, name: str) -> Array:
        """One parameter itself, an array of the device: where products read no copy of it, a write changes the model."""
        return self._weights[name]

    def gradients(self) -> dict[str, Array]:
        """A copy of the gradients of the micro-batches since the last update, of which there is one, by parameter name."""
        return {name: self.ops.download(grad) for name, grad in self._grads.items()}

    def micro_step(self, batch: Batch, head_scale: Array) -> None:
        """Forward and backward over one micro-batch; gradients and loss sums accumulate.

        head_scale (K,) is the derivative of the whole update's loss with respect to each head's weighted nll: the head's
        weight in the loss over the sum of head_weight_sums of all micro-batches of the update.
        """
        assert self.training
        tokens, start = self._take(batch)
        targets, weight = (
            x.reshape(self.config.mtp_heads, -1) for x in head_targets(batch, self.config.mtp_heads)
        )
        inputs = (
            self._input("targets", targets),
            self._input("loss_weight", weight),
            self._input("nll_weight", weight * np.asarray(head_scale, np.float64)[:, None]),
        )
        first, self._first = self._first, False
        measuring = bool(self._narrow) and self._step == 0
        if self._narrow:
            self.ops.measure(measuring)
        key = "micro_step", tokens.shape, first, measuring
        self.ops.replay(key, lambda: self._forward_backward(tokens, start, *inputs, first))

    def _forward_backward(
        self, tokens: Array, start: Array, targets: Array, loss_weight: Array, nll_weight: Array, first: bool
    ) -> None:
        norm, sums = (
            self._model.forward(tokens, start, training=True),
            self._arena.view("nll_sums", (self.config.mtp_heads,)),
        )
        nll = self._arena.view("nll", (norm.shape[0],))
        dnorm, vocab_size = self._arena.view("dnorm", norm.shape), self.config.vocab_size
        for k in range(self.config.mtp_heads):
            for part in self._parts(norm):
                logits = self._model.head_logits(k, norm[part])
                self.ops.cross_entropy_backward(
                    logits, nll[part], targets[k, part], nll_weight[k, part], vocab_size=vocab_size
                )
                self._model.head_backward(dnorm[part], k, logits, norm[part], add=not first or part.start > 0)
            self.ops.weighted_sum_forward(sums[k : k + 1].reshape(()), nll, loss_weight[k])
        self._model.backward(dnorm, tokens, start, add=not first)

    def _parts(self, norm: Array) -> list[slice]:
        """The rows of norm in parts whose logits fit their buffer."""
        (step,) = (buffer.shape[0] for buffer in self._plan if buffer.name == "logits")
        return [slice(first, first + step) for first in range(0, norm.shape[0], step)]

    def use_ops(self, ops: Any) -> None:
        """Compute with other operations from now on, as a benchmark that times each does."""
        self.ops = self._model.ops = ops

    def reduce(self) -> None:
        """Sum gradients and losses over all ranks; one device has nothing to sum."""

    def update(self, optimizer: AdamW, lr: float, meanwhile: Callable[[], None] = lambda: None) -> Update:
        """Clip the accumulated gradient and apply the optimizer once; the next micro-batch begins a new gradient.

        One whose norm is not finite is not applied and goes on, so that first_nonfinite can name its tensor.
        `meanwhile` is called before the results are waited for: a GPU computes on.
        """
        assert not self._first, "update: there is no micro-batch"
        norm, sums = self._arena.view("grad_norm", ()), self._arena.view("nll_sums", (self.config.mtp_heads,))
        rate, step = self._input("lr", np.float64(lr)), self._input("step", np.int64(self._step + 1))
        self.ops.replay(("update", optimizer), lambda: self._clip_and_apply(optimizer, norm, rate, step))
        meanwhile()
        update = Update(self.ops.download(sums), float(self.ops.download(norm)))
        self.ops.upload(sums, 0.0)
        self._first = bool(np.isfinite(update.grad_norm))
        self._step += self._first
        return update

    def _clip_and_apply(self, optimizer: AdamW, norm: Array, lr: Array, step: Array) -> None:
        flat, o = self._flat, optimizer
        self.ops.grad_norm(norm, flat["gradients"])
        self.ops.adamw(
            flat["parameters"], flat["exp_avg"], flat["exp_avg_sq"], flat["gradients"], flat.get("weights"), flat["flags"],
            norm, lr, step, beta1=o.beta1, beta2=o.beta2, eps=o.eps, weight_decay=o.weight_decay, grad_clip=o.grad_clip,
        )  # fmt: skip
        for matrices in self._hidden:
            self.ops.muon(
                *self._muon_arrays(matrices), norm, lr, weight_decay=o.weight_decay, grad_clip=o.grad_clip
            )
        if self._narrow:
            self.ops.fp8_rescale(flat["fp8_scales"], flat["fp8_most"], norm)
        self._cast_weights()

    def _muon_arrays(self, matrices: Matrices) -> list[Array | None]:
        """Matrices themselves, their momentum, gradient and copy that products read if there is one, and the scratch."""
        names, (layers, count, m, n) = ("parameters", "exp_avg", "gradients", "weights"), matrices.shape
        own = [matrices.view(self._flat[name]) if name in self._flat else None for name in names]
        scratch = (("muon_x", (layers * count, m, n)), ("muon_gram", (layers * count, min(m, n), min(m, n))))
        return own + [self._arena.view(name, shape, i) for name, shape in scratch for i in (0, 1)]

    def evaluate(self, batch: Batch) -> Evaluation:
        """Loss and accuracy of every prediction head; gradients and loss sums stay as they are."""
        return self._evaluate(batch, self.config.mtp_heads)

    def score(self, batch: Batch) -> NDArray[np.float32]:
        """(B, T) nats of every target under head 0."""
        return self._evaluate(batch, 1).nll[0]

    def _evaluate(self, batch: Batch, heads: int) -> Evaluation:
        norm = self._model.forward(*self._take(batch))
        nll, correct = (self._arena.view(name, norm.shape[:1]) for name in ("nll", "correct"))
        targets, weight = head_targets(batch, heads)
        target = self._input("targets", targets.reshape(heads, -1))
        result = Evaluation(
            np.empty(targets.shape, self.ops.dtype), np.empty(targets.shape, np.bool_), weight
        )
        for k in range(heads):
            for part in self._parts(norm):
                logits = self._model.head_logits(k, norm[part])
                self.ops.cross_entropy_forward(
                    nll[part], correct[part], logits, target[k, part], vocab_size=self.config.vocab_size
                )
            result.nll[k] = self.ops.download(nll).reshape(targets.shape[1:])
            result.correct[k] = self.ops.download(correct).reshape(targets.shape[1:])
        return result

    def state(self) -> dict[str, Array]:
        """A copy of all that training needs to go on bit for bit: parameters, moments, scales and the count of updates."""
        copies = {name: self.ops.download(self._flat[name]) for name in STATE if name in self._flat}
        return {**copies, "step": np.array(self._step, np.int64)}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Go on from a state of an engine of the same configuration."""
        for name in self._flat.keys() & STATE:
            self.ops.upload(self._flat[name], state[name])
        self._copy_weights()
        for name in self._flat.keys() & ("gradients", "fp8_most"):
            self.ops.fill_zero(self._flat[name])
        self.ops.fill_zero(self._arena.view("nll_sums", (self.config.mtp_heads,)))
        self._step, self._first = int(state["step"]), True

    def first_nonfinite(self) -> str | None:
        """The first parameter whose value or gradient is not finite, in the order of the forward pass."""
        for p in reversed(self._table):
            for kind, tensors in (("", self._weights), ("gradient of ", self._grads)):
                if p.name in tensors and not np.isfinite(self.ops.download(tensors[p.name])).all():
                    return kind + p.name
        return None

    def _copy_weights(self) -> None:
        """The copy that products read, where they read one, from the parameters."""
        if "weights" in self._flat:
            self.ops.cast(self._flat["weights"], self._flat["parameters"])
        self._cast_weights()

    def _cast_weights(self) -> None:
        """What FP8's products read, once an update, from that copy."""
        for weight in self._narrow.values():
            self.ops.cast_weight(weight)

    def _take(self, batch: Batch) -> tuple[Array, Array]:
        """Check a batch; its tokens, and where their documents begin, on the device."""
        check(batch, self.micro_batch, self.config.context, self.config.vocab_size)
        return self._input("tokens", batch.tokens), self._input("start", batch.start)

    def _input(self, name: str, values: Any) -> Array:
        """Values of this batch or this step, in the device's buffer of that name."""
        view = self._arena.view(name, np.shape(values))
        self.ops.upload(view, values)
        return view
