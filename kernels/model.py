"""The transformer, written once over the operations of a device; backward mirrors forward.

A block is two Euler steps of the residual stream x, one by attention and one by the MLP:

    x <- x + attention(norm(x))        x <- x + mlp(norm(x))

The addition, also of the bias of the linear layer that made the branch, and the norm that follows it are one operation. Rows
are positions: rows = B * T.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.arena import Arena, Exchange
from kernels.config import ModelConfig, Numerics

Array = np.ndarray[Any, Any]


@dataclass
class Cache:
    """Keys and values of the tokens seen so far, (layers, B, context, KV, D) each, of which the first `length` hold.

    By `exchange` tokens come in and those drawn go out; `drawing` is whether Engine.draws is at it.
    """

    keys: Array
    values: Array
    exchange: Exchange
    length: int = 0
    drawing: bool = False

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        assert 0 <= length <= self.length
        self.length = length


class Transformer:
    """Forward and backward over a device's operations; holds no memory of its own.

    Args:
        config, numerics: what to compute.
        ops: the device's operations (kernels.cpu.CpuOps or kernels.cuda.CudaOps).
        weights: by parameter name, in the precision that products take.
        narrow: of numerics.precision fp8 the blocks' weights as casts, which a training pass takes in place of those; else none.
        parameters: the same as they are trained, for the embedding and the norms, which make the stream what it is: also the
            biases that norms add.
        grads: by name; empty where only forward passes are made.
        arena: holds the buffers of kernels.memory.activation_plan.
    """

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        ops: Any,
        weights: Mapping[str, Array],
        narrow: Mapping[str, Any],
        parameters: Mapping[str, Array],
        grads: Mapping[str, Array],
        arena: Arena,
    ) -> None:
        self.config, self.numerics, self.ops = config, numerics, ops
        self.weights, self.narrow, self.parameters, self.grads, self.arena = (
            weights,
            narrow,
            parameters,
            grads,
            arena,
        )
        self.fused_rows = ops.fused_rows(config)
        self.rope = (
            ops.rope_table(config.context, config.head_dim, config.rope_base)
            if config.position == "rope"
            else None
        )

    def forward(
        self,
        tokens: Array,
        start: Array,
        cache: Cache | None = None,
        cached: Array | None = None,
        *,
        training: bool = False,
    ) -> Array:
        """The final normalised stream, (rows, C), of tokens (B, T).

        start (B, T) int32 is where each token's document begins in its row; a cache holds what came before the row instead, of
        which cached () int32 says how many tokens. training: whether backward follows.
        """
        c, ops, (batch, length) = self.config, self.ops, tokens.shape
        rows, heads = batch * length, c.heads + 2 * c.kv_heads
        weights = {**self.weights, **self.narrow} if training else self.weights
        residual, branch = self._rows("residual1", rows, c.dim), self._rows("branch", rows, c.dim)
        linear = None  # which made the branch, and whose bias the next norm adds
        ops.embedding_forward(
            residual, tokens, start, self.parameters["tok.weight"], self.parameters.get("pos.weight")
        )
        for i in range(c.layers):
            block = f"blocks.{i}."
            norm1 = self._norm_forward(f"{block}norm1", i, residual, branch, linear)
            residual = self._rows("residual1", rows, c.dim, i)
            qkv = self._rows("qkv", rows, heads * c.head_dim, i)
            ops.matmul_forward(qkv, norm1, weights[f"{block}qkv.weight"], weights.get(f"{block}qkv.bias"))
            qkv = qkv.reshape(batch, length, heads, c.head_dim)
            if self.rope is not None:
                ops.rope_forward(qkv, start, self.rope, rotated=c.heads + c.kv_heads)
            attended = self._rows("attended", rows, c.dim, i)
            out = attended.reshape(batch, length, c.heads, c.head_dim)
            if cache is None:
                ops.attention_forward(out, self.arena.view("lse", (batch, c.heads, length), i), qkv, start)
            else:
                ops.decode_attention_forward(out, qkv, cache.keys[i], cache.values[i], cached)
            ops.matmul_forward(branch, attended, weights[f"{block}proj.weight"])
            norm2 = self._norm_forward(f"{block}norm2", i, residual, branch, f"{block}proj")
            residual = self._rows("residual2", rows, c.dim, i)
            up, act = self._up(rows, i), self._rows("act", rows, c.ffn, i)
            linear, up_weight, up_bias = (
                f"{block}down",
                weights[f"{block}up.weight"],
                weights.get(f"{block}up.bias"),
            )
            down = weights[f"{linear}.weight"]
            if c.mlp == "swiglu":
                ops.matmul_forward(up, norm2, up_weight, up_bias)
                ops.swiglu_forward(act, up)
                ops.matmul_forward(branch, act, down)
            elif training and self.narrow:
                ops.fp8_mlp_forward(branch, act, up, norm2, up_weight, up_bias, down)
            else:
                ops.matmul_gelu_forward(act, up, norm2, up_weight, up_bias)
                ops.matmul_forward(branch, act, down)
        return self._norm_forward("norm", 0, residual, branch, linear)

    def step(self, norm: Array, tokens: Array, start: Array, cache: Cache, cached: Array) -> Array:
        """forward, and head_logits(0), of few new tokens (B, n) behind a cache: for fused_rows rows at most.

        norm (rows, C) is overwritten with what forward returns. Nothing is kept for a way back.
        """
        logits = self._logits(tokens.size)
        self.ops.decode_step(
            logits, norm, tokens, start, cached, cache.keys, cache.values, self.weights, self.parameters,
            self._head(self.weights, 0), self.rope, config=self.config,
        )  # fmt: skip
        return logits

    def backward(self, dnorm: Array, tokens: Array, start: Array, *, add: bool) -> None:
        """Add the gradient of every parameter, from the gradient of forward's result; dnorm is overwritten.

        Where not `add`, what is the weight of a block's product has its gradient overwritten.
        """
        c, ops, (batch, length) = self.config, self.ops, tokens.shape
        rows, heads = batch * length, c.heads + 2 * c.kv_heads
        dresidual, dattended = self._rows("dresidual", rows, c.dim), self._rows("dattended", rows, c.dim)
        dqkv, dup = self._rows("dqkv", rows, heads * c.head_dim), self._up(rows, 0, "dup")
        self._norm_backward("norm", 0, dresidual, None, dnorm, f"blocks.{c.layers - 1}.down")
        for i in reversed(range(c.layers)):
            block = f"blocks.{i}."
            self._mlp_backward(block, dnorm, dup, dresidual, i, add)
            self._norm_backward(f"{block}norm2", i, dresidual, dresidual, dnorm, f"{block}proj")
            attended = self._rows("attended", rows, c.dim, i)
            self._product_backward(f"{block}proj", dattended, dresidual, attended, add)
            shape = (batch, length, c.heads, c.head_dim)
            qkv_shape = (batch, length, heads, c.head_dim)
            ops.attention_backward(
                dqkv.reshape(qkv_shape),
                dattended.reshape(shape),
                attended.reshape(shape),
                self.arena.view("lse", (batch, c.heads, length), i),
                self.arena.view("qkv", qkv_shape, i),
                start,
                self.grads.get(f"{block}qkv.bias") if self.rope is None else None,
            )
            norm1 = self._rows("norm1", rows, c.dim, i)
            if self.rope is None:
                self._product_backward(f"{block}qkv", dnorm, dqkv, norm1, add)
            else:
                ops.rope_backward(dqkv.reshape(qkv_shape), start, self.rope, rotated=c.heads + c.kv_heads)
                self._linear_backward(f"{block}qkv", dnorm, dqkv, norm1, add)
            self._norm_backward(
                f"{block}norm1", i, dresidual, dresidual, dnorm, f"blocks.{i - 1}.down" if i else None
            )
        ops.embedding_backward(
            self.grads["tok.weight"], self.grads.get("pos.weight"), dresidual, tokens, start
        )

    def head_logits(self, k: int, norm: Array) -> Array:
        """Logits (rows, Vp) of prediction head k; the next head's overwrite them."""
        logits = self._logits(norm.shape[0])
        self.ops.matmul_forward(logits, norm, self._head(self.weights, k))
        return logits

    def further_logits(self, norm: Array) -> Array:
        """Logits (K - 1, Vp) of heads 1 .. K - 1 after one position, norm (1, C), by one product; others overwrite them."""
        c, heads = self.config, self.weights["head.weight"]
        logits = self._logits(c.mtp_heads - 1)
        self.ops.matmul_forward(
            logits.reshape(1, -1), norm, heads.reshape(-1, c.dim)[0 if c.tied_head else c.padded_vocab :]
        )
        return logits

    def head_backward(self, dnorm: Array, k: int, dlogits: Array, norm: Array, *, add: bool) -> None:
        """Head k's gradient, added to what there is or not, and that of its input, added to that of the heads before it."""
        head, dhead = self._head(self.weights, k), self._head(self.grads, k)
        self.ops.matmul_backward(dnorm, dhead, dlogits, norm, head, add_dinp=k > 0, add_dweight=add)

    def _head(self, tensors: Mapping[str, Array], k: int) -> Array:
        if self.config.tied_head:
            return tensors["tok.weight"] if k == 0 else tensors["head.weight"][k - 1]
        return tensors["head.weight"][k]

    def _rows(self, name: str, rows: int, width: int, layer: int = 0) -> Array:
        return self.arena.view(name, (rows, width), layer)

    def _up(self, rows: int, layer: int, name: str = "up") -> Array:
        return self._rows(name, rows, self.config.ffn * (2 if self.config.mlp == "swiglu" else 1), layer)

    def _logits(self, rows: int) -> Array:
        return self._rows("logits", rows, self.config.padded_vocab)

    def _linear_backward(self, name: str, dinp: Array, dout: Array, inp: Array, add: bool) -> None:
        self._product_backward(name, dinp, dout, inp, add)
        if self.config.bias:
            self.ops.bias_backward(self.grads[f"{name}.bias"], dout)

    def _product_backward(self, name: str, dinp: Array, dout: Array, inp: Array, add: bool) -> None:
        """_linear_backward where the next norm adds the bias, or attention has its gradient."""
        weight = f"{name}.weight"
        factor = self.narrow.get(weight, self.weights[weight])
        self.ops.matmul_backward(dinp, self.grads[weight], dout, inp, factor, add_dweight=add)

    def _mlp_backward(self, block: str, dnorm: Array, dup: Array, dout: Array, layer: int, add: bool) -> None:
        """From dout (rows, C) to dnorm, by way of dup; with recompute act is made anew."""
        c, ops, rows, down, grads = self.config, self.ops, len(dout), f"{block}down", self.grads
        up, act, norm = (
            self._up(rows, layer),
            self._rows("act", rows, c.ffn, layer),
            self._rows("norm2", rows, c.dim, layer),
        )
        if self.narrow and c.mlp == "gelu":
            weights, bias = (f"{block}up.weight", f"{down}.weight"), grads.get(f"{block}up.bias")
            dweight, ddown = (grads[name] for name in weights)
            factors = (self.narrow[name] for name in weights)
            ops.fp8_mlp_backward(dnorm, dup, dweight, bias, ddown, dout, up, *factors, add_dweight=add)
            return
        if self.numerics.recompute == "mlp":
            (ops.swiglu_forward if c.mlp == "swiglu" else ops.gelu_forward)(act, up)
        if c.mlp == "swiglu":
            dact = self._rows("dact", *act.shape)
            self._product_backward(down, dact, dout, act, add)
            ops.swiglu_backward(dup, dact, up)
            self._linear_backward(f"{block}up", dnorm, dup, norm, add)
            return
        weight = f"{down}.weight"
        ops.matmul_gelu_backward(
            dup,
            grads[weight],
            dout,
            act,
            up,
            self.weights[weight],
            grads.get(f"{block}up.bias"),
            add_dweight=add,
        )
        self._product_backward(f"{block}up", dnorm, dup, norm, add)

    def _norm_buffers(self, name: str, layer: int, rows: int) -> tuple[Array, Array, list[Array]]:
        """The stream that a norm read, its output, and its saved statistics."""
        short = name.rpartition(".")[2]
        names = ("rstd",) if self.config.norm == "rmsnorm" else ("mean", "rstd")
        stream = self._rows(short.replace("norm", "residual"), rows, self.config.dim, layer)
        saved = [self.arena.view(f"{short}_{statistic}", (rows,), layer) for statistic in names]
        return stream, self._rows(short, rows, self.config.dim, layer), saved

    def _norm_parameters(self, tensors: Mapping[str, Array], name: str) -> list[Array]:
        kinds = ("weight",) if self.config.norm == "rmsnorm" else ("weight", "bias")
        return [tensors[f"{name}.{kind}"] for kind in kinds]

    def _norm_forward(
        self, name: str, layer: int, residual: Array, branch: Array, linear: str | None
    ) -> Array:
        """norm(residual), or norm(residual + branch + the bias of `linear`, which made it), the sum kept as the stream."""
        c, parameters = self.config, self._norm_parameters(self.parameters, name)
        stream, out, saved = self._norm_buffers(name, layer, residual.shape[0])
        if linear is None:
            forward = self.ops.rmsnorm_forward if c.norm == "rmsnorm" else self.ops.layernorm_forward
            forward(out, *saved, residual, *parameters, eps=c.norm_eps)
        else:
            fused = (
                self.ops.residual_rmsnorm_forward
                if c.norm == "rmsnorm"
                else self.ops.residual_layernorm_forward
            )
            bias = self.parameters.get(f"{linear}.bias")
            fused(stream, out, *saved, residual, branch, bias, *parameters, eps=c.norm_eps)
        return out

    def _norm_backward(
        self, name: str, layer: int, dinp: Array, dresidual: Array | None, dout: Array, linear: str | None
    ) -> None:
        """Gradient at the stream that the norm read, with what arrives along it added, and of the bias that was added to it."""
        rmsnorm, weight = self.config.norm == "rmsnorm", self.parameters[f"{name}.weight"]
        stream, _, saved = self._norm_buffers(name, layer, dout.shape[0])
        grads, dbias = (
            self._norm_parameters(self.grads, name),
            None if linear is None else self.grads.get(f"{linear}.bias"),
        )
        backward = self.ops.residual_rmsnorm_backward if rmsnorm else self.ops.residual_layernorm_backward
        backward(dinp, *grads, dbias, dresidual, dout, stream, weight, *saved)
