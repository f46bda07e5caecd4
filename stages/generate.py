"""The command generate: a model completes a text.

    python -m stages.generate --prompt "ROMEO:"
    python -m stages.generate --prompt - < text.txt

Prints the prompt and the completion on standard output, token by token; model, device and seed go to standard
error. A text ends when the model begins another document, or after --max-tokens tokens. When the context is
full, generation continues from the last half of it.
"""

import secrets
import sys
import unicodedata
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import replace
from pathlib import Path

from kernels.engine import Engine
from kernels.generation import Sampling, SpeculativeStats, generate
from stages.chat_template import special_id
from stages.program import command_main
from stages.special_tokens import SEPARATOR
from stages.tokenizer import Utf8Stream
from stages.trained_model import open_model
from stages.trained_stages import BASE_MODEL, TRAINED_STAGES


def command_parser(name: str, description: str, model: str) -> ArgumentParser:
    """The arguments that chat and generate share; `model` is the default of --model."""
    # RawDescriptionHelpFormatter keeps the line breaks of the examples.
    parser = ArgumentParser(
        f"python -m stages.{name}", description=description, formatter_class=RawDescriptionHelpFormatter
    )
    trained = ", ".join(f"{stage.name} ({stage.kind})" for stage in TRAINED_STAGES)
    add = parser.add_argument
    add("--model", default=model, help=f"{trained} or the folder of a checkpoint; default {model}")
    add(
        "--tokenizer",
        type=Path,
        default=Path("data/train_bpe/tokenizer.json"),
        help="the tokenizer.json that the model was trained with",
    )
    add("--max-tokens", type=int, default=200, metavar="N", help="maximum tokens to write; default 200")
    add("--temperature", type=float, default=0.8, metavar="X", help="0 is greedy decoding; default 0.8")
    add(
        "--top-k",
        type=int,
        default=50,
        metavar="K",
        help="sample from the K most likely tokens, 0 is off; default 50",
    )
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the most likely tokens with total probability P, 1 is off; default 1",
    )
    add(
        "--speculative",
        action="store_true",
        help="draft tokens with the MTP heads: the same text, faster if the drafts are good",
    )
    add(
        "--threads",
        type=int,
        default=0,
        metavar="N",
        help="CPU threads, 0 for all cores; the text does not depend on it; default 0",
    )
    add("--seed", type=int, help="seed of the sampling; default random, printed at the start")
    return parser


def at_least_one(name: str, value: int) -> int:
    """The value of a setting; ValueError if it is below 1."""
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")
    return value


def sampling_of(args: Namespace) -> Sampling:
    """The sampling settings of the command line; ValueError if one is out of range."""
    seed = secrets.randbits(31) if args.seed is None else args.seed
    return Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=seed)


def speculation_of(args: Namespace, engine: Engine) -> SpeculativeStats | None:
    """Speculative decoding if --speculative asks for it; ValueError if the model has no MTP head to draft
    with.
    """
    return SpeculativeStats(engine.config.mtp_heads) if args.speculative else None


def banner(model: str, engine: Engine, sampling: Sampling) -> str:
    """One line: model, device and the seed that repeats the text."""
    return f"{model} model, context {engine.config.context}; {engine.describe()}; seed {sampling.seed}"


def show(text: str) -> None:
    """Prints text at once. On a terminal control characters are replaced, since an untrained model writes
    them, too.
    """
    if sys.stdout.isatty():
        text = "".join("\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)
    print(text, end="", flush=True)


def run(argv: list[str]) -> None:
    """Completes the prompt of the command line.

    Raises:
        ValueError: an argument is out of range, or the model is missing or damaged.
    """
    parser = command_parser("generate", __doc__ or "", model=BASE_MODEL)
    parser.add_argument(
        "--prompt",
        default="",
        help="the text to complete, - reads it from standard input; default: an empty text",
    )
    parser.add_argument(
        "--count",
        type=int,
        default=1,
        metavar="N",
        help="number of texts; each takes the next seed; default 1",
    )
    args = parser.parse_args(argv)
    sampling, count = sampling_of(args), at_least_one("count", args.count)
    max_tokens = at_least_one("max_tokens", args.max_tokens)
    model = open_model(args.model, args.tokenizer)
    engine, tokenizer = model.engine(threads=args.threads), model.tokenizer
    speculation = speculation_of(args, engine)
    print(banner(args.model, engine, sampling), file=sys.stderr)
    text = tokenizer.encode(sys.stdin.buffer.read() if args.prompt == "-" else args.prompt).tolist()
    prompt = [special_id(tokenizer, SEPARATOR), *text]
    stop = set(tokenizer.special.values())  # a base model writes <|endoftext|>, a chat model <|end|>
    for number in range(count):
        show("-" * 40 + "\n" if number else "")
        show(tokenizer.decode(prompt))
        stream, seeded = Utf8Stream(tokenizer), replace(sampling, seed=sampling.seed + number)
        for token in generate(
            engine, prompt, seeded, max_tokens=max_tokens, stop=stop, speculation=speculation
        ):
            show(stream.feed([token]))
        show(stream.flush() + "\n")
    if speculation:
        print(speculation.describe(), file=sys.stderr)


def main() -> None:
    """Runs the command; an error that the user can fix is one line on standard error."""
    command_main(run)


if __name__ == "__main__":
    main()
