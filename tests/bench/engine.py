"""Measures this engine. Each measurement prints one line of JSON, with the fields of other engines'
benchmarks.

A whole update in ms, tokens/s and TFLOP/s:

    python -m tests.bench.engine train --model euler_1m --batch 32 --seq 128

The same on several GPUs, --batch sequences each, with the share of time in communication and the speed over
that of one:

    python -m tests.bench.engine train --gpus 2 --model gpt2_124m --seq 1024 --precision bf16

Decoding at batch 1 with the KV cache:

    python -m tests.bench.engine decode --model euler_1m

The update by operation, compared with the device's ceiling:

    python -m tests.bench.engine ops --model euler_1m --batch 32 --seq 128

Only attention on a GPU, forward and backward:

    python -m tests.bench.engine attention --model gpt2_124m --precision bf16 --seq 1024

The matmuls of a model on a GPU, with cuBLASLt and with our own kernel:

    python -m tests.bench.engine matmul --batch 32 --seq 1024

Times are medians over --steps timed steps after --warmup. Tokens are random and new in each step.
"""

import argparse
import json
import statistics
import sys
import time
import timeit
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any, get_args

import numpy as np

from kernels.batch import Batch, head_weight_sums, prepare
from kernels.config import Attention, Matmul, ModelConfig, Numerics, Precision
from kernels.devices import DEVICES, gpu_visible
from kernels.engine import Engine
from kernels.optimizers import OPTIMIZERS
from kernels.ranks import ALONE, Link, OneRank
from stages.ranks.join import is_rank, open_link
from stages.ranks.launch import end_with_launcher, launch

EULER: dict[str, Any] = {"norm": "rmsnorm", "position": "rope", "mlp": "swiglu", "mtp_heads": 4}
GPT2: dict[str, Any] = {
    "norm": "layernorm",
    "position": "learned",
    "mlp": "gelu",
    "bias": True,
    "tied_head": True,
}
MODELS = {
    "euler_1m": ModelConfig(512, 4, 4, 2, 128, 344, 128, **EULER),
    "euler_10m": ModelConfig(1024, 6, 6, 2, 384, 1024, 256, **EULER),
    "euler_116m": ModelConfig(4096, 16, 12, 4, 768, 2048, 512, **EULER),
    "gpt2_124m": ModelConfig(50257, 12, 12, 12, 768, 3072, 1024, **GPT2),
    "gpt2_350m": ModelConfig(50257, 24, 16, 16, 1024, 4096, 1024, **GPT2),
}


def matmul_flops_per_token(c: ModelConfig, length: int) -> int:
    """FLOPs per token, forward and backward: 6 x the matmul weights, and the causal half of attention."""
    block = sum(outputs * inputs for outputs, inputs in c.linears.values())
    return 6 * (c.layers * block + c.vocab_size * c.dim * c.mtp_heads) + 6 * c.layers * length * c.dim


def random_batch(rng: np.random.Generator, config: ModelConfig, rows: int, length: int) -> Batch:
    """Uniform random tokens. Each sequence is one document, and every target is supervised."""
    tokens = rng.integers(config.vocab_size, size=(rows, length + 1), dtype=np.int32)
    inp, targets = np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])
    return Batch(inp, targets, np.zeros((rows, length), np.int32), np.ones((rows, length), np.float32))


def open_engine(args: argparse.Namespace, *, training: bool = True, link: Link = ALONE) -> Engine:
    """The engine of the command line; link: to other ranks."""
    chosen = {name: getattr(args, name) for name in ("precision", "matmul", "attention", "deterministic")}
    given = {name: getattr(args, name) for name in ("device", "threads")}
    return Engine(
        MODELS[args.model],
        Numerics(**chosen),
        micro_batch=args.batch if training else 1,
        training=training,
        optimizer=OPTIMIZERS[args.optimizer](),
        link=link,
        overlap=args.overlap,
        **given,
    )


def train_step(engine: Engine, batch: Batch, meanwhile: Callable[[], None] = lambda: None) -> float:
    """One update with equal head weights, in seconds. It ends when loss and gradient norm are on the host."""
    heads = engine.config.mtp_heads
    begin = time.perf_counter()
    scale = 1 / heads / sum(engine.ranks.all_gather_object(head_weight_sums(batch, heads)))
    engine.micro_step(batch, scale, last=True)
    engine.reduce()
    engine.update(3e-4, meanwhile)
    return time.perf_counter() - begin


class NoCollectives(OneRank):
    """The collectives of a rank without what they send: the rest of an update's time."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """The own value as everyone's."""
        return [value] * self.size


def train(args: argparse.Namespace, link: Link = ALONE) -> dict[str, Any]:
    """The median update, of one rank and, if there are several, of all together."""
    engine = open_engine(args)
    alone_s = seconds = median_update(engine, args)
    shares: dict[str, float] = {}
    if link.size > 1:
        del engine  # its memory
        engine = open_engine(args, link=link)
        seconds = median_update(engine, args)
        engine.ranks = engine._parallel.ranks = NoCollectives(link)
        engine._graphs = engine.ops.new_graphs()
        shares = {
            "communication": 1 - median_update(engine, args) / seconds,
            "scaling": link.size * alone_s / seconds,
        }
    tokens_per_s = link.size * args.batch * args.seq / seconds
    return {
        "engine": engine.describe(),
        "ms_per_step": seconds * 1e3,
        "tokens_per_s": tokens_per_s,
        "tflops": tokens_per_s * matmul_flops_per_token(engine.config, args.seq) / 1e12,
        **shares,
        "peak_gb": engine.ops.used_bytes() / 1e9,
    }


def median_update(engine: Engine, args: argparse.Namespace) -> float:
    """Seconds of an update; each rank has its own batches.

    Random batches are made between updates. The rest of the preparation overlaps the previous update, as in
    training.
    """
    rng, times = np.random.default_rng(engine.ranks.rank), list[float]()
    batch = random_batch(rng, engine.config, args.batch, args.seq)
    for _ in range(args.warmup + args.steps):
        following = random_batch(rng, engine.config, args.batch, args.seq)
        times.append(train_step(engine, batch, partial(prepare, following, engine.config.mtp_heads)))
        batch = following
    return statistics.median(times[args.warmup :])


def decode(args: argparse.Namespace) -> dict[str, Any]:
    """The median time per token, greedy at batch 1. The cache fills up and is emptied when full."""
    context, engine = MODELS[args.model].context, open_engine(args, training=False)
    cache, arrivals = engine.decoder.cache(), list[float]()
    first, suppressed = np.zeros((1, 1), np.int32), np.empty(0, np.int32)
    while (missing := 1 + args.warmup + args.steps - len(arrivals)) > 0:
        uniforms = repeat(np.zeros(1), min(missing, context))
        arrivals += [
            time.perf_counter()
            for _ in engine.decoder.sample_stream(
                first, cache, uniforms, suppressed, temperature=0, top_k=0, top_p=1
            )
        ]
        cache.truncate(0)
    # Tokens are timed in windows: a GPU runs ahead of the host, so an early token follows a late one.
    window = min(10, args.steps)
    begins = range(args.warmup, args.warmup + args.steps - window + 1, window)
    seconds = statistics.median((arrivals[begin + window] - arrivals[begin]) / window for begin in begins)
    return {"engine": engine.describe(), "ms_per_token": seconds * 1e3}


# The arguments of a matmul that are its weights.
_WEIGHTS_OF = {
    "matmul_forward": (2,), "matmul_backward": (4,),
    "matmul_gelu_forward": (3,), "matmul_gelu_backward": (5,),
    "fp8_mlp_forward": (4, 6), "fp8_mlp_backward": (7, 8),
}  # fmt: skip


class TimedOps:
    """Wraps a device's operations and records each call's seconds, bytes and FLOPs."""

    def __init__(self, ops: Any) -> None:
        self.ops = ops
        self.calls: dict[str, list[tuple[float, int, int]]] = defaultdict(list)

    def __getattr__(self, name: str) -> Any:
        op = getattr(self.ops, name)
        if name == "fp8":  # the FP8 operations are in the same object
            return op and self
        if not name.endswith(("_forward", "_backward")) and name not in (
            "square_sums",
            "grad_norm",
            "adamw",
            "muon",
            "cast_weight",
        ):
            return op

        def timed(*args: Any, **constants: Any) -> None:
            begin = time.perf_counter()
            op(*args, **constants)
            self.ops.synchronize()
            seconds = time.perf_counter() - begin
            size, weights = (
                sum(getattr(a, "nbytes", 0) for a in args),
                sum(args[i].size for i in _WEIGHTS_OF.get(name, ())),
            )
            flops = 2 * len(args[0]) * weights * (1 if name.endswith("_forward") else 2) if weights else 0
            self.calls[name].append((seconds, size, flops))

        return timed

    def replay(self, graphs: object, key: object, work: Callable[[], None]) -> None:
        """Run the work each time, so that its operations are recorded."""
        work()


def ceilings(ops: Any) -> tuple[float, float]:
    """The ceilings of this device: GB/s of a large copy, reads and writes, and GFLOP/s of a large matmul."""
    rows, side = (2**21, 8192) if ops.name == "cuda" else (2**15, 2048)

    def array(*shape: int) -> Any:
        memory = ops.allocate(shape[0] * shape[1] * ops.storage.itemsize).view(ops.storage).reshape(shape)
        ops.upload(memory[:1], np.random.default_rng(0).standard_normal((1, shape[1]), np.float32))
        filled = 1
        while filled < shape[0]:  # on the device, because the host is slow
            count = min(filled, shape[0] - filled)
            ops.copy_rows(memory[filled : filled + count], memory[:count], 0, 1)
            filled += count
        return memory

    def fastest(action: Callable[[], object]) -> float:
        return min(timeit.repeat(lambda: (action(), ops.synchronize()), number=1, repeat=7))

    target, source = array(rows, 1024), array(rows, 1024)
    copy_s = fastest(lambda: ops.copy_rows(target, source, 0, 1))
    out, inp, weight = (array(side, side) for _ in range(3))
    matmul_s = fastest(lambda: ops.matmul_forward(out, inp, weight))
    return 2 * source.nbytes / copy_s / 1e9, 2 * side**3 / matmul_s / 1e9


def ops(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of each operation in the median update, largest first, with its rate and fraction of the
    ceiling.

    The ceiling of a matmul is the rate of the large matmul. The ceiling of other operations is the rate of
    the copy, and each array counts once. Arrays that stay in the CPU's cache can exceed it.
    """
    config, rng, engine = MODELS[args.model], np.random.default_rng(0), open_engine(args)
    recorder = TimedOps(engine.ops)
    operations: Any = recorder
    engine.use_ops(operations)
    steps: list[dict[str, tuple[float, int, int]]] = []
    for _ in range(args.warmup + args.steps):
        recorder.calls.clear()
        train_step(engine, random_batch(rng, config, args.batch, args.seq))
        totals: Any = {
            name: tuple(map(sum, zip(*calls, strict=True))) for name, calls in recorder.calls.items()
        }
        steps.append(totals)
    gbytes_per_s, gflops_per_s = ceilings(recorder.ops)
    rows = {}
    for name in steps[-1]:
        seconds = statistics.median(step[name][0] for step in steps[args.warmup :])
        _, size, flops = steps[-1][name]
        rate, ceiling = (
            (flops / seconds / 1e9, gflops_per_s) if flops else (size / seconds / 1e9, gbytes_per_s)
        )
        unit = "gflops_per_s" if flops else "gb_per_s"
        rows[name] = {
            "ms": round(seconds * 1e3, 3),
            unit: round(rate, 1),
            "of_ceiling": round(rate / ceiling, 2),
        }
    ordered = dict(sorted(rows.items(), key=lambda item: -item[1]["ms"]))
    return {"copy_gb_per_s": gbytes_per_s, "matmul_gflops_per_s": gflops_per_s, "ops": ordered}


def matmul(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds and TFLOP/s of each matmul of a model in bf16 on the GPU: forward, and both gradients.

    Each is measured with cuBLASLt's first candidate, with the candidate that timing chose, and with our own
    kernel. `custom_of_best` is the rate of our own kernel divided by the rate of the chosen candidate.
    """
    from kernels.cuda.matmul import cublaslt
    from kernels.cuda.matmul.matmul import multiply_custom
    from kernels.cuda.runtime.device import Device, to_bf16
    from kernels.cuda.runtime.launch import BF16, FLOAT
    from kernels.cuda.runtime.timing import milliseconds

    device, rows, results = Device(), args.batch * args.seq, {}
    device.use_workspace(device.allocate(cublaslt.WORKSPACE_BYTES))
    pattern = to_bf16(np.random.default_rng(0).standard_normal(2**20, np.float32))

    def array(shape: tuple[int, int]) -> Any:
        flat: Any = device.allocate(shape[0] * shape[1] * BF16.itemsize).view(BF16)
        for start in range(0, flat.size, pattern.size):
            device.upload(flat[start : start + pattern.size], pattern[: flat.size - start])
        return flat.reshape(shape)

    for name, (outputs, inputs) in linears(MODELS[args.model]).items():
        inp, weight, dout = array((rows, inputs)), array((outputs, inputs)), array((rows, outputs))
        dweight: Any = device.allocate(outputs * inputs * FLOAT.itemsize).view(FLOAT).reshape(outputs, inputs)
        matmuls: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
            "forward": (dout, inp, weight, {"transpose_b": True}),
            "dinp": (inp, dout, weight, {}),
            "dweight": (dweight, dout, inp, {"transpose_a": True, "accumulate": True}),
        }
        for kind, (out, a, b, how) in matmuls.items():
            shape = cublaslt.matmul_shape(out, a, b, precision="bf16", **how)
            plan = cublaslt.plan(device, shape, out, a, b)
            works = [partial(plan.run, device, out, a, b, 0), partial(plan.run, device, out, a, b)]
            works.append(partial(multiply_custom, device, out, a, b, **how))
            times = dict(zip(("first", "best", "custom"), milliseconds(device, works), strict=True))
            row: dict[str, Any] = {"shape": (*out.shape, a.size // out.shape[0]), "candidate": plan.chosen}
            row |= {f"{which}_ms": round(ms, 4) for which, ms in times.items()}
            row |= {
                f"{which}_tflops": round(2 * rows * outputs * inputs / ms / 1e9, 1)
                for which, ms in times.items()
            }
            results[f"{name} {kind}"] = {**row, "custom_of_best": round(times["best"] / times["custom"], 3)}
    return {"device": device.model, "precision": "bf16", "cublaslt": cublaslt.version(), "matmuls": results}


def attention(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds and TFLOP/s of attention on the GPU.

    Only the causal half of the matmuls counts. There are 2 in the forward pass and 5 in the backward pass.
    """
    from kernels.cuda import CudaOps
    from kernels.cuda.runtime.timing import milliseconds

    c, rng = MODELS[args.model], np.random.default_rng(0)
    ops = CudaOps(
        Numerics(precision=args.precision, attention=args.attention, deterministic=args.deterministic)
    )
    sized = replace(c, context=args.seq)
    ops.use_workspace(ops.allocate(ops.workspace_bytes(sized, args.batch * args.seq)))

    def array(*shape: int, dtype: Any = ops.storage) -> Any:
        memory = ops.allocate(int(np.prod(shape)) * dtype.itemsize).view(dtype).reshape(shape)
        ops.upload(memory, rng.standard_normal(shape, np.float32))
        return memory

    qkv, dqkv = (array(args.batch, args.seq, c.heads + 2 * c.kv_heads, c.head_dim) for _ in range(2))
    out, dout = (array(args.batch, args.seq, c.heads, c.head_dim) for _ in range(2))
    lse, start = (
        array(args.batch, c.heads, args.seq, dtype=ops.dtype),
        array(args.batch, args.seq, dtype=np.dtype(np.int32)),
    )
    ops.fill_zero(start)
    forward = partial(ops.attention_forward, out, lse, qkv, start)
    backward = partial(ops.attention_backward, dqkv, dout, out, lse, qkv, start)
    forward_ms, backward_ms = milliseconds(ops, [forward, backward])
    flops = 2 * args.batch * c.heads * args.seq**2 * c.head_dim  # half of each of two matmuls
    rates = {"fwd_tflops": flops / forward_ms / 1e9, "bwd_tflops": 2.5 * flops / backward_ms / 1e9}
    return {"fwd_ms": forward_ms, "bwd_ms": backward_ms, **rates}


def linears(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the weights of a block's matmuls, and of an LM head's."""
    return config.linears | {"head": (config.padded_vocab, config.dim)}


MODES = {"train": train, "decode": decode, "ops": ops, "attention": attention, "matmul": matmul}


def main() -> None:
    """Run one mode and print its JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--model", choices=MODELS, help="euler_1m; for matmul gpt2_124m")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--precision", choices=get_args(Precision), default="fp32")
    parser.add_argument("--matmul", choices=get_args(Matmul), default="cublaslt")
    parser.add_argument("--attention", choices=get_args(Attention), default="hopper")
    parser.add_argument("--deterministic", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--gpus", type=int, default=1, help="of train")
    parser.add_argument(
        "--overlap", action="store_true", help="of train: sum gradients during the backward pass"
    )
    args = parser.parse_args()
    args.model = args.model or ("gpt2_124m" if args.mode == "matmul" else "euler_1m")
    if min(args.batch, args.seq, args.steps) < 1 or args.warmup < 0:
        parser.error("--batch, --seq and --steps must be at least 1, --warmup at least 0")
    if args.mode in ("train", "ops") and not (c := MODELS[args.model]).mtp_heads <= args.seq <= c.context:
        parser.error(f"--seq: {args.model} takes {c.mtp_heads} to {c.context}, got {args.seq}")
    if args.gpus > 1 and not is_rank():
        raise SystemExit(launch("tests.bench.engine", sys.argv[1:], args.gpus))
    end_with_launcher()
    link = open_link() if args.mode == "train" else ALONE
    try:
        if args.mode in ("attention", "matmul") and (args.device == "cpu" or not gpu_visible()):
            raise ValueError(f"{args.mode} needs a GPU")
        measured = train(args, link) if args.mode == "train" else MODES[args.mode](args)
        row = {**vars(args), **measured}
    except ValueError as error:
        link.fail(str(error))
        sys.exit(f"{parser.prog}: {error}")
    link.close()
    if link.rank:
        return
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


if __name__ == "__main__":
    main()
