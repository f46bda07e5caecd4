"""Token by token: reading tokens through a KV cache and sampling the next ones."""

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.arena import Arena
from kernels.kv_cache import KVCache, new_cache, sampled_tokens, tokens_view
from kernels.model import Transformer

Array = np.ndarray[Any, Any]

# The buffer of the final norm's output of the last positions. The forward pass no longer needs it by then.
LAST_NORM = "branch"


@dataclass(frozen=True)
class _Sampler:
    """Samples a token after each row of logits (count, Vp). It is part of a graph's key: equal samplers
    launch the same kernels.
    """

    suppressed_count: int  # how many ids, in the cache's buffer, are not sampled
    temperature: float
    top_k: int
    top_p: float


class Decoder:
    """Decoding with one model. On a GPU each token is one CUDA graph.

    Args:
        model: the model, with its operations and weights.
        arena: the engine's buffers.
    """

    def __init__(self, model: Transformer, arena: Arena) -> None:
        self._model, self._arena, self._config = model, arena, model.config

    def cache(self, batch: int = 1) -> KVCache:
        """An empty cache for `batch` sequences of up to `context` tokens."""
        return new_cache(self._config, self._model.tensors.ops, batch)

    def decode(self, tokens: NDArray[np.int32], cache: KVCache) -> NDArray[np.float32]:
        """Append tokens (B, n) to the cache; return head 0's logits (B, V) after the last of them, with the
        model's logit_softcap.

        Raises:
            ValueError: the cache has no room for n more tokens.
        """
        _require_free(cache)
        logits = self._model.tensors.ops.download(self._append(tokens, cache, 1))
        logits, cap = logits[:, : self._config.vocab_size], self._config.logit_softcap
        return (cap * np.tanh(logits / cap) if cap else logits).astype(np.float32)

    def sample_next(
        self, tokens: Array, cache: KVCache, uniform: Array, suppressed: Array, *, last: int = 1,
        temperature: float, top_k: int, top_p: float,
    ) -> NDArray[np.int32]:  # fmt: skip
        """Append tokens (B, n); return a token sampled after each of the last `last` positions, (B * last,).

        Args:
            tokens: (B, n) int32; B or `last` is 1.
            cache: gets their keys and values.
            uniform: (B * last,) fp64 in [0, 1), the random number of each sample (kernels/cpu/sample.py).
            suppressed: (count,) int32, ids that are not sampled.
            last: positions after which a token is sampled.
            temperature, top_k, top_p: as in kernels.generation.Sampling.
        """
        _require_free(cache)
        _suppress(suppressed, cache)
        sampler = self._sampler(cache, uniform, 0, len(suppressed), temperature, top_k, top_p)
        self._append(tokens, cache, last, 0, sampler)
        self._model.tensors.ops.synchronize()
        return sampled_tokens(cache, len(uniform), 0)

    def sample_stream(
        self, tokens: Array, cache: KVCache, uniforms: Iterable[Array], suppressed: Array, *,
        temperature: float, top_k: int, top_p: float,
    ) -> Generator[NDArray[np.int32]]:  # fmt: skip
        """Append tokens (B, n), sample a token per sequence, append those, and so on: (B,) tokens for each of
        `uniforms`.

        A GPU does not wait for the host in between. The pass that reads a token is launched before the host
        has seen the token, so `uniforms` is asked for one number ahead. The generator has exclusive use of
        the cache. When it ends or is closed, the cache is truncated to the tokens that produced the yielded
        samples.

        Raises:
            ValueError: the cache has no room for what `uniforms` asks for, or another generator uses it.
        """
        _require_free(cache)
        _suppress(suppressed, cache)
        ops, kept_length = self._model.tensors.ops, cache.length
        cache.in_use = True

        def passes() -> Iterator[tuple[int, int, Any]]:
            for n, uniform in enumerate(uniforms):
                sampler = self._sampler(cache, uniform, n % 2, len(suppressed), temperature, top_k, top_p)
                self._append(None if n else tokens, cache, 1, n % 2, sampler)
                yield n % 2, cache.length, ops.record_event()

        launching, launched = passes(), deque[tuple[int, int, Any]]()
        try:
            while True:
                launched.extend(islice(launching, 1 + ops.asynchronous - len(launched)))
                if not launched:
                    return
                slot, length, event = launched.popleft()
                ops.synchronize(event)
                sampled, kept_length = sampled_tokens(cache, len(tokens), slot), length
                yield sampled
        finally:
            ops.synchronize()  # a running pass would write into buffers that the next user fills
            cache.in_use = False
            cache.truncate(kept_length)

    def sample_drafts(
        self, position: int, cache: KVCache, uniform: Array, suppressed: Array, *, temperature: float,
        top_k: int, top_p: float,
    ) -> NDArray[np.int32]:  # fmt: skip
        """A token sampled by each of heads 1 .. K - 1, (K - 1,): head k guesses the token k + 1
        places after `position`.

        Args:
            position: index among the positions after which the last `sample_next` with this cache sampled.
            uniform: (K - 1,) fp64, the random number of each sample.
            cache, suppressed, temperature, top_k, top_p: as in `sample_next`.
        """
        _require_free(cache)
        _suppress(suppressed, cache)
        sampler = self._sampler(cache, uniform, 0, len(suppressed), temperature, top_k, top_p)
        ops = self._model.tensors.ops

        def work() -> None:
            norm = self._arena.rows(LAST_NORM, position + 1)[position:]
            self._sample(self._model.mtp_logits(norm), cache, 0, sampler)

        ops.replay(cache.graphs, ("draft", position, sampler), work)
        ops.synchronize()
        return sampled_tokens(cache, len(uniform), 0)

    def _sampler(
        self,
        cache: KVCache,
        uniform: Array,
        slot: int,
        suppressed_count: int,
        temperature: float,
        top_k: int,
        top_p: float,
    ) -> _Sampler:
        """The sampler of a pass, whose random numbers are written where the device reads them."""
        cache.token_io.host.view("uniform", (len(uniform),), slot)[...] = uniform
        return _Sampler(suppressed_count, temperature, top_k, top_p)

    def _sample(self, logits: Array, cache: KVCache, slot: int, sampler: _Sampler) -> None:
        ops, memory, count = self._model.tensors.ops, cache.token_io.device, len(logits)
        if sampler.suppressed_count:
            ops.suppress_tokens(logits, memory.view("suppressed", (sampler.suppressed_count,)))
        ops.sample(
            tokens_view(memory, count, 1 - slot), logits, memory.view("uniform", (count,), slot),
            vocab_size=self._config.vocab_size, softcap=self._config.logit_softcap,
            temperature=sampler.temperature, top_k=sampler.top_k, top_p=sampler.top_p,
        )  # fmt: skip

    def _append(
        self, tokens: Array | None, cache: KVCache, last: int, slot: int = 0, sampler: _Sampler | None = None
    ) -> Array:
        """Read tokens (B, n) into the cache; head 0's logits (B * last, Vp) after the last `last` positions.

        If `tokens` is None, they are those that the previous pass sampled into this slot. With a sampler, a
        token is sampled after each row of the logits, in the same graph.
        """
        ops = self._model.tensors.ops
        shape = (cache.keys.shape[1], 1) if tokens is None else tokens.shape
        (batch, count), context = shape, self._config.context
        assert batch == 1 or last == 1
        if cache.length + count > context:
            raise ValueError(f"context: {cache.length} + {count} tokens exceed model.context = {context}")
        rows, size = batch * count, (1 + 2 * batch * count,)
        # The slot is free: no pass is launched before the host has waited for the last pass but one.
        inputs = cache.token_io.host.view("inputs", size, slot)
        inputs[0], inputs[1 : 1 + rows] = cache.length, -cache.length
        if tokens is not None:
            inputs[1 + rows :] = tokens.reshape(-1)
        fused = count == last and rows <= self._model.decode_step_rows

        def work() -> None:
            logits = self._logits(cache, shape, last, slot, fused=fused)
            if sampler is not None:
                self._sample(logits, cache, slot, sampler)

        if count == last:
            ops.replay(cache.graphs, ("decode", shape, slot, sampler), work)
        else:  # prompts have many lengths, and one graph per length does not pay
            work()
        cache.length += count
        return self._arena.rows("logits", batch * last)

    def _logits(self, cache: KVCache, shape: tuple[int, ...], last: int, slot: int, *, fused: bool) -> Array:
        """The pass itself. It leaves the final norm's output in LAST_NORM, where sample_drafts reads it."""
        ops, model, (batch, count) = self._model.tensors.ops, self._model, shape
        inputs = cache.token_io.device.view("inputs", (1 + 2 * batch * count,), slot)
        if not fused:  # many kernels read the inputs: a copy in device memory saves each the way over the bus
            staged = self._arena.view("staged_inputs", inputs.shape)
            ops.copy_rows(staged.reshape(1, -1), inputs.reshape(1, -1), 0, 1)
            inputs = staged
        cached_length, (start, tokens) = inputs[:1].reshape(()), inputs[1:].reshape(2, *shape)
        norm = self._arena.rows(LAST_NORM, batch * last)
        if fused:
            return model.decode_step(norm, tokens, start, cache, cached_length)
        all_norms = model.forward(tokens, start, cache, cached_length)
        ops.copy_rows(norm, all_norms, count - last, count if last == 1 else 1)
        return model.head_logits(0, norm)


def _require_free(cache: KVCache) -> None:
    if cache.in_use:
        raise ValueError("cache: a generator of samples still uses it; exhaust or close it first")


def _suppress(suppressed: Array, cache: KVCache) -> None:
    """Write the ids (count,) that later passes do not sample."""
    cache.token_io.host.view("suppressed", suppressed.shape)[...] = suppressed
