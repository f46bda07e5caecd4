"""Words, merges, ids and files of the tokenizer, against naive references, `regex` and Hugging Face
`tokenizers`.
"""

import argparse
import difflib
import json
import os
import subprocess
import sys
import unicodedata
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages import tokenizer as tokenizer_module
from stages.tokenizer import Tokenizer, Utf8Stream
from stages.tokenizer.file_format import BYTE_ORDER, Vocabulary
from stages.tokenizer.pretokenizer import cut_spans, word_end
from stages.tokenizer.unicode_classes import character_classes

SPECIAL = ("<|endoftext|>", "<|pad|>", "<|user|>")
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TABLE_REGEX_VERSION = "2026.11.19"
REFERENCE_TEXT = "".join(
    Path(str(module.__file__)).read_text(encoding="utf-8") for module in (argparse, difflib)
)[:60_000]

# Text in which every alternative of the pattern and its edges occur often: contractions, runs of white space
# of one to four bytes, letters, numbers and signs of one to four bytes, special tokens as typed text, newer
# and unassigned characters.
PIECES = [" ", "  ", "\n", "\t", "\r\n", "\u00a0", "\u3000", "\u2003", "\x1c", "\x85", "'", "'s", "'ll", "'ve", "'S", "'l", "a",
          "re", "the", "\u00e9", "\u4e2d\u6587", "\U0001d49c", "1", "23", "\u0665", "\u00bd", "!", "<|user|>",
          "--", "\U0001f600", "\u0301", "\u0378", "\U000e0100"]  # fmt: skip
TEXTS = st.one_of(st.lists(st.sampled_from(PIECES), max_size=30).map("".join), st.text(max_size=40))
BYTES = st.one_of(TEXTS.map(str.encode), st.binary(max_size=40), st.tuples(TEXTS, st.binary(max_size=4)).map(
    lambda pair: pair[1] + pair[0].encode() + pair[1]))  # fmt: skip


def words_of(data: bytes) -> list[bytes]:
    """The words that the compiled code finds."""
    array, classes = np.frombuffer(bytearray(data), dtype=np.uint8), character_classes()
    found, start = [], 0
    while start < len(data):
        end = word_end(array, start, len(data), classes)
        found.append(data[start:end])
        start = end
    return found


def reference_words(data: bytes) -> list[bytes]:
    """The words that the pattern finds, an ill-formed byte standing as one lone surrogate, which is no letter
    or number.
    """
    regex = pytest.importorskip("regex")
    found = regex.findall(GPT2_PATTERN, data.decode("utf-8", "surrogateescape"))
    return [word.encode("utf-8", "surrogateescape") for word in found]


def joined(word: tuple[int, ...], pair: tuple[int, int], token: int) -> tuple[int, ...]:
    """The word with `pair` made one token, from left to right."""
    out: list[int] = []
    i = 0
    while i < len(word):
        both = word[i : i + 2] == pair
        out.append(token if both else word[i])
        i += 2 if both else 1
    return tuple(out)


def naive_merges(texts: list[bytes], num_tokens: int) -> list[tuple[int, int, int]]:
    """Recount all pairs for every merge; the most frequent, then the smallest, wins."""
    counts = Counter(
        tuple(BYTE_ORDER.index(byte) for byte in word) for text in texts for word in words_of(text)
    )
    token_bytes = [bytes([byte]) for byte in BYTE_ORDER]
    merges = []
    while len(token_bytes) < num_tokens:
        pairs: Counter[tuple[int, int]] = Counter()
        for word, count in counts.items():
            for left, right in pairwise(word):
                pairs[left, right] += count
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        text = token_bytes[best[0]] + token_bytes[best[1]]
        assert text not in token_bytes  # what learn_merges says
        token = len(token_bytes)
        token_bytes.append(text)
        merges.append((*best, token))
        merged: Counter[tuple[int, ...]] = Counter()
        for word, count in counts.items():
            merged[joined(word, best, token)] += count
        counts = merged
    return merges


def naive_encode(tokenizer: Tokenizer, merges: list[tuple[int, int, int]], data: bytes) -> list[int]:
    """In each word, merge the leftmost pair of the lowest rank until there is none."""
    ranks = {merge[:2]: (rank, merge[2]) for rank, merge in enumerate(merges)}
    ids: list[int] = []
    for word in words_of(data):
        tokens = [tokenizer.token_bytes.index(bytes([byte])) for byte in word]
        while found := [(*ranks[pair], i) for i, pair in enumerate(pairwise(tokens)) if pair in ranks]:
            _, token, i = min(found, key=lambda item: (item[0], item[2]))
            tokens[i : i + 2] = [token]
        ids += tokens
    return ids


@cache
def trained() -> tuple[Tokenizer, list[tuple[int, int, int]]]:
    """A tokenizer of 600 ids, and the merges that the naive reference learns from the same text."""
    text = REFERENCE_TEXT[:12_000]
    return Tokenizer.train([text], 600, SPECIAL), naive_merges([text.encode()], 600 - len(SPECIAL))


# A class that differs for one character would split it otherwise than every GPT-2 encoder does.
def test_character_classes_are_regexs() -> None:
    regex = pytest.importorskip("regex")
    everything = "".join(map(chr, range(0x110000)))
    expected = np.zeros(0x110000, dtype=np.uint8)
    for kind, pattern in ((1, r"\p{L}"), (2, r"\p{N}"), (3, r"\s")):
        expected[[ord(character) for character in regex.findall(pattern, everything)]] = kind
    wrong = np.flatnonzero(character_classes() != expected)
    if regex.__version__ != TABLE_REGEX_VERSION:  # another Unicode's: compare what this Python knows
        wrong = np.array([code for code in wrong if unicodedata.category(chr(code)) != "Cn"])
    assert [hex(code) for code in wrong] == []


# A wrong alternative, its order, the look-ahead, a character decoded wrongly or read past the end, for any
# bytes.
@given(BYTES)
@settings(max_examples=500, deadline=None)
def test_words_are_the_patterns(data: bytes) -> None:
    assert words_of(data) == reference_words(data)


# A document cut for the threads inside a word, or where the look-ahead would have seen on, would give other
# words.
@given(st.lists(TEXTS.map(str.encode), max_size=4), st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_cut_documents_have_the_same_words(documents: list[bytes], piece_bytes: int) -> None:
    data = b"".join(documents)
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    spans, span_ends = cut_spans(np.frombuffer(bytearray(data), dtype=np.uint8), ends, piece_bytes)
    assert b"".join(data[start:end] for start, end in spans) == data
    first = 0
    for document, last in zip(documents, span_ends, strict=True):
        assert [word for start, end in spans[first:last] for word in words_of(data[start:end])] == words_of(
            document
        )
        first = last


# Stale counts, overlapping pairs in runs (aaaa), ties broken by hash order.
@given(
    st.lists(st.text(alphabet="aab c'1", max_size=60).map(str.encode), min_size=1, max_size=4),
    st.integers(1, 40),
)
@settings(max_examples=200, deadline=None)
def test_merges_are_the_naive_ones(texts: list[bytes], more: int) -> None:
    expected = naive_merges(texts, 256 + more)
    if any(texts):
        assert Tokenizer.train(texts, 256 + len(expected), []).merges == expected


# The same over real text, where counts reach the thousands and thousands of pairs change at once.
def test_merges_of_a_real_text_are_the_naive_ones() -> None:
    tokenizer, expected = trained()
    assert tokenizer.merges == expected


# Merges that another trainer would not learn from the same text: the tie-break or the counts differ from the
# stated rule.
def test_merges_are_those_of_hugging_face(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE())
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    theirs.train_from_iterator([REFERENCE_TEXT], trainer)
    expected = json.loads(theirs.to_str())["model"]["merges"]
    ours = Tokenizer.train([REFERENCE_TEXT], 2000, [])
    ours.save(tmp_path / "tokenizer.json")
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    assert [merge.split(" ") for merge in content["model"]["merges"]] == expected


# Any byte that is lost, doubled or replaced between encode and decode.
@given(BYTES)
@settings(max_examples=300, deadline=None)
def test_any_bytes_come_back(data: bytes) -> None:
    tokenizer, _ = trained()
    ids = tokenizer.encode(data)
    assert ids.dtype == np.int32
    assert tokenizer.decode_bytes(ids) == data
    assert tokenizer.decode(ids.tolist()) == data.decode("utf-8", "replace")


# A lone surrogate replaced: its three bytes (not UTF-8, so bytes) would come back as a question mark.
def test_lone_surrogates_are_three_bytes() -> None:
    tokenizer, _ = trained()
    for code in (0xD800, 0xDC80, 0xDFFF):
        data = b"a" + bytes([0xED, 0x80 | code >> 6 & 0x3F, 0x80 | code & 0x3F]) + b" b"
        ids = tokenizer.encode(f"a{chr(code)} b")
        assert tokenizer.decode_bytes(ids) == data
        assert ids.tolist() == tokenizer.encode(data).tolist()
    assert (
        Tokenizer.train(["\ud800" * 9], 258, []).merges
        == Tokenizer.train([b"\xed\xa0\x80" * 9], 258, []).merges
    )


# A merge applied out of order, a cached word that answers for another one, a special token made from typed
# text.
@given(BYTES)
@settings(max_examples=300, deadline=None)
def test_ids_are_the_naive_ones(data: bytes) -> None:
    tokenizer, merges = trained()
    ids = tokenizer.encode(data).tolist()
    assert ids == naive_encode(tokenizer, merges, data)
    assert not set(ids) & set(tokenizer.special.values())


# A tokenizer.json that means something else to Hugging Face's library than to us. Characters that this
# Python's Unicode does not have are left out: that library's table is older than ours. So are special tokens,
# which it finds in typed text.
def test_ids_are_those_of_hugging_face(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer, _ = trained()
    tokenizer.save(tmp_path / "tokenizer.json")
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert {token: theirs.token_to_id(token) for token in SPECIAL} == tokenizer.special
    assert theirs.get_vocab_size() == tokenizer.vocab_size

    @given(st.one_of(TEXTS, st.text(st.characters(exclude_categories=["Cn", "Cs"]), max_size=60)))
    @settings(max_examples=300, deadline=None)
    def same(text: str) -> None:
        if any(unicodedata.category(character) == "Cn" for character in text) or any(
            token in text for token in SPECIAL
        ):
            return
        ids = tokenizer.encode(text)
        assert ids.tolist() == theirs.encode(text).ids
        assert theirs.decode(ids.tolist()) == text

    same()
    assert tokenizer.encode(REFERENCE_TEXT).tolist() == theirs.encode(REFERENCE_TEXT).ids


# Ids that depend on what was encoded before, on the other texts of a batch, or on the threads; a lost empty
# text.
def test_batches_are_the_texts_one_by_one() -> None:
    tokenizer, _ = trained()
    texts: list[str | bytes] = [
        "",
        REFERENCE_TEXT * 40,
        "",
        "one",
        b"\xff\xfe two",
        REFERENCE_TEXT[5:900],
        "",
    ]
    alone = [Tokenizer.train([REFERENCE_TEXT[:12_000]], 600, SPECIAL).encode(text) for text in texts]
    for threads in (0, 1, 3):
        batch = tokenizer.encode_batch(texts, threads=threads)
        assert [ids.tolist() for ids in batch] == [ids.tolist() for ids in alone]
    assert tokenizer.encode_batch([]) == []


# A full cache that is not emptied: words would get the tokens of other words.
def test_cache_is_emptied_when_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.tokenizer._CACHE_WORDS", 8)
    tokenizer = Tokenizer.train([REFERENCE_TEXT[:12_000]], 600, SPECIAL)
    assert tokenizer.encode(REFERENCE_TEXT).tolist() == trained()[0].encode(REFERENCE_TEXT).tolist()


# A word without end (a line of signs, a base64 block) that takes quadratic time or memory.
def test_endless_words() -> None:
    word = "ab" * 100_000 + "=" * 100_000
    tokenizer = Tokenizer.train([word], 275, [])
    ids = tokenizer.encode(word)
    assert tokenizer.decode(ids) == word
    assert len(ids) < 1000


# Ids from 32,768 on that overflow the packed pair: their merges would be lost without a word.
def test_large_ids_merge() -> None:
    letters = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    firsts = [byte for byte in BYTE_ORDER if byte not in letters][:150] + list(letters)
    token_bytes = [bytes([byte]) for byte in BYTE_ORDER]
    merges = []
    for left in firsts:
        for right in firsts:
            merges.append((BYTE_ORDER.index(left), BYTE_ORDER.index(right), len(token_bytes)))
            token_bytes.append(bytes([left, right]))
    left, right = token_bytes.index(b"YZ"), token_bytes.index(b"ZY")
    assert min(left, right) >= 32768
    merges.append((left, right, len(token_bytes)))
    token_bytes.append(b"YZZY")
    tokenizer = Tokenizer(Vocabulary(token_bytes, merges, {}))
    assert tokenizer.encode("YZZY").tolist() == [len(token_bytes) - 1]


# Two runs, or two numbers of threads, that write different files; a file that changes when it is read and
# written again.
def test_file_is_canonical(tmp_path: Path) -> None:
    texts = [REFERENCE_TEXT[:9_000], REFERENCE_TEXT[9_000:12_000]]
    files = []
    for threads in (1, 2, 5):
        tokenizer = Tokenizer.train(texts, 500, SPECIAL, threads=threads)
        tokenizer.save(tmp_path / "a" / "tokenizer.json")
        files.append((tmp_path / "a" / "tokenizer.json").read_bytes())
    again = Tokenizer.load(tmp_path / "a" / "tokenizer.json")
    again.save(tmp_path / "b.json")
    assert {*files, (tmp_path / "b.json").read_bytes()} == {files[0]}
    assert again.sha256 == tokenizer.sha256
    assert again.merges == tokenizer.merges
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b.json", "tokenizer.json"]


# Special tokens that are not the last ids, or counted in bits per byte; lengths of characters instead of
# bytes.
def test_ids_and_lengths() -> None:
    tokenizer = Tokenizer.train(["\u00e9\u00e9\u00e9 \u00e9\u00e9"], 256 + 2 + 3, SPECIAL)
    assert tokenizer.vocab_size == 261
    assert tokenizer.special == {"<|endoftext|>": 258, "<|pad|>": 259, "<|user|>": 260}
    assert tokenizer.token_bytes[:256] == [bytes([byte]) for byte in BYTE_ORDER]
    assert tokenizer.token_bytes[256:] == ["\u00e9".encode(), "\u00e9\u00e9".encode(), b"", b"", b""]
    assert tokenizer.token_lengths.tolist() == [1] * 256 + [2, 4, 0, 0, 0]
    assert tokenizer.decode([259, 256, 258]) == "\u00e9"


# Characters cut in the middle shown as U+FFFD while they stream, or an incomplete one swallowed at the end.
def test_stream_gives_whole_characters() -> None:
    tokenizer = Tokenizer.train(["aa"], 257, [])
    ids = tokenizer.encode("a\u20ac\U0001f600").tolist()
    stream = Utf8Stream(tokenizer)
    assert [stream.feed([token]) for token in ids] == ["a", "", "", "\u20ac", "", "", "", "\U0001f600"]
    assert stream.flush() == ""
    assert stream.feed(tokenizer.encode(b"\xe2\x82")) == ""
    assert stream.flush() == "\ufffd"


# An id of another vocabulary taken for a token counted from the end, or a traceback.
@pytest.mark.parametrize("wrong", [-1, 257])
def test_decode_refuses_foreign_ids(wrong: int) -> None:
    tokenizer = Tokenizer.train(["aa"], 257, [])
    with pytest.raises(ValueError, match=f"^tokenizer: expected ids from 0 to 256, got {wrong}$"):
        tokenizer.decode([97, wrong])


# A vocabulary that can't be made, made anyway or reported as an IndexError; the message says what can.
@pytest.mark.parametrize(
    ("texts", "vocab_size", "special", "message"),
    [
        (
            ["aa"],
            258,
            SPECIAL,
            r"vocab_size: expected 259 \(256 bytes and 3 special tokens\) to 65536, got 258$",
        ),
        (["aa"], 65537, [], r"vocab_size: expected 256 .* to 65536, got 65537$"),
        (["aaaa aaaa"], 300, SPECIAL, r"vocab_size: this text gives at most 262, got 300; set it to that"),
        ([], 300, [], "expected text to learn merges from, got none"),
        ([""], 300, [], "expected text to learn merges from, got none"),
        (
            ["the the"],
            260,
            ["the"],
            r"special_tokens: expected .* such as <\|name\|>, got 'the', an ordinary token",
        ),
        (["aa"], 258, ["a"], "special_tokens: .* got 'a', an ordinary token"),
    ],
)
def test_train_refuses(texts: list[str], vocab_size: int, special: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tokenizer.train(texts, vocab_size, special)


# The compiled code computes something else than the Python it is compiled from (an overflow, a narrower
# integer).
def test_without_the_compiler() -> None:
    script = (
        "from stages.tokenizer import Tokenizer\n"
        "text = 'the caf\\u00e9 of the 3rd \\u4e2d\\u6587 \\U0001f600 ' * 3 + 'a-very-long-word' * 3 + '=' * "
        "50\n"
        "made = Tokenizer.train([text, text.upper()], 310, ['<|end|>'], threads=2)\n"
        "print(made.sha256, made.encode(text + ' THE end' + chr(0xd800)).tolist())\n"
    )
    outputs = set()
    for disabled in ("0", "1"):
        environment = {**os.environ, "NUMBA_DISABLE_JIT": disabled}
        command = [sys.executable, "-W", "error", "-c", script]
        outputs.add(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    assert len(outputs) == 1


# Ctrl-C that waits for compiled code (or for a thread at exit) costs minutes: the call below takes hours,
# without an instruction of Python in it. The compiled functions must leave the interpreter's lock, or the
# waiting thread would not run.
@pytest.mark.parametrize("name", ["learn_merges", "count_words", "encode_spans"])
def test_ctrl_c_is_answered_while_compiled_code_runs(name: str) -> None:
    assert getattr(tokenizer_module, name).targetoptions["nogil"]
    script = (
        "import _thread, hashlib, signal, sys\n"
        "from threading import Timer\n"
        "from stages import tokenizer\n"
        "from stages.program import command_main\n"
        "def endless(*arguments):\n"
        "    Timer(0.2, _thread.interrupt_main).start()\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "made = tokenizer.Tokenizer.train(['aa'], 257, [], threads=1)\n"
        "setattr(tokenizer, sys.argv[1], endless)\n"
        "text = 'a tale ' * 200_000\n"
        "command_main(lambda _: made.encode(text) if sys.argv[1] == 'encode_spans' else made.train([text], "
        "258, [], threads=1))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, name], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


# A worker that still computes after Ctrl-C shares its cache with the next call's worker: ids of two texts
# would mix.
def test_encoding_goes_on_after_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.train([REFERENCE_TEXT[:12_000]], 600, SPECIAL)
    tokenizer.encode(REFERENCE_TEXT)
    caches = list(tokenizer._caches)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("stages.tokenizer.on_threads", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tokenizer.encode("the " * 300_000)
    assert tokenizer.encode(REFERENCE_TEXT).tolist() == trained()[0].encode(REFERENCE_TEXT).tolist()
    assert all(one is not other for one in tokenizer._caches for other in caches)
