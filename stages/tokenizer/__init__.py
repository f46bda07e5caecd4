"""Byte-level BPE: training, encoding and decoding. The file is a Hugging Face tokenizer.json.

Any bytes can be encoded, and decoding returns exactly those bytes. A trained tokenizer's ids are the 256
bytes in GPT-2's order, then one id per merge, then the special tokens. No text encodes to a special token: a
typed "<|user|>" is ordinary text.
"""

import codecs
import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Lock, Thread
from typing import TypeVar

import numba
import numpy as np

from stages.text_files import atomic_file
from stages.tokenizer.encode import encode_spans, rank_table
from stages.tokenizer.file_format import BYTE_ORDER, MAX_VOCAB, Vocabulary, tokenizer_json
from stages.tokenizer.file_reader import read_folder, read_tokenizer_json
from stages.tokenizer.pretokenizer import PIECE_BYTES, count_words, cut_spans
from stages.tokenizer.train import learn_merges
from stages.tokenizer.unicode_classes import character_classes

MAX_TRAINING_BYTES = 500_000_000  # positions of bytes, and of three pairs per byte, are int32

_CACHE_WORDS = 1 << 17  # per thread: 8 MB of words and at most 4 MB of their tokens
_GROUP_BYTES = 1 << 20  # work item of a thread: so much text
_POLL_S = 0.1  # Windows handles Ctrl-C only between two waits

Result = TypeVar("Result")


class Tokenizer:
    """A vocabulary with its merges, ready to encode and decode.

    Thread-safe: a lock serializes concurrent calls of encode.

    Args:
        vocabulary: from `train`, or read from a file.

    Attributes:
        vocab_size: number of ids: bytes, merges and special tokens.
        special: id of each special token.
        token_bytes: the bytes of each id, b"" for special tokens.
        token_lengths: (vocab_size,) int32, the number of bytes of each id; bits per byte are divided by their
            sum.
        merges: left, right and resulting id, in the order of application.
        sha256: of the canonical tokenizer.json, hexadecimal.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocab_size = len(vocabulary.token_bytes)
        self.special = dict(vocabulary.special)
        self.token_bytes = list(vocabulary.token_bytes)
        self.merges = list(vocabulary.merges)
        self.token_lengths = np.array([len(token) for token in self.token_bytes], dtype=np.int32)
        self._json = tokenizer_json(vocabulary).encode("utf-8")
        self.sha256 = hashlib.sha256(self._json).hexdigest()
        byte_tokens = np.zeros(256, dtype=np.int32)
        for token, text in enumerate(self.token_bytes):
            if len(text) == 1:
                byte_tokens[text[0]] = token
        merges = np.array(self.merges, dtype=np.int32).reshape(-1, 3)
        self._tables = (character_classes(), byte_tokens, merges, rank_table(merges))
        self._caches: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # one per thread
        self._lock = Lock()

    @classmethod
    def train(
        cls,
        documents: Iterable[str | bytes],
        vocab_size: int,
        special_tokens: Sequence[str],
        *,
        threads: int = 0,
    ) -> "Tokenizer":
        """Learn merges from all of `documents`. stages/tokenizer/train.py defines their order and the
        tie-break.

        Args:
            documents: texts; no word spans two of them.
            vocab_size: number of ids: 256 bytes, merges, special tokens.
            special_tokens: get the last ids, in this order.
            threads: for counting words; 0: one per core. The result does not depend on it.

        Raises:
            ValueError: vocab_size or special_tokens are impossible, or the text is too short for so many
                merges.
        """
        smallest = 256 + len(special_tokens)
        if not smallest <= vocab_size <= MAX_VOCAB:
            room = f"{smallest} (256 bytes and {len(special_tokens)} special tokens) to {MAX_VOCAB}"
            raise ValueError(f"train_bpe.vocab_size: expected {room}, got {vocab_size}")
        data, ends = _joined(documents)
        if not data.size:
            raise ValueError(
                "train_bpe: expected text to learn merges from, got none; give the corpus more text"
            )
        if data.size > MAX_TRAINING_BYTES:
            raise ValueError(
                f"train_bpe.sample_bytes: expected at most {MAX_TRAINING_BYTES} bytes, got {data.size}"
            )
        byte_tokens = np.argsort(np.array(BYTE_ORDER)).astype(np.int32)
        words = _distinct_words(data, ends, _threads(threads))
        num_tokens = vocab_size - len(special_tokens)
        merges = on_threads(lambda _: learn_merges(data, words, byte_tokens, num_tokens), 1)[0]
        token_bytes = [bytes([byte]) for byte in BYTE_ORDER]
        for left, right, _ in merges.tolist():
            token_bytes.append(token_bytes[left] + token_bytes[right])
        largest = len(token_bytes) + len(special_tokens)
        if largest < vocab_size:
            hint = "set it to that, or learn from more text"
            raise ValueError(
                f"train_bpe.vocab_size: this text gives at most {largest}, got {vocab_size}; {hint}"
            )
        learned = Vocabulary(token_bytes, [tuple(merge) for merge in merges.tolist()], {})
        return cls(learned.with_special(special_tokens, "train_bpe.special_tokens"))

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read a byte-level BPE tokenizer.json; ValueError if it is missing or malformed."""
        try:
            return cls(read_tokenizer_json(Path(path)))
        except ValueError as error:
            raise ValueError(f"{error}; run: .venv/bin/dvc repro train_bpe") from None

    @classmethod
    def from_pretrained(cls, path: Path, special_tokens: Sequence[str]) -> "Tokenizer":
        """Adopt a pretrained tokenizer.

        Args:
            path: a tokenizer.json, or a folder. The folder holds GPT-2's vocab.json (or encoder.json) and
                merges.txt (or vocab.bpe), or a tokenizer.json, such as an export.
            special_tokens: keep their ids if the vocabulary has them; the others are appended.

        Raises:
            ValueError: a file is missing or not such a tokenizer, or the vocabulary becomes too large.
        """
        path = Path(path)
        try:
            vocabulary = (read_folder if path.is_dir() else read_tokenizer_json)(path, special_tokens)
            return cls(vocabulary.with_special(special_tokens, str(path)))
        except ValueError as error:
            raise ValueError(
                f"{error}; set train_bpe.pretrained to another, or to conf/none to train one"
            ) from None

    @property
    def json(self) -> str:
        """The text of the canonical tokenizer.json. Equal tokenizers give equal texts."""
        return self._json.decode("utf-8")

    def save(self, path: Path) -> None:
        """Write the canonical tokenizer.json atomically. Equal tokenizers give equal bytes."""
        with atomic_file(path) as stream:
            stream.write(self._json)

    def encode(self, text: str | bytes) -> np.ndarray:
        """The ids of a text, (tokens,) int32; none is a special token."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Iterable[str | bytes], *, threads: int = 0) -> list[np.ndarray]:
        """The ids of each text. Uses `threads` threads (0: one per core), and about 5 bytes of memory per
        byte of text.
        """
        data, ends = _joined(texts)
        spans, span_ends = cut_spans(data, ends, PIECE_BYTES)
        out = np.empty(data.size, dtype=np.int32)
        counts = np.zeros(len(spans), dtype=np.int64)
        # Groups of spans. A group starts at the first span within each _GROUP_BYTES of the text.
        firsts = np.unique(np.searchsorted(spans[:, 0], np.arange(0, max(data.size, 1), _GROUP_BYTES)))
        groups = deque(itertools.pairwise([*firsts.tolist(), len(spans)]))
        workers = min(_threads(threads), len(groups))

        def work(worker: int) -> None:
            while True:
                try:
                    first, last = groups.popleft()
                except IndexError:
                    return
                encode_spans(
                    data, spans[first:last], out, counts[first:last], *self._tables, *self._caches[worker]
                )

        with self._lock:
            while len(self._caches) < workers:
                tokens = np.empty(8 * _CACHE_WORDS, dtype=np.int32)
                self._caches.append(
                    (np.zeros((2 * _CACHE_WORDS, 4), dtype=np.int64), tokens, np.zeros(2, dtype=np.int64))
                )
            try:
                if data.size <= _GROUP_BYTES:  # takes milliseconds; starting a thread does not pay
                    work(0)
                else:
                    on_threads(work, workers)
            except BaseException:
                # After Ctrl-C the workers still run. Each ends after its current group, and keeps using its
                # cache until then.
                groups.clear()
                self._caches.clear()
                raise
        pieces = [
            out[start : start + count]
            for start, count in zip(spans[:, 0].tolist(), counts.tolist(), strict=True)
        ]
        # np.concatenate copies, so the ids of one text do not keep those of all others in memory.
        return [
            np.concatenate(pieces[first:last]) for first, last in itertools.pairwise([0, *span_ends.tolist()])
        ]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`, without special tokens.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        found = np.asarray(list(ids) if not isinstance(ids, np.ndarray) else ids).ravel()
        wrong = found[(found < 0) | (found >= self.vocab_size)]
        if wrong.size:
            raise ValueError(f"tokenizer: expected ids from 0 to {self.vocab_size - 1}, got {wrong[0]}")
        return b"".join([self.token_bytes[token] for token in found.tolist()])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without special tokens, with U+FFFD for bytes that are not UTF-8."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


class Utf8Stream:
    """Decodes a stream of ids. Holds back the bytes of an incomplete character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Iterable[int]) -> str:
        """The characters that `ids` complete; may be empty."""
        return self._decoder.decode(self._tokenizer.decode_bytes(ids))

    def flush(self) -> str:
        """The rest at the end: U+FFFD for an incomplete character, else an empty text."""
        return self._decoder.decode(b"", final=True)


def _threads(threads: int) -> int:
    return threads or int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]


def _joined(texts: Iterable[str | bytes]) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of all texts, (bytes,) uint8, and the end offset of each, (texts,) int64.

    A lone surrogate is not valid in UTF-8. It becomes the three bytes that its code point would have, which
    are kept as bytes.
    """
    parts = [text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass") for text in texts]
    # A bytearray, since the compiled functions expect writable arrays.
    data = np.frombuffer(bytearray().join(parts), dtype=np.uint8)
    return data, np.cumsum([len(part) for part in parts], dtype=np.int64)


def _distinct_words(data: np.ndarray, ends: np.ndarray, threads: int) -> np.ndarray:
    """The distinct words of the documents and their counts, as count_words gives them."""
    classes = character_classes()
    spans, _ = cut_spans(data, ends, PIECE_BYTES)
    spans = np.concatenate((spans, np.ones((len(spans), 1), dtype=np.int64)), axis=1)
    cuts = np.searchsorted(spans[:, 0], np.linspace(0, data.size, threads + 1))
    cuts[-1] = len(spans)

    def work(worker: int) -> np.ndarray:
        return count_words(data, spans[cuts[worker] : cuts[worker + 1]], True, classes)

    found = np.concatenate(on_threads(work, threads))
    return on_threads(lambda _: count_words(data, found, False, classes), 1)[0]


def on_threads(work: Callable[[int], Result], threads: int) -> list[Result]:
    """Call work(0) .. work(threads - 1), each on its own thread. Returns their results, or raises an
    exception of one.

    The caller only waits, even for a single thread: Python handles Ctrl-C on the main thread, and not within
    compiled code. A worker may continue after Ctrl-C. Workers are daemon threads, so the process does not
    wait for them.
    """
    results: list[Future[Result]] = [Future() for _ in range(threads)]

    def run(index: int) -> None:
        try:
            results[index].set_result(work(index))
        except BaseException as error:
            results[index].set_exception(error)

    for index in range(threads):
        Thread(target=run, args=(index,), daemon=True).start()
    while wait(results, timeout=_POLL_S).not_done:
        pass
    return [result.result() for result in results]
