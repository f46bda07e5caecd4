"""A pass of the whole model in one kernel, against the CPU's operations in turn behind the same cache."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kernels.batch import Batch
from kernels.config import ModelConfig, Numerics
from kernels.cpu.decode_attention import decode_attention_forward
from kernels.cpu.embedding import embedding_forward
from kernels.cpu.gelu import gelu_forward
from kernels.cpu.layernorm import layernorm_forward
from kernels.cpu.matmul import matmul_forward
from kernels.cpu.qk_norm import qk_norm_forward
from kernels.cpu.rmsnorm import rmsnorm_forward
from kernels.cpu.rope import rope_forward, rope_table
from kernels.cpu.swiglu import swiglu_forward
from kernels.engine import Engine
from kernels.parameters import flat_size, named, parameter_table
from tests.compare import Array, Arrays, assert_same_bits, assert_within
from tests.cuda import BF16, FLOAT, Cpu, Gpu, Side, assert_calibrated_op, gpu

GPT2: dict[str, Any] = {
    "norm": "layernorm",
    "position": "learned",
    "mlp": "gelu",
    "bias": True,
    "tied_head": True,
}


def model(
    layers: int, heads: int, kv_heads: int, dim: int, ffn: int, context: int, **parts: Any
) -> ModelConfig:
    """A configuration with a vocabulary that is padded."""
    return ModelConfig(
        vocab_size=300,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        ffn=ffn,
        context=context,
        **parts,
    )


# Fewer tiles than there are blocks and more, inputs and items that end within a step, weights in four
# regions, in two and in one (of a GPU with 227 KiB), rows of more elements than a block takes at once, keys
# for one share and for all, shared keys.
MODELS = {
    "gpt2": model(3, 4, 4, 256, 512, 300, **GPT2),
    "euler": model(3, 8, 2, 512, 344, 300),
    "gpt2 wide": model(2, 12, 12, 768, 3072, 1024, **GPT2),
    "euler wide": model(2, 12, 4, 1536, 2048, 700),
    "euler widest": model(1, 12, 4, 1536, 3584, 300),
    "gpt2 uneven": model(2, 3, 3, 120, 56, 70, **GPT2),
    "euler uneven": model(2, 6, 3, 336, 104, 70),
    "euler two passes": model(1, 20, 4, 1600, 104, 70),
    "mixed": model(1, 2, 1, 256, 64, 130, norm="layernorm", bias=True),
    "mixed uneven": model(2, 5, 1, 40, 24, 20, position="learned"),
    "qk_norm": model(3, 4, 2, 256, 344, 300, qk_norm="weighted"),
    "qk_norm wide heads": model(2, 6, 6, 768, 2048, 700, qk_norm="unweighted"),
    "qk_norm learned": model(2, 3, 1, 96, 56, 70, position="learned", qk_norm="weighted"),
    "narrow heads": model(1, 5, 5, 40, 24, 20),
}


def arrays_of(c: ModelConfig, batch: int, count: int, held: int) -> Arrays:
    """Random parameters, far from the initial ones, tokens, and a cache with NaN beyond what it holds."""
    rng, table = np.random.default_rng([c.dim, batch, count, held]), parameter_table(c)
    flat = np.zeros(flat_size(table))
    for p in table:
        scale = (
            1.0
            if p.name in ("tok.weight", "pos.weight")
            else 0.3
            if len(p.shape) == 1
            else p.shape[-1] ** -0.5
        )
        flat[p.offset : p.offset + p.size] = (p.std is None) + scale * rng.standard_normal(p.size)
    keys, values = np.full((2, c.layers, batch, c.context, c.kv_heads, c.head_dim), np.nan)
    for cached in (keys, values):
        cached[:, :, :held] = rng.standard_normal(cached[:, :, :held].shape)
    tokens = rng.integers(c.vocab_size, size=(batch, count), dtype=np.int32)
    return {"flat": flat, "keys": keys, "values": values, "tokens": tokens, "held": np.array(held, np.int32)}


def runner(c: ModelConfig) -> Any:
    """What assert_calibrated_op takes: logits, the last norm's rows, and the cache's new rows beside its
    old.
    """

    def run(side: Side, a: Arrays) -> Arrays:
        names, (batch, count), held = parameter_table(c), a["tokens"].shape, int(a["held"])
        weights, parameters = named(side.stored(a["flat"]), names), named(side.single(a["flat"]), names)
        keys, values = side.stored(a["keys"]), side.stored(a["values"])
        tokens, start = side.same(a["tokens"]), side.same(np.full_like(a["tokens"], -held))
        table = side.single(rope_table(c.context, c.head_dim, c.rope_base)) if c.position == "rope" else None
        logits, norm = (
            side.stored(np.full((batch * count, width), np.nan)) for width in (c.padded_vocab, c.dim)
        )
        head = weights["tok.weight"] if c.tied_head else weights["head.weight"][0]
        length = side.same(a["held"])
        if isinstance(side, Gpu):
            from kernels.cuda.decode.decode_step import decode_step

            decode_step(
                side.device,
                logits,
                norm,
                tokens,
                start,
                length,
                keys,
                values,
                weights,
                parameters,
                head,
                table,
                config=c,
            )
        else:
            in_turn(
                side,
                c,
                (logits, norm),
                tokens,
                start,
                length,
                (keys, values),
                weights,
                parameters,
                head,
                table,
            )
        old, new = np.s_[:, :, :held], np.s_[:, :, held : held + count]
        k, v = side.host(keys), side.host(values)
        cached = {"keys": k[new], "values": v[new], "old": np.stack((k[old], v[old]))}
        return {"logits": side.host(logits), "norm": side.host(norm), **cached}

    return run


def in_turn(
    side: Cpu, c: ModelConfig, outs: tuple[Array, Array], tokens: Array, start: Array, length: Array,
    cache: tuple[Array, Array], weights: dict[str, Array], parameters: dict[str, Array], head: Array,
    table: Array | None,
) -> None:  # fmt: skip
    """The pass by the CPU's operations, rounded where the kernel rounds."""
    (batch, count), (logits, norm), rows = tokens.shape, outs, tokens.size

    def empty(*shape: int) -> Array:
        return np.empty(shape, side.precision)

    def normed(name: str) -> Array:
        own, rstd = (
            [parameters[f"{name}.{kind}"] for kind in ("weight", "bias") if f"{name}.{kind}" in parameters],
            empty(rows),
        )
        out = side.stored(np.zeros((rows, c.dim)))
        if c.norm == "rmsnorm":
            side(rmsnorm_forward, out, rstd, stream, own[0], eps=c.norm_eps)
        else:
            side(layernorm_forward, out, empty(rows), rstd, stream, own[0], own[1], eps=c.norm_eps)
        return out

    def linear(name: str, inp: Array) -> Array:
        weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
        out = empty(rows, len(weight))
        matmul_forward(out, inp, weight, bias)
        return out

    stream, heads = empty(rows, c.dim), c.heads + 2 * c.kv_heads
    embedding_forward(stream, tokens, start, parameters["tok.weight"], parameters.get("pos.weight"))
    for i in range(c.layers):
        qkv = linear(f"blocks.{i}.qkv", normed(f"blocks.{i}.norm1")).reshape(batch, count, heads, c.head_dim)
        if c.qk_norm != "none":
            qkv = side.stored(qkv) if side.precision is np.float32 else qkv
            weight = (parameters.get(f"blocks.{i}.{name}.weight") for name in ("q_norm", "k_norm"))
            rstd = empty(rows, c.heads + c.kv_heads)
            qk_norm_forward(qkv, rstd, start, table, *weight, kv_heads=c.kv_heads, eps=c.norm_eps)
        elif table is not None:
            rope_forward(qkv, start, table, rotated=c.heads + c.kv_heads)
        rounded_qkv, attended = side.stored(qkv), side.stored(np.zeros((batch, count, c.heads, c.head_dim)))
        own = rounded_qkv if side.precision is np.float32 else qkv
        side(decode_attention_forward, attended, own, cache[0][i], cache[1][i], length)
        stream += linear(f"blocks.{i}.proj", attended.reshape(rows, c.dim))
        up, act = linear(f"blocks.{i}.up", normed(f"blocks.{i}.norm2")), side.stored(np.zeros((rows, c.ffn)))
        side(swiglu_forward if c.mlp == "swiglu" else gelu_forward, act, up)
        stream += linear(f"blocks.{i}.down", act)
    norm[...] = normed("norm")
    side(matmul_forward, logits, norm, head)


# Any of the phases: a share of inputs or keys left out, another layer's weight, a pair turned by another
# angle, a row written by no block or read before it was; and, as every case runs twice, a race that happens
# to be lost.
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [(1, 1), (2, 1), (1, 3), (2, 2)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_against_the_operations_in_turn(name: str, rows: tuple[int, int]) -> None:
    c = MODELS[name]
    for held in sorted({0, 1, c.context // 3, c.context - rows[1]}):
        assert_calibrated_op(runner(c), arrays_of(c, *rows, held), BF16, exact=("old",))


# A sum whose order depends on the other rows: a verified draft would differ from the token drawn without
# drafts.
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt2 wide", "euler uneven"])
def test_bits_of_a_row_do_not_depend_on_the_others(name: str) -> None:
    c, side = MODELS[name], Gpu(BF16)
    arrays = arrays_of(c, 4, 1, c.context // 2)
    together = runner(c)(side, arrays)
    for row in range(4):
        cut = {key: arrays[key][:, row : row + 1] for key in ("keys", "values")} | {
            "tokens": arrays["tokens"][row : row + 1]
        }
        alone = runner(c)(side, arrays | cut)
        rows = {key: together[key][row : row + 1] for key in ("logits", "norm")}
        assert_same_bits({key: alone[key] for key in rows}, rows)


# A new key that the row before it sees, or another order of sums with more rows: drafts would be verified by
# other bits.
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt2 wide", "euler wide"])
def test_bits_of_new_tokens_are_those_of_one_after_the_other(name: str) -> None:
    c, side = MODELS[name], Gpu(BF16)
    arrays = arrays_of(c, 1, 3, c.context // 2)
    together, held = runner(c)(side, arrays), int(arrays["held"])
    for i in range(3):
        one = arrays | {"tokens": arrays["tokens"][:, i : i + 1], "held": np.array(held + i, np.int32)}
        alone = runner(c)(side, one)
        rows = {key: together[key][i : i + 1] for key in ("logits", "norm")}
        assert_same_bits({key: alone[key] for key in rows}, rows)
        for cached in ("keys", "values"):
            arrays[cached][:, :, held + i] = alone[cached][:, :, 0]


# A tag that counts wrong after some number of launches, or whose count one model leaves to the next.
@pytest.mark.gpu
def test_many_launches_in_turn() -> None:
    side, runs = (
        Gpu(BF16),
        [(runner(c), arrays_of(c, 1, 1, 5)) for c in (MODELS["gpt2"], MODELS["mixed uneven"])],
    )
    first = [run(side, a) for run, a in runs]
    for _ in range(20):
        for (run, a), expected in zip(runs, first, strict=True):
            assert_same_bits(run(side, a), expected)


def nats_of_decoded(engine: Engine, tokens: Array) -> Array:
    """Of each token but the first its negative log probability, token by token behind a cache."""
    cache, logits = engine.decoder.cache(), []
    for t in range(tokens.shape[1]):
        logits.append(engine.decoder.decode(tokens[:, t : t + 1].copy(), cache)[0].astype(np.float64))
    taken = np.array(logits)
    return (np.log(np.exp(taken).sum(1)) - taken[np.arange(len(taken)), np.roll(tokens[0], -1)])[:-1]


# A graph that replays another token's length, or a tag that a replay finds in another state: text that
# drifts.
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt2", "euler", "gpt2 uneven"])
def test_replayed_tokens_are_those_of_a_forward_pass(name: str) -> None:
    gpu()
    c = MODELS[name]
    exact, engine = (
        Engine(c, Numerics(precision=p), micro_batch=1, device="cuda", training=False)
        for p in ("fp32", "bf16")
    )
    tokens = np.random.default_rng(3).integers(c.vocab_size, size=(1, c.context), dtype=np.int32)
    got, again = (nats_of_decoded(engine, tokens) for _ in range(2))
    assert np.array_equal(got, again)
    batch = Batch(tokens, np.roll(tokens, -1, 1), np.zeros_like(tokens), np.ones(tokens.shape, np.float32))
    expected, baseline = (e.score(batch)[0, :-1].astype(np.float64) for e in (exact, engine))
    assert_within("nats in fp32", nats_of_decoded(exact, tokens), expected, 1e-4)
    assert_within("nats in bf16", got, expected, 2 * float(np.abs(baseline - expected).max()))


# A precision or a width that the kernel would read wrongly, or shared memory that it would write beyond.
@pytest.mark.parametrize(
    ("dtype", "width", "kib", "rows"),
    [(BF16, 256, 227, 4), (FLOAT, 256, 227, 0), (BF16, 260, 227, 0), (BF16, 4096, 24, 0)],
)
def test_rows_that_are_taken(dtype: np.dtype[Any], width: int, kib: int, rows: int) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from kernels.cuda.decode.decode_step import decode_step_rows

    device: Any = SimpleNamespace(sm_count=132, shared_bytes=kib * 1024)
    assert decode_step_rows(device, dtype, model(2, 4, 4, 256, width, 64)) == rows


# A head of one lane, whose pairs for RoPE would be taken from itself, or one whose lanes lie in two warps.
@pytest.mark.parametrize(("heads", "rows"), [(32, 0), (16, 4), (4, 4), (1, 4)])
@pytest.mark.parametrize("qk_norm", ["none", "weighted"])
def test_head_widths_that_are_taken(qk_norm: str, heads: int, rows: int) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from kernels.cuda.decode.decode_step import decode_step_rows

    device: Any = SimpleNamespace(sm_count=132, shared_bytes=227 * 1024)
    c = model(2, heads, heads, 256, 256, 64, qk_norm=qk_norm)
    assert decode_step_rows(device, BF16, c) == (rows if qk_norm != "none" else 4)
    uneven = model(2, 2, 2, 48, 256, 64, qk_norm=qk_norm)  # heads of 24
    assert decode_step_rows(device, BF16, uneven) == (0 if qk_norm != "none" else 4)


# The oracle itself, where there is no GPU: the operations in turn are the engine's forward pass behind its
# cache.
@pytest.mark.parametrize("name", ["gpt2 uneven", "euler uneven", "mixed"])
def test_oracle_is_the_model(name: str) -> None:
    c = MODELS[name]
    arrays = arrays_of(c, 1, 9, 0)
    engine = Engine(c, Numerics(), micro_batch=1, device="cpu", training=False, dtype=np.float64)
    engine.load(named(arrays["flat"].astype(np.float32), parameter_table(c)))
    cache, tokens = engine.decoder.cache(), arrays["tokens"]
    expected = np.concatenate([engine.decoder.decode(tokens[:, t : t + 1].copy(), cache) for t in range(9)])
    got = runner(c)(Cpu(np.float64, FLOAT), arrays)["logits"][:, : c.vocab_size]
    assert_within("logits", got, expected, 1e-6 * float(np.abs(expected).max()))
