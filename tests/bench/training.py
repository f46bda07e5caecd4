"""Our training step beside another engine's: the same model, batch and work, one after the other, in turns.

    python -m tests.bench.training [--peer "COMMAND"]

COMMAND, tests.bench.torch_train where none is given, trains the same shape (four heads, clipping, AdamW) and
ends with a line of JSON that has `tokens_per_s`, as ours does:

    python -m tests.bench.engine train --model euler_1m --batch 32 --seq 128

Each turn is a process of its own, so that neither leaves threads behind. A figure is the median of the
rounds, the ratio the median of the rounds' ratios.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys

OURS = [sys.executable, "-m", "tests.bench.engine", "train"]


def tokens_per_s(command: list[str]) -> float:
    """Run a command; the figure of its last line."""
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    if done.returncode:
        sys.exit(
            f"error: {shlex.join(command)} ended with {done.returncode}: "
            f"{done.stderr.strip().splitlines()[-1:]}"
        )
    return float(json.loads(done.stdout.strip().splitlines()[-1])["tokens_per_s"])


def main() -> None:
    """Alternate, then print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", type=shlex.split, default=[sys.executable, "-m", "tests.bench.torch_train"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--model", default="euler_1m")
    args = parser.parse_args()
    rounds = []
    for number in range(args.rounds):
        ours = tokens_per_s([*OURS, "--model", args.model, "--steps", str(args.steps)])
        peer = tokens_per_s(args.peer)
        rounds.append((ours, peer))
        print(
            f"round {number + 1}: {ours:,.0f} and {peer:,.0f} tokens/s, {ours / peer:.2f} x",
            file=sys.stderr,
            flush=True,
        )
    mine, theirs = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratio = statistics.median(a / b for a, b in rounds)
    print(
        json.dumps(
            {"tokens_per_s": round(mine), "peer_tokens_per_s": round(theirs), "ratio": round(ratio, 3)}
        )
    )


if __name__ == "__main__":
    main()
