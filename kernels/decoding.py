"""Reading tokens through a cache and drawing the next: what an engine does token by token, one graph a token on a GPU."""

import math
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.arena import Arena, Exchange
from kernels.config import ModelConfig
from kernels.memory import exchange_plan
from kernels.model import Cache, Transformer

Array = np.ndarray[Any, Any]


class Decoding:
    """The part of Engine that decodes, over the model, the device's operations and the buffers that Engine sets up."""

    config: ModelConfig
    ops: Any
    _arena: Arena
    _model: Transformer

    def cache(self, batch: int = 1) -> Cache:
        """An empty cache for `batch` sequences of up to `context` tokens."""
        c, dtype = self.config, self.ops.storage
        shape = (c.layers, batch, c.context, c.kv_heads, c.head_dim)
        keys, values = (
            self.ops.allocate(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape) for _ in range(2)
        )
        cache = Cache(keys, values, Exchange(exchange_plan(c, batch * c.context), self.ops.allocate_shared))
        weakref.finalize(cache, self.ops.forget, id(cache))
        return cache

    def decode(self, tokens: NDArray[np.int32], cache: Cache) -> NDArray[np.float32]:
        """Append tokens (B, n) to the cache; return head 0's logits (B, V) after the last of them.

        Raises:
            ValueError: the cache has no room for n more tokens.
        """
        _check_free(cache)
        return self.ops.download(self._append(tokens, cache, 1))[:, : self.config.vocab_size].astype(
            np.float32
        )

    def draw(
        self, tokens: Array, cache: Cache, uniform: Array, banned: Array, *, last: int = 1, temperature: float, top_k: int,
        top_p: float,
    ) -> NDArray[np.int32]:  # fmt: skip
        """Append tokens (B, n) as decode does; return a token drawn after each of the `last` last of them, (B * last,).

        B or `last` is 1. Drawn at uniform (B * last,) by kernels.cpu.sample's rule; none of banned (count,) is drawn.
        """
        _check_free(cache)
        _ban(banned, cache)
        choose, key = self._choice(uniform, len(banned), cache, 0, temperature, top_k, top_p)
        self._append(tokens, cache, last, 0, choose, key)
        self.ops.synchronize()
        return _drawn(len(uniform), cache, 0)

    def draws(
        self, tokens: Array, cache: Cache, uniforms: Iterable[Array], banned: Array, *, temperature: float, top_k: int,
        top_p: float,
    ) -> Generator[NDArray[np.int32]]:  # fmt: skip
        """The tokens (B,) that `draw` gives after tokens (B, n), after the first of them, and so on: one for each of `uniforms`.

        A GPU does not wait for the host in between: the pass that reads a token is launched before that token is waited for, as
        it finds it where the pass before wrote it. So the number for the next token is asked for before a token comes.

        While this goes on the cache is its own. Once it ends or is closed, the cache holds what was read to draw those that came.

        Raises:
            ValueError: the cache has no room for what `uniforms` asks for, or other draws from it go on.
        """
        _check_free(cache)
        _ban(banned, cache)
        cache.drawing, read = True, cache.length

        def passes() -> Iterator[tuple[int, int, Any]]:
            for n, uniform in enumerate(uniforms):
                choose, key = self._choice(uniform, len(banned), cache, n % 2, temperature, top_k, top_p)
                self._append(None if n else tokens, cache, 1, n % 2, choose, key)
                yield n % 2, cache.length, self.ops.mark()

        launching, launched = passes(), deque[tuple[int, int, Any]]()
        try:
            while True:
                launched.extend(islice(launching, 1 + self.ops.asynchronous - len(launched)))
                if not launched:
                    return
                slot, length, mark = launched.popleft()
                self.ops.synchronize(mark)
                drawn, read = _drawn(len(tokens), cache, slot), length
                yield drawn
        finally:
            self.ops.synchronize()  # a pass under way would write into what may be another's by then
            cache.drawing = False
            cache.truncate(read)

    def draft(
        self,
        place: int,
        cache: Cache,
        uniform: Array,
        banned: Array,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
    ) -> NDArray[np.int32]:
        """A token drawn by each of heads 1 .. K - 1, (K - 1,), at uniform (K - 1,).

        `place` counts the positions after which the last call of `draw`, with this cache, drew; head k's is a guess at the token
        k + 1 after that.
        """
        _check_free(cache)
        _ban(banned, cache)
        choose, key = self._choice(uniform, len(banned), cache, 0, temperature, top_k, top_p)

        def work() -> None:
            choose(
                self._model.further_logits(self._arena.view("branch", (place + 1, self.config.dim))[place:])
            )

        self.ops.replay(("draft", place, key, id(cache)), work)
        self.ops.synchronize()
        return _drawn(len(uniform), cache, 0)

    def _choice(
        self,
        uniform: Array,
        banned: int,
        cache: Cache,
        slot: int,
        temperature: float,
        top_k: int,
        top_p: float,
    ) -> tuple[Callable[[Array], None], Any]:
        """What draws after each row of some logits, (count, Vp) as there are `uniform`; and what tells it from others."""
        memory, count, vocab_size = cache.exchange.device, len(uniform), self.config.vocab_size
        cache.exchange.host.view("uniform", (count,), slot)[...] = uniform

        def choose(logits: Array) -> None:
            if banned:
                self.ops.suppress_tokens(logits, memory.view("banned", (banned,)))
            self.ops.sample(
                _tokens(memory, count, 1 - slot), logits, memory.view("uniform", (count,), slot), vocab_size=vocab_size,
                temperature=temperature, top_k=top_k, top_p=top_p,
            )  # fmt: skip

        return choose, (banned, temperature, top_k, top_p)

    def _append(
        self, tokens: Array | None, cache: Cache, last: int, slot: int = 0, then: Callable[[Array], None] | None = None,
        key: Any = None,
    ) -> Array:  # fmt: skip
        """Read tokens (B, n) into the cache; head 0's logits (B * last, Vp) after the last of them.

        Where tokens are None, they are those that the pass before drew into this slot. `then` does something with the logits, in
        the same graph; `key` tells one such thing from another.
        """
        shape = (cache.keys.shape[1], 1) if tokens is None else tokens.shape
        (batch, count), context = shape, self.config.context
        assert batch == 1 or last == 1
        if cache.length + count > context:
            raise ValueError(f"context: {cache.length} + {count} tokens exceed model.context = {context}")
        # In one piece: how many tokens the cache holds, where documents begin, and the tokens. What was there before has been
        # read, since no pass is launched before the last but one was waited for.
        rows, size = batch * count, (1 + 2 * batch * count,)
        host = cache.exchange.host.view("appended", size, slot)
        host[0], host[1 : 1 + rows] = cache.length, -cache.length
        if tokens is not None:
            host[1 + rows :] = tokens.reshape(-1)
        model, fused = self._model, count == last and rows <= self._model.fused_rows
        norm = self._arena.view("branch", (batch * last, self.config.dim))

        def work() -> None:
            appended = cache.exchange.device.view("appended", size, slot)
            if not fused:  # many kernels read them, and each would take the way to the host
                appended, shared = self._arena.view("taken", size), appended
                self.ops.copy_rows(appended.reshape(1, -1), shared.reshape(1, -1), 0, 1)
            length, (start, taken) = appended[:1].reshape(()), appended[1:].reshape(2, *shape)
            if fused:
                logits = model.step(norm, taken, start, cache, length)
            else:
                stream = model.forward(taken, start, cache, length)
                self.ops.copy_rows(norm, stream, count - last, count if last == 1 else 1)
                logits = model.head_logits(0, norm)
            if then is not None:
                then(logits)

        if count == last:  # prompts, of any length, are not worth a graph each
            self.ops.replay(("decode", shape, key, slot, id(cache)), work)
        else:
            work()
        cache.length += count
        return self._arena.view("logits", (batch * last, self.config.padded_vocab))


def _tokens(memory: Arena, count: int, slot: int) -> Array:
    """Where a pass finds its `count` tokens, and the pass before it, of the other slot, leaves as many as it draws."""
    return memory.view("appended", (1 + 2 * count,), slot)[1 + count :]


def _drawn(count: int, cache: Cache, slot: int) -> NDArray[np.int32]:
    """The tokens that a pass of this slot drew, which was waited for."""
    return _tokens(cache.exchange.host, count, 1 - slot).copy()


def _ban(banned: Array, cache: Cache) -> None:
    """Ids (count,) that the passes to come do not draw."""
    cache.exchange.host.view("banned", banned.shape)[...] = banned


def _check_free(cache: Cache) -> None:
    if cache.drawing:
        raise ValueError("cache: draws from it go on; end or close them first")
