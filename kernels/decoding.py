"""Reading tokens through a cache and drawing the next: what an engine does token by token, one graph a token on a GPU."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.config import ModelConfig
from kernels.memory import Arena, Exchange
from kernels.model import Cache, Transformer

Array = np.ndarray[Any, Any]


class Decoding:
    """The part of Engine that decodes, over the model, the device's operations and the buffers that Engine sets up."""

    config: ModelConfig
    ops: Any
    _arena: Arena
    _exchange: Exchange
    _model: Transformer

    def cache(self, batch: int = 1) -> Cache:
        """An empty cache for `batch` sequences of up to `context` tokens."""
        c, dtype = self.config, self.ops.storage
        shape = (c.layers, batch, c.context, c.kv_heads, c.head_dim)
        keys, values = (self.ops.allocate(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape) for _ in range(2))
        cache = Cache(keys, values)
        weakref.finalize(cache, self.ops.forget, id(cache))
        return cache

    def decode(self, tokens: NDArray[np.int32], cache: Cache) -> NDArray[np.float32]:
        """Append tokens (B, n) to the cache; return head 0's logits (B, V) after the last of them.

        Raises:
            ValueError: the cache has no room for n more tokens.
        """
        return self.ops.download(self._append(tokens, cache, 1))[:, : self.config.vocab_size].astype(np.float32)

    def draw(
        self, tokens: Array, cache: Cache, uniform: Array, banned: Array, *, last: int = 1, temperature: float, top_k: int,
        top_p: float,
    ) -> NDArray[np.int32]:  # fmt: skip
        """Append tokens (B, n) as decode does; return a token drawn after each of the `last` last of them, (B * last,).

        B or `last` is 1. Drawn at uniform (B * last,) by kernels.cpu.sampling's rule; none of banned (count,) is drawn.
        """
        choose, key = self._choice(uniform, banned, temperature, top_k, top_p)
        self._append(tokens, cache, last, choose, key)
        return self._drawn(len(uniform))

    def draft(
        self, place: int, uniform: Array, banned: Array, *, temperature: float, top_k: int, top_p: float
    ) -> NDArray[np.int32]:
        """A token drawn by each of heads 1 .. K - 1, (K - 1,), at uniform (K - 1,).

        `place` counts the positions after which the last call of `draw` drew; head k's is a guess at the token k + 1 after that.
        """
        choose, key = self._choice(uniform, banned, temperature, top_k, top_p)

        def work() -> None:
            choose(self._model.further_logits(self._arena.view("branch", (place + 1, self.config.dim))[place:]))

        self.ops.replay(("draft", place, key), work)
        return self._drawn(len(uniform))

    def _choice(
        self, uniform: Array, banned: Array, temperature: float, top_k: int, top_p: float
    ) -> tuple[Callable[[Array], None], Any]:
        """What draws after each row of some logits, (count, Vp) as there are `uniform`; and what tells it from others."""
        vocab_size, shapes, view = self.config.vocab_size, (uniform.shape, banned.shape), self._exchange.device.view
        for name, values in (("uniform", uniform), ("banned", banned)):
            if len(values):
                self._exchange.host.view(name, values.shape)[...] = values

        def choose(logits: Array) -> None:
            if len(banned):
                self.ops.ban(logits, view("banned", shapes[1]))
            self.ops.sampling(
                view("drawn", shapes[0]), logits, view("uniform", shapes[0]), vocab_size=vocab_size, temperature=temperature,
                top_k=top_k, top_p=top_p,
            )  # fmt: skip

        return choose, (len(banned), temperature, top_k, top_p)

    def _drawn(self, count: int) -> NDArray[np.int32]:
        """Wait for the draw; its tokens."""
        self.ops.synchronize()
        return self._exchange.host.view("drawn", (count,)).copy()

    def _append(
        self, tokens: Array, cache: Cache, last: int, then: Callable[[Array], None] | None = None, key: Any = None
    ) -> Array:
        """Read tokens (B, n) into the cache; head 0's logits (B * last, Vp) after the last of them.

        `then` does something with the logits, in the same graph; `key` tells one such thing from another.
        """
        assert len(tokens) == 1 or last == 1
        (batch, count), context = tokens.shape, self.config.context
        if cache.length + count > context:
            raise ValueError(f"context: {cache.length} + {count} tokens exceed model.context = {context}")
        # In one piece: how many tokens the cache holds, where documents begin, and the tokens. What was there before has been
        # read, since all callers wait for what they return.
        size = (1 + 2 * tokens.size,)
        host = self._exchange.host.view("appended", size)
        host[0], host[1 : 1 + tokens.size], host[1 + tokens.size :] = cache.length, -cache.length, tokens.reshape(-1)
        model, fused = self._model, count == last and tokens.size <= self._model.fused_rows
        rows = self._arena.view("branch", (batch * last, self.config.dim))

        def work() -> None:
            appended = self._exchange.device.view("appended", size)
            if not fused:  # many kernels read them, and each would take the way to the host
                appended, shared = self._arena.view("taken", size), appended
                self.ops.copy_rows(appended.reshape(1, -1), shared.reshape(1, -1), 0, 1)
            length, (start, taken) = appended[:1].reshape(()), appended[1:].reshape(2, *tokens.shape)
            if fused:
                logits = model.step(rows, taken, start, cache, length)
            else:
                norm = model.forward(taken, start, cache, length)
                self.ops.copy_rows(rows, norm, count - last, count if last == 1 else 1)
                logits = model.head_logits(0, rows)
            if then is not None:
                then(logits)

        if count == last:  # prompts, of any length, are not worth a graph each
            self.ops.replay(("decode", tokens.shape, key, id(cache)), work)
        else:
            work()
        cache.length += count
        return self._arena.view("logits", (batch * last, self.config.padded_vocab))
