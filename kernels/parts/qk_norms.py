"""QK-norms: what happens to queries and keys between their linear layer and attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kernels.parts.positions import Position
from kernels.parts.tensors import Tensors

Array = np.ndarray[Any, Any]


class QkNorm(Protocol):
    """A norm of each query and key head, with the position's rotation after it.

    Attributes:
        parameters: the norms whose weight (D,) a block has.
        has_rstd: whether the forward pass saves a statistic per head, in the buffer qk_rstd.
        in_decode_step: whether decode_step.cu computes it.
    """

    @property
    def parameters(self) -> tuple[str, ...]: ...
    @property
    def has_rstd(self) -> bool: ...
    @property
    def in_decode_step(self) -> bool: ...

    def forward(self, t: Tensors, position: Position, i: int, qkv: Array, start: Array, table: Any) -> None:
        """Change qkv (B, T, qkv_heads, D) of layer i in place before attention."""

    def attention_dbias(self, t: Tensors, position: Position, linear: str) -> Array | None:
        """The gradient of the bias of `linear`, if attention's backward pass shall sum it along the way."""

    def backward(self, t: Tensors, position: Position, i: int, dqkv: Array, start: Array, table: Any) -> None:
        """Change dqkv in place after attention's backward pass; sum the gradients of the norms' weights, and
        of the bias if attention did not.
        """


@dataclass(frozen=True)
class NoQkNorm:
    """Queries and keys as the position leaves them."""

    parameters: tuple[str, ...] = ()
    has_rstd: bool = False
    in_decode_step: bool = True

    def forward(self, t: Tensors, position: Position, i: int, qkv: Array, start: Array, table: Any) -> None:
        position.forward(t, qkv, start, table)

    def attention_dbias(self, t: Tensors, position: Position, linear: str) -> Array | None:
        return position.attention_dbias(t, linear)

    def backward(self, t: Tensors, position: Position, i: int, dqkv: Array, start: Array, table: Any) -> None:
        position.backward(t, f"blocks.{i}.qkv", dqkv, start, table)


@dataclass(frozen=True)
class RmsQkNorm:
    """RMSNorm of each head, by the operation that also rotates it; with a learned weight or without."""

    weighted: bool
    has_rstd: bool = True
    in_decode_step: bool = True

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("q_norm", "k_norm") if self.weighted else ()

    def _weights(self, tensors: Mapping[str, Array], i: int) -> tuple[Array | None, Array | None]:
        return tensors.get(f"blocks.{i}.q_norm.weight"), tensors.get(f"blocks.{i}.k_norm.weight")

    def forward(self, t: Tensors, position: Position, i: int, qkv: Array, start: Array, table: Any) -> None:
        c, rstd = t.config, t.arena.rows("qk_rstd", start.size, i)
        q_weight, k_weight = self._weights(t.stream_weights, i)
        t.ops.qk_norm_forward(
            qkv, rstd, start, table, q_weight, k_weight, kv_heads=c.kv_heads, eps=c.norm_eps
        )

    def attention_dbias(self, t: Tensors, position: Position, linear: str) -> Array | None:
        return None  # the bias was added before the norm, and dqkv is not the gradient of its input yet

    def backward(self, t: Tensors, position: Position, i: int, dqkv: Array, start: Array, table: Any) -> None:
        qkv, rstd = t.arena.view("qkv", dqkv.shape, i), t.arena.rows("qk_rstd", start.size, i)
        q_weight, k_weight = self._weights(t.stream_weights, i)
        dq_weight, dk_weight = self._weights(t.grads, i)
        t.ops.qk_norm_backward(
            dqkv,
            dq_weight,
            dk_weight,
            qkv,
            rstd,
            start,
            table,
            q_weight,
            k_weight,
            kv_heads=t.config.kv_heads,
        )
        t.bias_backward(f"blocks.{i}.qkv", dqkv.reshape(-1, t.config.qkv_dim))
