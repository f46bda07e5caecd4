"""The transformer, written once over the operations of a device; backward mirrors forward.

A block is two Euler steps of the residual stream x, one by attention and one by the MLP:

    x <- x + attention(norm1(x))        x <- x + mlp(norm2(x))

One operation adds a branch, and the bias of the linear layer that made it, to the stream and applies the next
norm. In comments and names, rows are positions: rows = B * T. The parts are in kernels/parts/.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kernels.kv_cache import KVCache
from kernels.parts import MLPS, NORMS, POSITIONS, QK_NORMS, decode_step_supports
from kernels.parts.tensors import Tensors

Array = np.ndarray[Any, Any]

# The buffer with the stream at each norm (before attention, before the MLP, at the end): the fused residual
# addition writes it, and the norm's backward pass reads it.
STREAM_OF = {"norm1": "residual1", "norm2": "residual2", "norm": "residual"}


class Transformer:
    """Forward and backward passes over `tensors`; holds no memory of its own."""

    def __init__(self, tensors: Tensors) -> None:
        c = tensors.config
        self.tensors, self.config = tensors, c
        self._norm, self._position, self._mlp = NORMS[c.norm], POSITIONS[c.position], MLPS[c.mlp]
        self._qk_norm = QK_NORMS[c.qk_norm]
        self._rope_table = self._position.table(c, tensors.ops)
        fused = tensors.ops.decode_step_ops
        # The most new tokens that decode_step takes.
        self.decode_step_rows = fused.decode_step_rows(c) if fused and decode_step_supports(c) else 0

    def forward(
        self,
        tokens: Array,
        start: Array,
        cache: KVCache | None = None,
        cached_length: Array | None = None,
        *,
        training: bool = False,
    ) -> Array:
        """The output of the last norm, (rows, C).

        Args:
            tokens: (B, T) int32.
            start: (B, T) int32, the index in its sequence at which each token's document begins.
            cache: keys and values of earlier tokens; None: attention within `tokens`.
            cached_length: () int32, the tokens in the cache.
            training: whether backward follows.
        """
        c, t, (batch, length) = self.config, self.tensors, tokens.shape
        ops, rows = t.ops, batch * length
        residual, branch = t.arena.rows("residual1", rows), t.arena.rows("branch", rows)
        branch_linear = None  # the linear layer that computed the branch; the next norm adds its bias
        ops.embedding_forward(
            residual, tokens, start, t.stream_weights["tok.weight"], t.stream_weights.get("pos.weight")
        )
        for i in range(c.layers):
            block = f"blocks.{i}."
            norm1 = self._norm_forward(block, "norm1", i, residual, branch, branch_linear)
            residual = t.arena.rows("residual1", rows, i)
            qkv = t.arena.rows("qkv", rows, i)
            ops.matmul_forward(qkv, norm1, t.weight(f"{block}qkv", training=training), t.bias(f"{block}qkv"))
            qkv = qkv.reshape(batch, length, c.qkv_heads, c.head_dim)
            self._qk_norm.forward(t, self._position, i, qkv, start, self._rope_table)
            attended = t.arena.rows("attended", rows, i)
            out = attended.reshape(batch, length, c.heads, c.head_dim)
            if cache is None:
                ops.attention_forward(out, t.arena.view("lse", (batch, c.heads, length), i), qkv, start)
            else:
                assert cached_length is not None
                ops.decode_attention_forward(out, qkv, cache.keys[i], cache.values[i], cached_length)
            ops.matmul_forward(branch, attended, t.weight(f"{block}proj", training=training))
            norm2 = self._norm_forward(block, "norm2", i, residual, branch, f"{block}proj")
            residual = t.arena.rows("residual2", rows, i)
            self._mlp.forward(t, block, i, branch, norm2, training=training)
            branch_linear = f"{block}down"
        return self._norm_forward("", "norm", 0, residual, branch, branch_linear)

    def backward(
        self,
        dnorm: Array,
        tokens: Array,
        start: Array,
        *,
        accumulate: bool,
        finished: Callable[[int], None] = lambda layer: None,
    ) -> None:
        """Add the gradient of every parameter, from the gradient dnorm of forward's result.

        dnorm then serves as scratch: it holds the output gradient of every norm in turn.

        If `accumulate` is false, the weight gradients of the blocks' linear layers are overwritten instead.
        `finished` is called with the number of each block whose gradients, and all before them in the flat
        array, are complete.
        """
        c, t, (batch, length) = self.config, self.tensors, tokens.shape
        ops, rows = t.ops, batch * length
        dresidual, dattended, dqkv = (t.arena.rows(name, rows) for name in ("dresidual", "dattended", "dqkv"))
        dqkv_heads = dqkv.reshape(batch, length, c.qkv_heads, c.head_dim)
        self._norm_backward("", "norm", 0, dresidual, None, dnorm, f"blocks.{c.layers - 1}.down")
        for i in reversed(range(c.layers)):
            block = f"blocks.{i}."
            norm1, norm2, attended = (t.arena.rows(name, rows, i) for name in ("norm1", "norm2", "attended"))
            self._mlp.backward(t, block, i, dnorm, dresidual, norm2, accumulate=accumulate)
            self._norm_backward(block, "norm2", i, dresidual, dresidual, dnorm, f"{block}proj")
            t.matmul_backward(f"{block}proj", dattended, dresidual, attended, accumulate=accumulate)
            shape = batch, length, c.heads, c.head_dim
            ops.attention_backward(
                dqkv_heads,
                dattended.reshape(shape),
                attended.reshape(shape),
                t.arena.view("lse", (batch, c.heads, length), i),
                t.arena.view("qkv", dqkv_heads.shape, i),
                start,
                self._qk_norm.attention_dbias(t, self._position, f"{block}qkv"),
            )
            self._qk_norm.backward(t, self._position, i, dqkv_heads, start, self._rope_table)
            t.matmul_backward(f"{block}qkv", dnorm, dqkv, norm1, accumulate=accumulate)
            branch_linear = f"blocks.{i - 1}.down" if i else None
            self._norm_backward(block, "norm1", i, dresidual, dresidual, dnorm, branch_linear)
            finished(i)
        ops.embedding_backward(t.grads["tok.weight"], t.grads.get("pos.weight"), dresidual, tokens, start)

    def decode_step(
        self, norm: Array, tokens: Array, start: Array, cache: KVCache, cached_length: Array
    ) -> Array:
        """forward and head_logits(0) of at most decode_step_rows new tokens (B, n) after a cache, by one
        kernel.

        norm (rows, C) is overwritten with forward's result. Nothing is saved for a backward pass.
        """
        t, logits = self.tensors, self.tensors.arena.rows("logits", tokens.size)
        assert t.ops.decode_step_ops is not None
        t.ops.decode_step_ops.decode_step(
            logits, norm, tokens, start, cached_length, cache.keys, cache.values, t.compute_weights,
            t.stream_weights, self._head(t.compute_weights, 0), self._rope_table, config=self.config,
        )  # fmt: skip
        return logits

    def head_logits(self, k: int, norm: Array) -> Array:
        """Logits (rows, Vp) of prediction head k; the next head's overwrite them."""
        logits = self.tensors.arena.rows("logits", norm.shape[0])
        self.tensors.ops.matmul_forward(logits, norm, self._head(self.tensors.compute_weights, k))
        return logits

    def mtp_logits(self, norm: Array) -> Array:
        """Logits (K - 1, Vp) of heads 1 .. K - 1 after one position, norm (1, C), by one matmul."""
        c, heads = self.config, self.tensors.compute_weights["head.weight"]
        logits = self.tensors.arena.rows("logits", c.mtp_heads - 1)
        mtp_heads = heads.reshape(-1, c.dim)[0 if c.tied_head else c.padded_vocab :]
        self.tensors.ops.matmul_forward(logits.reshape(1, -1), norm, mtp_heads)
        return logits

    def head_backward(self, dnorm: Array, k: int, dlogits: Array, norm: Array, *, accumulate: bool) -> None:
        """Head k's weight gradient, accumulated if asked, and dnorm: head 0 overwrites it, later heads add to
        it.
        """
        t = self.tensors
        head, dhead = self._head(t.compute_weights, k), self._head(t.grads, k)
        t.ops.matmul_backward(dnorm, dhead, dlogits, norm, head, add_dinp=k > 0, add_dweight=accumulate)

    def _head(self, tensors: Mapping[str, Array], k: int) -> Array:
        if self.config.tied_head:
            return tensors["tok.weight"] if k == 0 else tensors["head.weight"][k - 1]
        return tensors["head.weight"][k]

    def _norm_buffers(self, norm: str, layer: int, rows: int) -> tuple[Array, Array, list[Array]]:
        """The stream that a norm reads, its output, and its saved statistics."""
        arena = self.tensors.arena
        saved = [arena.rows(f"{norm}_{statistic}", rows, layer) for statistic in self._norm.statistics]
        return arena.rows(STREAM_OF[norm], rows, layer), arena.rows(norm, rows, layer), saved

    def _norm_weights(self, tensors: Mapping[str, Array], name: str) -> list[Array]:
        return [tensors[f"{name}.{kind}"] for kind in self._norm.parameter_std]

    def _norm_forward(
        self, block: str, norm: str, layer: int, residual: Array, branch: Array, branch_linear: str | None
    ) -> Array:
        """norm(residual), or norm(residual + branch + the bias of the linear layer `branch_linear`); the sum
        is the new stream.
        """
        t, weights = self.tensors, self._norm_weights(self.tensors.stream_weights, block + norm)
        stream, out, saved = self._norm_buffers(norm, layer, residual.shape[0])
        if branch_linear is None:
            self._norm.forward(t.ops)(out, *saved, residual, *weights, eps=self.config.norm_eps)
        else:
            bias, forward = t.stream_weights.get(f"{branch_linear}.bias"), self._norm.residual_forward(t.ops)
            forward(stream, out, *saved, residual, branch, bias, *weights, eps=self.config.norm_eps)
        return out

    def _norm_backward(
        self,
        block: str,
        norm: str,
        layer: int,
        dinp: Array,
        dresidual: Array | None,
        dout: Array,
        branch_linear: str | None,
    ) -> None:
        """dinp = dresidual + the gradient through the norm. Adds the gradients of the norm's parameters, and
        of the bias of `branch_linear`.
        """
        t, (stream, _, saved) = self.tensors, self._norm_buffers(norm, layer, dout.shape[0])
        dweights, weight = (
            self._norm_weights(t.grads, block + norm),
            t.stream_weights[f"{block}{norm}.weight"],
        )
        dbias = None if branch_linear is None else t.grads.get(f"{branch_linear}.bias")
        backward = self._norm.residual_backward(t.ops)
        backward(dinp, *dweights, dbias, dresidual, dout, stream, weight, *saved)
