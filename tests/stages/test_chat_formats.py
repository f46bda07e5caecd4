"""Records of every shape become messages; what is wrong is named with its place."""

import re
from typing import Any

import pytest

from stages.sources.chat_formats import Conversation, LeftOut, parse_conversations, play_conversations
from stages.sources.corpus import Source
from stages.sources.rows import InputRecord

SCENES = """## ACT I

### SCENE I

**A**
a1

**B**
b1

_Exit_

**A**
a2

**B**
b2

**C**
c1

### SCENE II

**A**
a3

**B**
b3
"""


def read(value: Any, shape: str = "auto", left_out: LeftOut | None = None, **keys: Any) -> list[Conversation]:
    source = Source("local", files=("x",), format=shape, **keys)
    return list(
        parse_conversations(source, iter([InputRecord("x", "x, line 7", value)]), None, left_out or LeftOut())
    )


def chat(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.mark.parametrize(
    ("row", "shape"),
    [
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, "messages"),
        ({"prompt": "q", "completion": "a"}, "prompt_completion"),
        ({"instruction": "q", "output": "a"}, "alpaca"),
        ({"instruction": "q", "input": "", "output": "a"}, "alpaca"),
        ({"messages": None, "prompt": "q", "completion": "a"}, "prompt_completion"),  # a table's empty column
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "sharegpt"),
        ({"conversations": [{"from": "user", "value": "q"}, {"from": "chatgpt", "value": "a"}]}, "sharegpt"),
        (
            {"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
            "sharegpt",
        ),
        ({"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "messages"),
        (
            {
                "prompt": [{"role": "user", "content": "q"}],
                "completion": [{"role": "assistant", "content": "a"}],
            },
            "prompt_completion",
        ),
        ({"prompt": [{"role": "user", "content": "q"}], "completion": "a"}, "prompt_completion"),
    ],
)
def test_shapes_detected_and_named(row: dict[str, Any], shape: str) -> None:
    """Catches a shape that is not detected from its keys, and one that differs from what the same key
    `format` says.
    """
    assert [c.messages for c in read(row)] == [(("user", "q"), ("assistant", "a"))]
    assert read(row) == read(row, shape)


def test_alpaca_input_follows_the_instruction() -> None:
    """Catches an input that is lost."""
    conversation = read({"instruction": "Add.", "input": "1 2", "output": "3"})[0]
    assert conversation.messages[0] == ("user", "Add.\n\n1 2")
    assert (conversation.text, conversation.chars, conversation.size) == ("Add.\n\n1 2", 10, 10)


def test_system_first_and_unanswered_questions_cut() -> None:
    """Catches a question without an answer in the training data, and a first message that is the system's."""
    turns = [("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "left open")]
    rows = {"messages": [{"role": role, "content": content} for role, content in turns]}
    assert read(rows)[0].messages == tuple(turns[:3])
    assert read(rows)[0].text == "q"
    assert read({"messages": rows["messages"][:2]}) == []
    assert read(rows)[0].row() == {"messages": rows["messages"][:3]}


# What chat data holds besides one text of each role: roles of tools, contents in parts, empty and doubled
# messages.
@pytest.mark.parametrize(
    ("turns", "messages"),
    [
        ([("developer", "s"), ("User", "q"), ("ASSISTANT", "a")], "system s, user q, assistant a"),
        ([("user", [{"type": "text", "text": "q"}, "r"]), ("assistant", ["a"])], "user qr, assistant a"),
        ([("user", "q"), ("user", "r"), ("assistant", "a"), ("assistant", "b")], "user q||r, assistant a||b"),
        ([("assistant", "hello"), ("user", "q"), ("assistant", "a")], "user q, assistant a"),
        (
            [("system", "s"), ("assistant", "hello"), ("user", "q"), ("assistant", "a")],
            "system s, user q, assistant a",
        ),
        (
            [("user", "q"), ("assistant", "let me see"), ("tool", "42"), ("assistant", "a")],
            "user q, assistant let me see||a",
        ),
        ([("user", "q"), ("assistant", ""), ("user", "r"), ("assistant", "a")], "user r, assistant a"),
        ([("user", " "), ("assistant", "a"), ("user", "r"), ("assistant", "b")], "user r, assistant b"),
        ([("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "  ")], "user q, assistant a"),
        ([("system", " "), ("user", "q"), ("assistant", "a")], "user q, assistant a"),
        ([("user", "q"), ("assistant", " \n")], ""),
        ([("system", "s"), ("user", "q")], ""),
        ([("assistant", "a")], ""),
        ([], ""),
    ],
)
def test_messages_become_a_conversation(turns: list[tuple[str, Any]], messages: str) -> None:
    """Would catch an empty answer that is supervised, a side that speaks twice in a row, and words of a tool
    as an answer.
    """
    expected = messages.replace("||", "\n\n")
    assert [", ".join(" ".join(turn) for turn in c.messages) for c in read(chat(*turns))] == (
        [expected] if expected else []
    )


def test_what_is_left_out_is_counted() -> None:
    """Would catch conversations and messages that vanish."""
    left_out = LeftOut()
    calls = chat(("user", "q"), ("assistant", None), ("tool", "42"), ("assistant", "a"))
    calls["messages"][1]["tool_calls"] = [{"name": "f"}]
    assert read(calls, left_out=left_out)[0].messages == (("user", "q"), ("assistant", "a"))
    read({"instruction": "q", "output": ""}, left_out=left_out)
    read(chat(("user", "q"), ("assistant", "   ")), left_out=left_out)
    nulls = (
        {"prompt": "q", "completion": None},
        {"instruction": "q", "output": None},
        chat(("user", "q"), ("assistant", None)),
    )
    for nothing in nulls:
        assert read(nothing, left_out=left_out) == []
    assert (left_out.tool_messages, left_out.empty, left_out.bad_rows) == (2, 5, 0)


BAD_ROWS: list[tuple[Any, str]] = [
    (
        {"text": "a"},
        "expected messages, conversations, prompt and completion, or instruction and output; got the keys text",
    ),
    ({"messages": [{"role": "user"}]}, "not of the shape messages (KeyError: 'content')"),
    ({"messages": ["q", "a"]}, "not of the shape messages (AttributeError"),
    ({"messages": 7}, "not of the shape messages (TypeError: expected a list of messages, got int)"),
    (chat(("king", "a")), "expected a role among assistant, "),
    (chat((["user"], "a")), "expected a role among assistant, "),  # type: ignore[arg-type]
    (
        {"prompt": "q", "completion": 3},
        "not of the shape prompt_completion (TypeError: expected a list of messages, got int)",
    ),
    (chat(("user", 3)), "expected a text as content of user, got int"),
    ({"messages": None}, "not of the shape messages (TypeError: expected a list of messages, got NoneType)"),
    (ValueError("x, line 7: expected one JSON object a line, ..."), "expected one JSON object a line"),
    (
        chat(("user", [{"type": "image_url", "image_url": "x"}])),
        "expected parts of the type text, got one of 'image_url'",
    ),
    (
        chat(("user", "q"), ("system", "s"), ("assistant", "a")),
        "expected a system message only before all others, got user, ",
    ),
    ({"prompt": "q", "completion": "\ud800"}, "a lone surrogate"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_bad_rows_are_named(row: Any, message: str) -> None:
    """Catches a traceback, or a broken record that is passed over without a word."""
    with pytest.raises(ValueError, match=re.escape("x, line 7: ") + ".*" + re.escape(message)):
        read(row)


def test_a_text_of_a_format_for_rows_is_named() -> None:
    """Would catch a text file among chats that is taken for a bad row, one of thousands."""
    with pytest.raises(
        ValueError,
        match=r"x, line 7: conversations of the format auto are rows of \.json, \.jsonl or \.parquet",
    ):
        read("whole text", left_out=LeftOut("leave_out"))


# One bad row of a million ended the run; left out without a word it would be missed by nobody.
def test_bad_rows_are_left_out_counted_and_the_first_named(capsys: pytest.CaptureFixture[str]) -> None:
    left_out = LeftOut("leave_out")
    source = Source("local", files=("x",))
    good = chat(("user", "q"), ("assistant", "a"))
    values = [row for bad, _ in BAD_ROWS for row in (bad, good)]
    records = (InputRecord("x", f"x, line {number}", value) for number, value in enumerate(values, start=1))
    assert len(list(parse_conversations(source, records, None, left_out))) == len(BAD_ROWS)
    assert left_out.bad_rows == len(BAD_ROWS)
    said = capsys.readouterr().err.splitlines()
    assert [line.split(": expected")[0].split(": not")[0] for line in said] == [
        f"left out: x, line {n}" for n in (1, 3, 5)
    ]
    assert left_out.first_reason.startswith("x, line 1: expected messages, ")


def test_play_conversations_stay_in_a_scene_and_between_two() -> None:
    """Catches answers from another scene or a third person in a longer talk, and an answer that is supervised
    twice.
    """
    pairs = ("a1", "b1"), ("b1", "a2"), ("a2", "b2"), ("b2", "c1"), ("a3", "b3")
    single = [[("user", question), ("assistant", answer)] for question, answer in pairs]
    assert list(play_conversations(SCENES, 1, None)) == single
    double = list(play_conversations(SCENES, 2, None))
    assert double == [
        [("user", "a1"), ("assistant", "b1"), ("user", "a2"), ("assistant", "b2")],
        single[3],
        single[4],
    ]
    assert list(play_conversations(SCENES, 2, 7)) == single  # two exchanges have 8 characters


def test_chatterbot_lists() -> None:
    """Catches numbers and broken lines of YAML that aren't texts, lone lines, and second answers taken for
    questions.
    """
    text = "conversations:\n- - Year?\n  - 1963\n- lone line\n- - Hi\n  - Well\n    met\n  - Good\n  - Day\n"
    one = [c.messages for c in read(text, "chatterbot")]
    assert one == [(("user", "Year?"), ("assistant", "1963")), (("user", "Hi"), ("assistant", "Well met"))]
    assert len(read(text, "chatterbot", max_exchanges=2)[1].messages) == 4
    with pytest.raises(ValueError, match="x, line 7: expected YAML with the list conversations"):
        read("conversations: [", "chatterbot")
