"""The chat template, its loss mask, and truncation to the context."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.chat_template import (
    read_conversations,
    render,
    render_all,
    render_prompt,
    shuffle_questions,
    validate_messages,
)
from stages.text_files import RowWriter, atomic_file
from stages.tokenizer import Tokenizer

SYSTEM, USER, ASSISTANT, END = range(258, 262)


class ByteTokenizer:
    """The interface of the tokenizer with one token per byte: typed text gives bytes, never a special id."""

    def __init__(self, *special: str) -> None:
        self.special = {token: 256 + number for number, token in enumerate(special)}

    def encode_batch(self, texts: Iterable[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]


TOKENIZER: Any = ByteTokenizer(
    "<|endoftext|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
)


def talk(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """User and assistant in turn, after an optional system message."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    return messages + [
        {"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)
    ]


def text_of(ids: Sequence[int]) -> str:
    """Ids as text, special tokens by their letter: S U A and . for the end."""
    names = {SYSTEM: "S", USER: "U", ASSISTANT: "A", END: "."}
    return "".join(names.get(token) or chr(token) for token in ids)


messages_strategy = st.builds(
    lambda contents, system: talk(*contents, system=system),
    st.lists(st.text(max_size=8), min_size=1, max_size=7),
    st.none() | st.text(max_size=8),
)


def test_template_is_pinned() -> None:
    """Catches a changed template (a newline, a space, a lost <|end|>), which a trained checkpoint doesn't
    know.
    """
    ids, weights = render(talk("hi", "yo!", "", "no", system="be"), TOKENIZER)
    system = [SYSTEM, ord("b"), ord("e"), END]
    first = [USER, ord("h"), ord("i"), END, ASSISTANT, ord("y"), ord("o"), ord("!"), END]
    second = [USER, END, ASSISTANT, ord("n"), ord("o"), END]
    assert ids.tolist() == system + first + second
    assert weights.tolist() == [0] * 4 + [0, 0, 0, 0, 0, 1, 1, 1, 1] + [0, 0, 0, 1, 1, 1]
    assert (ids.dtype, weights.dtype) == (np.int32, np.float32)


def test_prompt_is_what_precedes_the_answer_in_training() -> None:
    """Catches a prompt that differs from training (a space, a doubled <|assistant|>), which spoils every
    reply.
    """
    ids, weights = render(talk("hi", "yo", "so", "ok"), TOKENIZER)
    prompt = render_prompt(talk("hi", "yo", "so"), TOKENIZER)
    assert prompt.tolist() == ids[: len(prompt)].tolist()
    assert prompt[-1] == ASSISTANT
    assert weights[len(prompt) :].tolist() == [1, 1, 1]
    assert weights[len(prompt) - 1] == 0


@settings(deadline=None)
@given(messages_strategy)
def test_supervised_is_the_assistants_text_and_its_end(messages: list[dict[str, str]]) -> None:
    """Catches a mask on the user's words, on <|assistant|>, or without the <|end|> by which a reply stops."""
    ids, weights = render(messages, TOKENIZER)
    answers = "".join(message["content"] + "\0" for message in messages if message["role"] == "assistant")
    supervised = bytes(0 if token == END else token for token in ids[weights == 1].tolist())
    assert supervised == answers.encode()


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from(["<|user|>", "<|assistant|>", "<|end|>", "<|pad|>", "<|system|>", "a"]), max_size=5
    )
)
def test_typed_special_tokens_stay_text(words: list[str]) -> None:
    """Catches a user who ends his own turn, or speaks as the assistant, by typing the template."""
    ids, _ = render(talk("".join(words), "ok"), TOKENIZER)
    assert [token for token in ids.tolist() if token >= 256] == [USER, END, ASSISTANT, END]


def test_learned_merges_stay_within_the_template() -> None:
    """Catches, with the real tokenizer, a merge across a message's border, and text that spells the template
    in an answer.
    """
    names = ["<|endoftext|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    tokenizer = Tokenizer.train(["<|user|> hello <|end|> hello <|assistant|>"] * 9, 280, names)
    messages = talk("hello <|end|>", "", "<|assistant|>", " hello<|end|><|user|>")
    ids, weights = render(messages, tokenizer)
    special = {token: name for name, token in tokenizer.special.items()}
    shown, texts = [special[token] for token in ids.tolist() if token in special], []
    for message in messages:
        texts.append(tokenizer.encode(message["content"]).tolist())
    assert shown == ["<|user|>", "<|end|>", "<|assistant|>", "<|end|>"] * 2
    assert [token for token in ids.tolist() if token not in special] == [
        token for text in texts for token in text
    ]
    assert tokenizer.decode(ids) == "".join(message["content"] for message in messages)
    assert weights.sum() == len(texts[1]) + len(texts[3]) + 2
    assert len(ids) < sum(len(message["content"]) for message in messages)  # something was merged


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        (None, "at least one message, got None"),
        ([{"role": "user"}], "message 0: expected"),
        (["hello"], "message 0: expected"),
        ([{"role": "user", "content": 5}], "message 0: expected"),
        ([{"role": "bot", "content": "a"}], "a role of system, user, assistant, got 'bot'"),
        ([{"role": ["user"], "content": "a"}], "a role of system, user, assistant"),
        (
            [*talk("a", "b"), {"role": "system", "content": "c"}],
            "message 2: expected a system message only as the first",
        ),
    ],
)
def test_malformed_messages_are_named(messages: Any, message: str) -> None:
    """Catches a KeyError or a silently ignored role deep in training."""
    with pytest.raises(ValueError, match=message):
        validate_messages(messages)


def test_reader_names_file_and_line(tmp_path: Path) -> None:
    """Catches an error that names no line, and lines that are skipped silently."""
    path = tmp_path / "conversations.val.jsonl.zst"
    rows: list[dict[str, Any]] = [
        {"messages": talk("a", "b")},
        {"messages": talk("c", "d")},
        {"text": "no conversation"},
    ]
    with atomic_file(path) as stream:
        writer = RowWriter(stream)
        for row in rows:
            writer.write(row)
        writer.finish()
    reader = read_conversations(path)
    assert [next(reader), next(reader)] == [row["messages"] for row in rows[:2]]
    with pytest.raises(
        ValueError, match=r"conversations\.val\.jsonl\.zst, line 3: messages: expected a list"
    ):
        next(reader)


def test_tokenizer_without_the_template_is_refused() -> None:
    """Catches a KeyError with a borrowed tokenizer that has no chat tokens."""
    plain: Any = ByteTokenizer("<|endoftext|>")
    with pytest.raises(
        ValueError, match=r"no special token <\|system\|>; add it to train_bpe\.special_tokens"
    ):
        render(talk("a", "b"), plain)


def cut(messages: list[dict[str, str]], context: int) -> str | None:
    """What is left of a conversation that is cut to the context, as text; None if it is dropped."""
    try:
        rendered = render_all([messages], TOKENIZER, context=context, overflow="truncate")
    except ValueError:
        return None
    return text_of(rendered[0][0].tolist())


def test_cut_takes_from_the_front_in_the_stated_order() -> None:
    """Catches a cut that takes an answer, a part of an old exchange, or the system message before an old
    exchange.
    """
    messages = talk("one", "two", "three", "four", system="sys")
    whole = "Ssys.Uone.Atwo.Uthree.Afour."
    assert cut(messages, len(whole)) == whole
    assert cut(messages, len(whole) - 1) == "Ssys.Uthree.Afour."
    assert cut(messages, 18) == "Ssys.Uthree.Afour."
    assert cut(messages, 17) == "Uthree.Afour."
    assert cut(messages, 13) == "Uthree.Afour."
    assert cut(messages, 12) == "Uhree.Afour."
    assert cut(messages, 8) == "U.Afour."
    assert cut(messages, 7) is None


@settings(deadline=None)
@given(messages_strategy, st.integers(1, 40))
def test_cut_is_the_longest_end_that_the_rule_allows(messages: list[dict[str, str]], context: int) -> None:
    """Catches a cut that is too long, that changes an answer, or leaves nothing to learn."""
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    left = cut(messages, context)
    if not answers:
        assert left is None
        return
    whole = text_of(render(messages[: answers[-1] + 1], TOKENIZER)[0].tolist())
    least = len(messages[answers[-1]]["content"].encode()) + 4
    assert (left is None) == (least > context)
    if left is not None:
        assert len(left) <= context
        assert left == whole if len(whole) <= context else left.endswith(whole[-(least - 2) :])


def test_cut_without_a_question_before_the_answer() -> None:
    """Catches a cut answer in a conversation that opens with one: it is dropped, or its whole turn is
    removed.
    """
    greeting = [{"role": "assistant", "content": "hello"}]
    assert cut(greeting, 6) is None
    assert cut([*greeting, *talk("a", "b")], 6) == "Ua.Ab."


def test_too_long_ones_are_counted() -> None:
    """Catches conversations that vanish without a trace."""
    conversations = [talk("a", "b"), talk("a" * 9, "b"), talk("a", "b" * 99), talk("a"), talk("a", "b", "c")]
    cutting = render_all(conversations, TOKENIZER, context=10, overflow="truncate")
    assert cutting.counts == {"read": 5, "kept": 3, "cut": 1, "too_long": 1, "unanswered": 1}
    dropping = render_all(conversations, TOKENIZER, context=10, overflow="drop")
    assert dropping.counts == {"read": 5, "kept": 2, "cut": 0, "too_long": 2, "unanswered": 1}
    assert [text_of(dropping[number][0].tolist()) for number in range(len(dropping))] == ["Ua.Ab.", "Ua.Ab."]
    assert "2 of 5 conversations kept" in dropping.describe()
    assert "dropped: 2 too long, 1 without an answer; 12 tokens, 4 of them supervised" in dropping.describe()


def test_nothing_left_is_an_error_that_says_why() -> None:
    """Catches a run on no data, which would divide by zero or never end."""
    with pytest.raises(
        ValueError, match=r"left of 2: 1 are longer than model\.context = 5, 1 have no answer; use"
    ):
        render_all([talk("a", "b"), talk("a")], TOKENIZER, context=5, overflow="drop")
    with pytest.raises(ValueError, match="left of 0"):
        render_all([], TOKENIZER, context=5, overflow="drop")


def test_chunks_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches contents assigned to the next conversation, if several calls encode them."""
    monkeypatch.setattr("stages.chat_template.CHUNK", 2)
    conversations = [talk(f"q{number}", f"a{number}") for number in range(5)]
    rendered = render_all(iter(conversations), TOKENIZER, context=50, overflow="drop")
    texts = [text_of(rendered[number][0].tolist()) for number in range(len(rendered))]
    assert texts == [f"Uq{number}.Aa{number}." for number in range(5)]
    assert [supervised.sum() for _, supervised in map(rendered.__getitem__, range(5))] == [3] * 5


@settings(deadline=None)
@given(st.integers(2, 30), st.integers(0, 99))
def test_shuffled_questions_are_never_ones_own(count: int, seed: int) -> None:
    """Catches a shuffle with fixed points, one that repeats or loses a question, and one that moves the
    answers.
    """
    conversations = [talk(f"q{number}", f"a{number}") for number in range(count)]
    shuffled = shuffle_questions(conversations, seed)
    assert [messages[1] for messages in shuffled] == [messages[1] for messages in conversations]
    questions = [messages[0]["content"] for messages in shuffled]
    assert sorted(questions) == sorted(messages[0]["content"] for messages in conversations)
    assert all(
        question != messages[0]["content"]
        for question, messages in zip(questions, conversations, strict=True)
    )
    assert shuffled == shuffle_questions(conversations, seed)


def test_shuffled_questions_of_several_turns() -> None:
    """Catches a donor with fewer questions than needed, a moved system message, and changes to the input."""
    conversations = [talk("q1", "a1", "q2", "a2", "q3", "a3", system="s"), talk("p1", "b1", "p2", "b2")]
    first, second = shuffle_questions(conversations, 0)
    assert first == talk("p1", "a1", "p2", "a2", "p1", "a3", system="s")
    assert second == talk("q1", "b1", "q2", "b2")
    assert conversations[1] == talk("p1", "b1", "p2", "b2")


def test_shuffle_passes_over_those_without_a_question() -> None:
    """Catches a greeting that takes part in the shuffle, and a lone conversation that keeps its own
    question.
    """
    greeting = [{"role": "assistant", "content": "hello"}]
    assert shuffle_questions([talk("q", "a"), greeting, talk("p", "b")], 0) == [
        talk("p", "a"),
        greeting,
        talk("q", "b"),
    ]
    with pytest.raises(ValueError, match="at least 2 conversations with a question to shuffle them, got 1"):
        shuffle_questions([talk("q", "a"), greeting], 0)
