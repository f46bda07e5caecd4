"""The command generate: a model goes on with a text.

    python -m stages.generate --prompt "ROMEO:"
    python -m stages.generate --prompt - < text.txt

Prints the prompt and what the model writes after it, as it is written, on standard output; what it runs on goes to standard
error. A text ends where the model begins another document, or after --max-tokens tokens. When the context is full, the model
goes on from its last half.
"""

import secrets
import sys
import unicodedata
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import replace
from pathlib import Path

from kernels.config import Numerics
from kernels.engine import Engine
from kernels.generation import Sampling, Speculation, generate
from stages.chat_template import special_id
from stages.checkpoint import MODEL, Checkpoint, load
from stages.program import command_main
from stages.special_tokens import SEPARATOR
from stages.tokenizer import Tokenizer, Utf8Stream

TRAINED = ("pretrain", "sft")  # the stages that write data/<stage>/checkpoint


def command_parser(name: str, description: str, model: str) -> ArgumentParser:
    """The arguments that chat and generate share; `model` is the default of --model."""
    # RawDescriptionHelpFormatter keeps the examples' lines.
    parser = ArgumentParser(
        f"python -m stages.{name}", description=description, formatter_class=RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--model",
        default=model,
        help=f"pretrain (base), sft (chat) or a checkpoint's folder; default {model}",
    )
    add(
        "--tokenizer",
        type=Path,
        default=Path("data/train_bpe/tokenizer.json"),
        help="the tokenizer.json it was trained with",
    )
    add("--max-tokens", type=int, default=200, metavar="N", help="most tokens written, default 200")
    add(
        "--temperature", type=float, default=0.8, metavar="X", help="0 takes the likeliest token; default 0.8"
    )
    add(
        "--top-k",
        type=int,
        default=50,
        metavar="K",
        help="draw among the K likeliest tokens, 0 is off; default 50",
    )
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw among the likeliest with a share P, 1 is off; default 1",
    )
    add(
        "--speculative",
        action="store_true",
        help="let the heads draft: the same text, sooner where they guess well",
    )
    add(
        "--threads",
        type=int,
        default=0,
        metavar="N",
        help="CPU threads, 0 for all; fewer beside other programs; default 0",
    )
    add("--seed", type=int, help="repeats a run; drawn anew where it is not given")
    return parser


def at_least_one(name: str, value: int) -> int:
    """The value of a setting; ValueError where it is below 1."""
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")
    return value


def sampling_of(args: Namespace) -> Sampling:
    """The sampling settings of the command line; ValueError where one is out of its range."""
    seed = secrets.randbits(31) if args.seed is None else args.seed
    return Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=seed)


def open_checkpoint(model: str, tokenizer_path: Path) -> tuple[Checkpoint, Tokenizer]:
    """A trained model's checkpoint and its tokenizer.

    Args:
        model: the stage that made it, or its checkpoint's folder.
        tokenizer_path: the tokenizer.json that it was trained with.

    Raises:
        ValueError: a file is missing or damaged, or the two don't belong together.
    """
    folder = Path("data", model, "checkpoint") if model in TRAINED else Path(model)
    for path, option in ((tokenizer_path, "tokenizer"), (folder / MODEL, "model")):
        if not path.is_file():
            raise ValueError(
                f"{path}: no such file; `make repro` trains the models, and the option {option} names another place"
            )
    tokenizer = Tokenizer.load(tokenizer_path)
    return load(folder, tokenizer.sha256), tokenizer


def open_model(model: str, tokenizer_path: Path, threads: int = 0) -> tuple[Engine, Tokenizer]:
    """A trained model, ready to write; threads as of Engine, all else as of `open_checkpoint`."""
    checkpoint, tokenizer = open_checkpoint(model, tokenizer_path)
    engine = Engine(checkpoint.config, Numerics(), micro_batch=1, threads=threads, seed=None, training=False)
    engine.load(checkpoint.weights)
    return engine, tokenizer


def speculation_of(args: Namespace, engine: Engine) -> Speculation | None:
    """What --speculative asks for; ValueError where the model has no head to draft with."""
    return Speculation(engine.config.mtp_heads) if args.speculative else None


def banner(model: str, engine: Engine, sampling: Sampling) -> str:
    """A line: what writes, on what, and the seed that repeats it."""
    return f"{model} model, context {engine.config.context}; {engine.describe()}; seed {sampling.seed}"


def show(text: str) -> None:
    """Writes text at once; on a terminal without control characters, which an untrained model writes as well as others."""
    if sys.stdout.isatty():
        text = "".join("\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)
    print(text, end="", flush=True)


def run(argv: list[str]) -> None:
    """Goes on with the prompt that the command line gives.

    Raises:
        ValueError: an argument is out of its range, or the model can't be had.
    """
    parser = command_parser("generate", __doc__ or "", model="pretrain")
    parser.add_argument(
        "--prompt", default="", help="the text to go on with, - reads it from standard input; default none"
    )
    parser.add_argument(
        "--count", type=int, default=1, metavar="N", help="texts written, seeds counted up from --seed"
    )
    args = parser.parse_args(argv)
    sampling, count = sampling_of(args), at_least_one("count", args.count)
    max_tokens = at_least_one("max_tokens", args.max_tokens)
    engine, tokenizer = open_model(args.model, args.tokenizer, args.threads)
    speculation = speculation_of(args, engine)
    print(banner(args.model, engine, sampling), file=sys.stderr)
    text = tokenizer.encode(sys.stdin.buffer.read() if args.prompt == "-" else args.prompt).tolist()
    prompt = [special_id(tokenizer, SEPARATOR), *text]
    stop = set(tokenizer.special.values())  # the next document of a base model, the end of turn of a chat model
    for number in range(count):
        show("-" * 40 + "\n" if number else "")
        show(tokenizer.decode(prompt))
        stream, drawn = Utf8Stream(tokenizer), replace(sampling, seed=sampling.seed + number)
        for token in generate(
            engine, prompt, drawn, max_tokens=max_tokens, stop=stop, speculation=speculation
        ):
            show(stream.feed([token]))
        show(stream.flush() + "\n")
    if speculation:
        print(speculation.describe(), file=sys.stderr)


def main() -> None:
    """Runs the command; what its user can repair is one line on standard error."""
    command_main(run)


if __name__ == "__main__":
    main()
