"""The engine: one model on one device, with its parameters, gradients, optimizer state and activations.

One update is micro_step x n, reduce, update. Gradients accumulate over the micro-steps. The loss is a
mean over the whole update. So the caller sums the loss weights of all micro-batches before the first
micro-step, and passes head_scale. One thread uses an engine.

Ranks have an engine each, and make micro-steps of their own batches. They call __init__, load, reduce,
update, state, load_state, weights and first_nonfinite together.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.arena import Arena, plan_bytes
from kernels.batch import Batch, HeadScores, Update, head_targets, validate_batch
from kernels.config import ModelConfig, Numerics
from kernels.data_parallel import DataParallel
from kernels.decoding import Decoder
from kernels.devices import open_ops, open_ranks
from kernels.fp8 import fp8_weights
from kernels.heads import Heads
from kernels.memory import check_fits, plan_of_rank, report
from kernels.model import Transformer
from kernels.ops import Ops
from kernels.optimizers import AdamW
from kernels.parameters import flattened, initial_weights, named, parameter_table
from kernels.parts.tensors import Tensors
from kernels.ranks import ALONE, Link

Array = np.ndarray[Any, Any]


class Engine:
    """One model on one device.

    Args:
        config: the model.
        numerics: how it computes.
        micro_batch: the most sequences in a batch.
        device: "auto" (the GPU if one is visible), "cpu" or "cuda".
        threads: CPU threads, 0 for all.
        seed: of the initial weights; None leaves them zero, for load to fill.
        training: whether gradients, optimizer state and each layer's activations are held.
        dtype: np.float64 makes an engine whose gradients can be checked by differences.
        optimizer: how parameters are updated; None: AdamW.
        link: connects the ranks that train this model together.
        shard_optimizer: whether each rank holds and updates its part of the optimizer's state only.
        overlap: whether the last micro-step of an update already sums gradients over the ranks.

    Raises:
        ValueError: the device lacks the precision, or the model does not fit; the message says what to set.
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
        optimizer: AdamW | None = None,
        link: Link = ALONE,
        shard_optimizer: bool = True,
        overlap: bool = False,
    ) -> None:
        self.ops: Ops = open_ops(device, numerics, threads=threads, dtype=dtype, index=link.local_rank)
        self.config, self.micro_batch, self.training = config, micro_batch, training
        self.device = self.ops.name
        self._optimizer = optimizer = optimizer or AdamW()
        self._table, self._step = parameter_table(config), 0
        # The first micro-batch of an update overwrites the weight gradients of linear layers.
        self._is_first_micro_step = True
        of_rank = partial(
            plan_of_rank, config, numerics, micro_batch, self.ops, optimizer if training else None,
            sharded=shard_optimizer,
        )  # fmt: skip
        self._split, self._plan = of_rank(rank=link.rank, ranks=link.size)
        check_fits(self._plan, micro_batch, self.ops.memory_bytes(), lambda ranks: of_rank(ranks=ranks)[1])
        self._arena = Arena(self._plan, self.ops.allocate(plan_bytes(self._plan)))
        self.ranks = open_ranks(link, self.ops)
        self._parallel = DataParallel(
            self.ranks, self._split, self.ops, self._arena, self._table, overlap=overlap
        )
        self._graphs, masters = self.ops.new_graphs(), self._parallel.stream_weights()
        self._grads = named(self._arena.whole("gradients"), self._table) if training else {}
        compute = named(self._arena.whole("weights"), self._table) if "weights" in self._arena else masters
        fp8 = self.ops.fp8 if training else None
        self._fp8_weights = fp8_weights(fp8, self._arena, self._table, compute) if fp8 else {}
        arrays = compute, masters, self._fp8_weights, self._grads
        self._model = Transformer(Tensors(config, numerics, self.ops, self._arena, *arrays))
        self._heads, self.decoder = Heads(self._model), Decoder(self._model, self._arena)
        if "workspace" in self._arena:
            self.ops.use_workspace(self._arena.whole("workspace"))
        if training:
            self.ops.upload(self._arena.whole("flags"), optimizer.own_flags(self._table, self._split))
        if seed is not None:
            self.load(initial_weights(config, seed))

    def describe(self) -> str:
        """What was chosen, in a line."""
        count = sum(p.size for p in self._table)
        optimizer = self._optimizer.describe(self._table) if self.training else ""
        return f"{self.ops.describe(self.config)}; {optimizer}{count:,} parameters"

    def plan_report(self) -> str:
        """The memory plan, one line per kind of buffer."""
        return report(self._plan)

    def load(self, weights: Mapping[str, Array]) -> None:
        """Take fp32 weights by parameter name.

        Raises:
            ValueError: a name is missing or unknown, or a shape differs.
        """
        self._parallel.distribute("parameters", flattened(weights, self._table, self.ops.dtype))
        self._cast_fp8_weights()

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """A copy of the weights by parameter name, fp32; on rank 0, elsewhere empty."""
        flat = self._parallel.collect("parameters")
        return named(flat.astype(np.float32), self._table) if flat.size else {}

    def parameter(self, name: str) -> Array:
        """One parameter itself, an array of the device, of one rank. In fp32, writing to it changes it."""
        return named(self._arena.whole("parameters"), self._table)[name]

    def gradients(self) -> dict[str, Array]:
        """A copy of the gradients of the micro-batches since the last update, by parameter name."""
        return {name: self.ops.download(grad) for name, grad in self._grads.items()}

    def micro_step(self, batch: Batch, head_scale: Array, *, last: bool = False) -> None:
        """Forward and backward over one micro-batch; gradients and loss sums accumulate.

        Args:
            batch: the micro-batch.
            head_scale: (K,), the derivative of the whole update's loss with respect to each head's weighted
                nll: the head's loss weight divided by the sum of head_weight_sums over all micro-batches of
                the update.
            last: whether the update has no further one, so that finished gradients may be summed over ranks.
        """
        assert self.training
        tokens, start = self._upload_batch(batch)
        targets, weight = (
            x.reshape(self.config.mtp_heads, -1) for x in head_targets(batch, self.config.mtp_heads)
        )
        inputs = (
            self._upload("targets", targets),
            self._upload("loss_weight", weight),
            self._upload("dnll", weight * np.asarray(head_scale, np.float64)[:, None]),
        )
        is_first, self._is_first_micro_step = self._is_first_micro_step, False
        # FP8 casts take the scale of the update before; the first update has none.
        current_scaling = bool(self._fp8_weights) and self._step == 0
        if self.ops.fp8:
            self.ops.fp8.set_current_scaling(current_scaling)
        overlap = self._parallel.begin_micro_step(last)
        self.ops.replay(
            self._graphs,
            ("micro_step", tokens.shape, is_first, current_scaling, overlap),
            lambda: self._forward_backward(tokens, start, *inputs, accumulate=not is_first, overlap=overlap),
        )

    def _forward_backward(
        self,
        tokens: Array,
        start: Array,
        targets: Array,
        loss_weight: Array,
        dnll: Array,
        *,
        accumulate: bool,
        overlap: bool,
    ) -> None:
        norm = self._model.forward(tokens, start, training=True)
        dnorm = self._arena.rows("dnorm", len(norm))
        self._heads.loss_and_gradient(dnorm, norm, targets, loss_weight, dnll, accumulate=accumulate)
        finished = self._parallel.sum_block if overlap else lambda layer: None
        self._model.backward(dnorm, tokens, start, accumulate=accumulate, finished=finished)
        if overlap:
            self.ranks.join()

    def use_ops(self, ops: Ops) -> None:
        """Compute with other operations from now on, for a benchmark that times each of them."""
        self.ops = self._model.tensors.ops = self._parallel.ops = ops

    def reduce(self) -> None:
        """Sum gradients and losses over all ranks; one rank has nothing to sum."""
        self._parallel.sum_gradients()

    def update(self, lr: float, while_gpu_computes: Callable[[], None] = lambda: None) -> Update:
        """Clip the gradient and apply the optimizer once; the next micro-batch starts a new gradient.

        If the gradient norm is not finite, the update is skipped. Each rank then keeps the gradients of its
        own part, so that first_nonfinite can name the bad tensor; a further micro-step would add to them.

        Args:
            lr: the learning rate.
            while_gpu_computes: called before the results are waited for.
        """
        assert not self._is_first_micro_step, "update: there is no micro-batch"
        norm, sums = self._arena.whole("grad_norm"), self._arena.whole("nll_sums")
        rate, step = self._upload("lr", np.float64(lr)), self._upload("step", np.int64(self._step + 1))
        self.ops.replay(self._graphs, "update", partial(self._clip_and_apply, norm, rate, step))
        while_gpu_computes()
        update = Update(self.ops.download(sums), float(self.ops.download(norm)))
        self.ops.upload(sums, 0.0)
        applied = bool(np.isfinite(update.grad_norm))
        self._is_first_micro_step = applied  # else the gradients stay for first_nonfinite
        self._step += applied
        return update

    def _clip_and_apply(self, norm: Array, lr: Array, step: Array) -> None:
        self.ops.grad_norm(norm, self._parallel.square_sums())
        self._optimizer.apply(self.ops, self._arena, self.config, self._split, norm, lr, step)
        self._parallel.share_weights()
        if self._fp8_weights and self.ops.fp8:
            self.ops.fp8.fp8_rescale(self._arena.whole("fp8_scales"), self._arena.whole("fp8_amax"), norm)
        self._cast_fp8_weights()

    def evaluate(self, batch: Batch) -> HeadScores:
        """Loss and accuracy of every prediction head; gradients and loss sums do not change."""
        return self._evaluate(batch, self.config.mtp_heads)

    def score(self, batch: Batch) -> NDArray[np.float32]:
        """(B, T) nats of every target under head 0."""
        return self._evaluate(batch, 1).nll[0]

    def _evaluate(self, batch: Batch, heads: int) -> HeadScores:
        norm = self._model.forward(*self._upload_batch(batch))
        targets, weight = head_targets(batch, heads)
        nll, correct = self._heads.scores(norm, self._upload("targets", targets.reshape(heads, -1)))
        return HeadScores(nll.reshape(targets.shape), correct.reshape(targets.shape), weight)

    def state(self) -> dict[str, Array]:
        """A copy of what training needs to continue; on rank 0. With several ranks, the gradients of
        an unfinished update are lost (DataParallel.collect).
        """
        copies = {name: self._parallel.collect(name) for name in ("parameters", *self.moments)}
        if self._fp8_weights:
            copies["fp8_scales"] = self.ops.download(self._arena.whole("fp8_scales"))
        return {**copies, "step": np.array(self._step, np.int64)} if self.ranks.rank == 0 else {}

    def load_state(self, state: Mapping[str, Array] | None) -> None:
        """Continue from the state of an engine of the same configuration; only rank 0 needs to have it."""
        for name in ("parameters", *self.moments):
            self._parallel.distribute(name, state[name] if state else None)
        if self._fp8_weights:
            scales = self.ranks.all_gather_object(state and state["fp8_scales"])[0]
            self.ops.upload(self._arena.whole("fp8_scales"), scales)
        self._cast_fp8_weights()
        for name in ("gradients", "fp8_amax", "nll_sums"):
            if name in self._arena:
                self.ops.fill_zero(self._arena.whole(name))
        self._step = self.ranks.all_gather_object(int(state["step"]) if state else 0)[0]
        self._is_first_micro_step = True

    @property
    def moments(self) -> list[str]:
        """The names of the optimizer's moments in the state."""
        return [buffer.name for buffer in self._plan if buffer.kind == "moments"]

    def first_nonfinite(self) -> str | None:
        """The first parameter whose value or gradient is not finite, in the order of the forward pass."""
        return self._parallel.first_nonfinite()

    def _cast_fp8_weights(self) -> None:
        if self.ops.fp8:
            for weight in self._fp8_weights.values():
                self.ops.fp8.cast_weight(weight)

    def _upload_batch(self, batch: Batch) -> tuple[Array, Array]:
        """Check a batch; its tokens, and the start of each token's document, on the device."""
        validate_batch(batch, self.micro_batch, self.config.context, self.config.vocab_size)
        return self._upload("tokens", batch.tokens), self._upload("start", batch.document_start)

    def _upload(self, name: str, values: Any) -> Array:
        """Values of this batch or step, in the device's buffer of that name."""
        view = self._arena.view(name, np.shape(values))
        self.ops.upload(view, values)
        return view
