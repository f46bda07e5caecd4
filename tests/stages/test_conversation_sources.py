"""Records of every shape become messages; what is wrong is named with its place."""

import re
from typing import Any

import pytest

from stages.conversation_sources import Conversation, play_conversations, read_conversations
from stages.corpus import Source
from stages.sources import Record

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


def read(value: Any, shape: str = "auto", **keys: Any) -> list[Conversation]:
    source = Source("local", files=("x",), format=shape, **keys)
    return list(read_conversations(source, iter([Record("x", "x, line 7", value)]), None))


@pytest.mark.parametrize(
    ("row", "shape"),
    [
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, "messages"),
        ({"prompt": "q", "completion": "a"}, "prompt_completion"),
        ({"instruction": "q", "output": "a"}, "alpaca"),
        ({"instruction": "q", "input": "", "output": "a"}, "alpaca"),
        ({"messages": None, "prompt": "q", "completion": "a"}, "prompt_completion"),  # a table's empty column
    ],
)
def test_three_shapes_detected_and_named(row: dict[str, Any], shape: str) -> None:
    """Catches a shape that isn't told from its keys, and one that differs from what the same key `format` says."""
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


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, "expected messages, or prompt and completion, or instruction and output; got the keys text"),
        ({"messages": [{"role": "user"}]}, "not of the shape messages (KeyError: 'content')"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "expected a role among system, user, assistant"),
        ({"prompt": "q", "completion": 3}, "got 'assistant' and int"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "expected user and assistant in turn"),
        ({"prompt": "q", "completion": "\ud800"}, "a lone surrogate"),
        ("whole text", "conversations of the format auto are rows of .jsonl or .parquet"),
    ],
)
def test_broken_records_are_named(row: Any, message: str) -> None:
    """Catches a traceback, or a broken record that is passed over without a word."""
    with pytest.raises(ValueError, match=re.escape("x, line 7: ") + ".*" + re.escape(message)):
        read(row)


def test_play_conversations_stay_in_a_scene_and_between_two() -> None:
    """Catches answers from another scene or a third person in a longer talk, and an answer that is learnt twice."""
    pairs = ("a1", "b1"), ("b1", "a2"), ("a2", "b2"), ("b2", "c1"), ("a3", "b3")
    single = [[("user", question), ("assistant", answer)] for question, answer in pairs]
    assert list(play_conversations(SCENES, 1, None)) == single
    double = list(play_conversations(SCENES, 2, None))
    assert double == [[("user", "a1"), ("assistant", "b1"), ("user", "a2"), ("assistant", "b2")], single[3], single[4]]
    assert list(play_conversations(SCENES, 2, 7)) == single  # two exchanges have 8 characters


def test_chatterbot_lists() -> None:
    """Catches numbers and broken lines of YAML that aren't texts, lone lines, and second answers taken for questions."""
    text = "conversations:\n- - Year?\n  - 1963\n- lone line\n- - Hi\n  - Well\n    met\n  - Good\n  - Day\n"
    one = [c.messages for c in read(text, "chatterbot")]
    assert one == [(("user", "Year?"), ("assistant", "1963")), (("user", "Hi"), ("assistant", "Well met"))]
    assert len(read(text, "chatterbot", max_exchanges=2)[1].messages) == 4
    with pytest.raises(ValueError, match="x, line 7: expected YAML with the list conversations"):
        read("conversations: [", "chatterbot")
