"""Our tokenizer beside Hugging Face `tokenizers` (training) and `tiktoken` (encoding): same text, same
threads, one run.

    python -m tests.bench.tokenizers [--threads 2] [--rounds 5] [--vocabulary 512 4096 50257]

The two take turns; a figure is the median of the rounds, a ratio the median of the rounds' ratios. Texts: the
plays of data/download, and 30 MB of Python's own standard library. Both sides encode with the vocabulary that
ours learned on the text.
"""

import argparse
import json
import os
import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages.documents import read_documents
from stages.tokenizer import Tokenizer
from stages.tokenizer.file_format import Vocabulary

PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPECIAL = ["<|endoftext|>"]
LIBRARY_BYTES = 30_000_000


def library_sources() -> list[str]:
    """Python's standard library, file by file, up to LIBRARY_BYTES."""
    texts, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:  # a few tests of the library are in other encodings on purpose
            continue
        size += len(texts[-1].encode())
        if size >= LIBRARY_BYTES:
            break
    return texts


def peer_train(texts: list[str], vocab_size: int) -> None:
    """The same training by Hugging Face tokenizers."""
    from tokenizers import Tokenizer as Peer
    from tokenizers import models, pre_tokenizers, trainers

    peer = Peer(models.BPE())
    peer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    peer.train_from_iterator(texts, trainer)


def tiktoken_encoding(tokenizer: Tokenizer) -> Any:
    """tiktoken with our vocabulary: a token's rank is its id, since merges have their ids in the order they
    were learned.
    """
    import tiktoken

    ranks = {token: rank for rank, token in enumerate(tokenizer.token_bytes) if token}
    return tiktoken.Encoding("ours", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})


def alternate(ours: Callable[[], Any], peer: Callable[[], Any], rounds: int) -> tuple[float, float, float]:
    """Median seconds of each, and the median of peer / ours, after a round that does not count."""
    times: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        pair = []
        for action in (ours, peer):
            begin = time.perf_counter()
            action()
            pair.append(time.perf_counter() - begin)
        times.append((pair[0], pair[1]))
    counted = times[1:]
    mine, theirs = (statistics.median(column) for column in zip(*counted, strict=True))
    return mine, theirs, statistics.median(b / a for a, b in counted)


def compare(name: str, texts: list[str], vocab_size: int, args: argparse.Namespace) -> None:
    """Print a line for training and one for encoding; a vocabulary larger than the text can give is left out,
    with a line.
    """
    size_mb = sum(len(text.encode()) for text in texts) / 1e6
    try:
        tokenizer = Tokenizer.train(texts, vocab_size, SPECIAL, threads=args.threads)
    except ValueError as error:
        print(json.dumps({"text": name, "vocabulary": vocab_size, "left_out": str(error)}))
        return
    encoding = tiktoken_encoding(tokenizer)
    same = all(
        ids.tolist() == peer
        for ids, peer in zip(
            tokenizer.encode_batch(texts), encoding.encode_ordinary_batch(texts), strict=True
        )
    )
    # A tokenizer of its own for each round: none has met the text's words before.
    vocabulary = Vocabulary(tokenizer.token_bytes, tokenizer.merges, tokenizer.special)
    fresh = [Tokenizer(vocabulary) for _ in range(args.rounds + 1)]
    for task, peer_name, ours, peer in (
        (
            "train",
            "tokenizers",
            lambda: Tokenizer.train(texts, vocab_size, SPECIAL, threads=args.threads),
            lambda: peer_train(texts, vocab_size),
        ),
        (
            "encode",
            "tiktoken",
            lambda: fresh.pop().encode_batch(texts, threads=args.threads),
            lambda: encoding.encode_ordinary_batch(texts, num_threads=args.threads),
        ),
    ):
        rounds = args.rounds if task == "encode" else min(3, args.rounds)
        mine, theirs, ratio = alternate(ours, peer, rounds)
        row = {
            "text": name,
            "mb": size_mb,
            "vocabulary": vocab_size,
            "task": task,
            "peer": peer_name,
            "threads": args.threads,
        }
        row |= {
            "mb_per_s": size_mb / mine,
            "peer_mb_per_s": size_mb / theirs,
            "ratio": ratio,
            "same_ids": same,
        }
        print(json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


def main() -> None:
    """All texts and vocabularies."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[512, 4096, 50257])
    args = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(args.threads)  # read when tokenizers first runs in parallel
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    texts = {
        "plays": list(read_documents(Path("data/download/train.jsonl.zst"))),
        "standard library": library_sources(),
    }
    for name, documents in texts.items():
        for vocab_size in args.vocabulary:
            compare(name, documents, vocab_size, args)


if __name__ == "__main__":
    main()
