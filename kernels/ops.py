"""The operations of a device, as the model and the engine call them.

`Ops` is what every device has. The CPU's are kernels/cpu/NAME.py, with the mathematics. The GPU's are
kernels/cuda/NAME.cu with a launcher beside it. Arguments are outputs first, then inputs, then saved arrays,
then keyword-only constants. Activation gradients are overwritten, parameter gradients are accumulated. mypy
checks both devices against this file. Some groups exist on some devices only: an attribute of `Ops` holds the
group, or None.
"""

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import numpy as np

from kernels.config import ModelConfig

Array = np.ndarray[Any, Any]
# A linear layer's weight: an array, or the handle of an FP8 weight (Fp8Ops.fp8_weight).
Weight = Any
# The recorded work of one owner, see Ops.replay: graphs are freed with their owner.
Graphs = Any


class Fp8Ops(Protocol):
    """FP8 matmuls of the blocks' linear layers, in training (numerics.precision: fp8)."""

    def set_current_scaling(self, current_scaling: bool) -> None:
        """Choose the scale of the casts from now on: of the array itself, or of the update before."""

    def fp8_weight(self, *arrays: Array, scales: Array, amax: Array) -> Weight: ...
    def cast_weight(self, weight: Weight) -> None: ...
    def fp8_rescale(self, scales: Array, amax: Array, grad_norm: Array) -> None: ...
    def fp8_mlp_forward(
        self, out: Array, act: Array, up: Array, inp: Array, weight: Weight, bias: Array | None, down: Weight
    ) -> None: ...
    def fp8_mlp_backward(
        self, dinp: Array, dup: Array, dweight: Array, dbias: Array | None, ddown: Array, dout: Array,
        up: Array, weight: Weight, down: Weight, *, add_dweight: bool,
    ) -> None: ...  # fmt: skip


class DecodeStepOps(Protocol):
    """The model over a few new tokens as one kernel."""

    def decode_step_rows(self, config: ModelConfig) -> int:
        """The most tokens that decode_step takes of such a model; 0 if none."""

    def decode_step(
        self, logits: Array, norm: Array, tokens: Array, start: Array, length: Array, keys: Array,
        values: Array, weights: Any, parameters: Any, head: Array, table: Array | None, *,
        config: ModelConfig,
    ) -> None: ...  # fmt: skip


class Ops(Protocol):
    """What every device has."""

    name: str  # "cpu" or "cuda"
    dtype: np.dtype[Any]  # of the residual stream, master weights, gradients, moments, statistics and losses
    storage: np.dtype[Any]  # of activations and compute weights
    asynchronous: bool  # whether a call returns before its work is done
    fp8: Fp8Ops | None
    decode_step_ops: DecodeStepOps | None

    # Model.
    def embedding_forward(
        self, out: Array, tokens: Array, start: Array, weight: Array, position_weight: Array | None
    ) -> None: ...
    def embedding_backward(
        self, dweight: Array, dposition_weight: Array | None, dout: Array, tokens: Array, start: Array
    ) -> None: ...
    def rmsnorm_forward(self, out: Array, rstd: Array, inp: Array, weight: Array, *, eps: float) -> None: ...
    def rmsnorm_backward(
        self, dinp: Array, dweight: Array, dout: Array, inp: Array, weight: Array, rstd: Array
    ) -> None: ...
    def residual_rmsnorm_forward(
        self, residual_out: Array, out: Array, rstd: Array, residual: Array, branch: Array,
        branch_bias: Array | None, weight: Array, *, eps: float,
    ) -> None: ...  # fmt: skip
    def residual_rmsnorm_backward(
        self, dinp: Array, dweight: Array, dbranch_bias: Array | None, dresidual_out: Array | None,
        dout: Array, residual_out: Array, weight: Array, rstd: Array,
    ) -> None: ...  # fmt: skip
    def layernorm_forward(
        self, out: Array, mean: Array, rstd: Array, inp: Array, weight: Array, bias: Array, *, eps: float
    ) -> None: ...
    def layernorm_backward(
        self, dinp: Array, dweight: Array, dbias: Array, dout: Array, inp: Array, weight: Array, mean: Array,
        rstd: Array,
    ) -> None: ...  # fmt: skip
    def residual_layernorm_forward(
        self, residual_out: Array, out: Array, mean: Array, rstd: Array, residual: Array, branch: Array,
        branch_bias: Array | None, weight: Array, bias: Array, *, eps: float,
    ) -> None: ...  # fmt: skip
    def residual_layernorm_backward(
        self, dinp: Array, dweight: Array, dbias: Array, dbranch_bias: Array | None,
        dresidual_out: Array | None, dout: Array, residual_out: Array, weight: Array, mean: Array,
        rstd: Array,
    ) -> None: ...  # fmt: skip
    def matmul_forward(self, out: Array, inp: Array, weight: Weight, bias: Array | None = None) -> None: ...
    def matmul_backward(
        self, dinp: Array, dweight: Array, dout: Array, inp: Array, weight: Weight, *, add_dinp: bool = False,
        add_dweight: bool = True,
    ) -> None: ...  # fmt: skip
    def matmul_gelu_forward(
        self, act: Array, up: Array, inp: Array, weight: Weight, bias: Array | None = None
    ) -> None: ...
    def matmul_gelu_backward(
        self, dup: Array, dweight: Array, dout: Array, act: Array, up: Array, weight: Weight,
        dbias: Array | None = None, *, add_dweight: bool = True,
    ) -> None: ...  # fmt: skip
    def bias_forward(self, out: Array, inp: Array, bias: Array) -> None: ...
    def bias_backward(self, dbias: Array, dout: Array) -> None: ...
    def rope_table(self, context: int, head_dim: int, base: float) -> Array: ...
    def rope_forward(self, qkv: Array, start: Array, table: Array, *, rotated: int) -> None: ...
    def rope_backward(self, dqkv: Array, start: Array, table: Array, *, rotated: int) -> None: ...
    def qk_norm_forward(
        self, qkv: Array, rstd: Array, start: Array, table: Array | None, query_weight: Array | None,
        key_weight: Array | None, *, kv_heads: int, eps: float,
    ) -> None: ...  # fmt: skip
    def qk_norm_backward(
        self, dqkv: Array, dquery_weight: Array | None, dkey_weight: Array | None, qkv: Array, rstd: Array,
        start: Array, table: Array | None, query_weight: Array | None, key_weight: Array | None, *,
        kv_heads: int,
    ) -> None: ...  # fmt: skip
    def attention_forward(self, out: Array, lse: Array, qkv: Array, start: Array) -> None: ...
    def attention_backward(
        self, dqkv: Array, dout: Array, out: Array, lse: Array, qkv: Array, start: Array,
        dbias: Array | None = None,
    ) -> None: ...  # fmt: skip
    def decode_attention_forward(
        self, out: Array, qkv: Array, keys: Array, values: Array, length: Array
    ) -> None: ...
    def gelu_forward(self, out: Array, inp: Array) -> None: ...
    def gelu_backward(self, dinp: Array, dout: Array, inp: Array) -> None: ...
    def swiglu_forward(self, out: Array, inp: Array) -> None: ...
    def swiglu_backward(self, dinp: Array, dout: Array, inp: Array) -> None: ...
    def cross_entropy_forward(
        self, nll: Array, correct: Array, logits: Array, targets: Array, *, vocab_size: int, softcap: float
    ) -> None: ...
    # dlogits hold the logits on entry.
    def cross_entropy_backward(
        self, dlogits: Array, nll: Array, targets: Array, weight: Array, *, vocab_size: int, softcap: float
    ) -> None: ...
    def weighted_sum_forward(self, total: Array, nll: Array, weight: Array) -> None: ...

    # Optimizers.
    norm_chunk: int  # gradients per chunk of square_sums

    def square_sums(self, out: Array, grads: Array) -> None: ...
    def grad_norm(self, out: Array, sums: Array) -> None: ...
    def adamw(
        self, params: Array, exp_avg: Array, exp_avg_sq: Array, grads: Array, compute_weights: Array | None,
        flags: Array, grad_norm: Array, lr: Array, step: Array, *, beta1: float, beta2: float, eps: float,
        weight_decay: float, grad_clip: float, lr_scales: tuple[float, ...],
    ) -> None: ...  # fmt: skip
    def muon(
        self, params: Array, exp_avg: Array, grads: Array, compute_weights: Array | None, x: Array,
        x_next: Array, gram: Array, poly: Array, grad_norm: Array, lr: Array, *, weight_decay: float,
        grad_clip: float,
    ) -> None: ...  # fmt: skip

    # Generation.
    def suppress_tokens(self, logits: Array, ids: Array) -> None: ...
    def sample(
        self, out: Array, logits: Array, uniform: Array, *, vocab_size: int, softcap: float,
        temperature: float, top_k: int, top_p: float,
    ) -> None: ...  # fmt: skip

    # Memory and order of work.
    def allocate(self, size: int) -> Array:
        """`size` zeroed bytes of the device, aligned for vector loads."""

    def allocate_shared(self, size: int) -> tuple[Array, Array]:
        """`size` zeroed bytes that host and device both read and write: as the host and as the device sees
        them.
        """

    def memory_bytes(self) -> int:
        """Memory that an engine may take."""

    def used_bytes(self) -> int:
        """Memory in use."""

    def workspace_bytes(self, config: ModelConfig, rows: int) -> int:
        """The most scratch memory that one operation needs over `rows` positions.

        Raises:
            ValueError: the kernels do not support the model.
        """

    def use_workspace(self, workspace: Array) -> None:
        """Take this scratch memory, which each operation may use while it runs."""

    def upload(self, target: Array, source: Any) -> None:
        """Copy a host array, or a number, into an array of the device, rounded to its type."""

    def download(self, array: Array) -> Array:
        """A host copy of an array of the device; bf16 becomes fp32."""

    def cast(self, out: Array, inp: Array) -> None:
        """out, of the storage type, = inp rounded to nearest."""

    def fill_zero(self, array: Array) -> None:
        """Set every element to zero."""

    def copy(self, target: Array, source: Array) -> None:
        """target = source, two arrays of the device of one type and shape."""

    def layers_view(self, flat: Array, offset: int, shape: tuple[int, ...], stride: int) -> Array:
        """A view of `flat` of this shape. Its first element is flat[offset]; along the first axis, elements
        are `stride` apart; the other axes are contiguous.
        """

    def copy_rows(self, target: Array, source: Array, first: int, step: int) -> None:
        """target (n, C) = source (m, C)[first::step]."""

    def new_graphs(self) -> Graphs:
        """An empty store for replay."""

    def replay(self, graphs: Graphs, key: Hashable, work: Callable[[], None]) -> None:
        """Do the work. A GPU captures it as a CUDA graph at the second call with a key and launches the graph
        from then on.

        `work` must start the same kernels with the same arguments at every call with one key.
        """

    def record_event(self) -> Any:
        """An event that `synchronize` can wait for: everything started so far is done."""

    def synchronize(self, event: Any = None) -> None:
        """Wait for an event, or for everything that was started. A kernel's error is raised here."""

    def describe(self, config: ModelConfig) -> str:
        """Device, precision, kernels and versions, in a line."""
