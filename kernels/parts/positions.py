"""Positions: how the model knows the order of the tokens."""

from typing import Any, Protocol

import numpy as np

from kernels.config import ModelConfig
from kernels.ops import Ops
from kernels.parts.tensors import Tensors

Array = np.ndarray[Any, Any]


class Position(Protocol):
    """How the model knows the order of the tokens.

    Attributes:
        embedding: whether there is a learned position embedding, pos.weight (context, C).
        in_decode_step: whether decode_step.cu computes it.
    """

    embedding: bool
    in_decode_step: bool

    def table(self, c: ModelConfig, ops: Ops) -> Array | None:
        """What the engine computes once, if anything."""

    def forward(self, t: Tensors, qkv: Array, start: Array, table: Any) -> None:
        """Change qkv (B, T, qkv_heads, D) in place before attention."""

    def attention_dbias(self, t: Tensors, linear: str) -> Array | None:
        """The gradient of the bias of `linear`, if attention's backward pass shall sum it along the way."""

    def backward(self, t: Tensors, linear: str, dqkv: Array, start: Array, table: Any) -> None:
        """Change dqkv in place after attention's backward pass; sum the bias's gradient if attention did
        not.
        """


class Rope:
    """Queries and keys are rotated by an angle that grows with the position in the document."""

    embedding = False
    in_decode_step = True

    def table(self, c: ModelConfig, ops: Ops) -> Array | None:
        return ops.rope_table(c.context, c.head_dim, c.rope_base)

    def forward(self, t: Tensors, qkv: Array, start: Array, table: Any) -> None:
        t.ops.rope_forward(qkv, start, table, rotated=t.config.heads + t.config.kv_heads)

    def attention_dbias(self, t: Tensors, linear: str) -> Array | None:
        return None  # the bias was added before the rotation, and dqkv is not rotated back yet

    def backward(self, t: Tensors, linear: str, dqkv: Array, start: Array, table: Any) -> None:
        t.ops.rope_backward(dqkv, start, table, rotated=t.config.heads + t.config.kv_heads)
        t.bias_backward(linear, dqkv.reshape(-1, t.config.qkv_dim))


class Learned:
    """A learned embedding of the position is added to the token's."""

    embedding = True
    in_decode_step = True

    def table(self, c: ModelConfig, ops: Ops) -> Array | None:
        return None

    def forward(self, t: Tensors, qkv: Array, start: Array, table: Any) -> None: ...

    def attention_dbias(self, t: Tensors, linear: str) -> Array | None:
        return t.grads.get(f"{linear}.bias")

    def backward(self, t: Tensors, linear: str, dqkv: Array, start: Array, table: Any) -> None: ...
