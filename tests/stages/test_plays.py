"""The text of a printed play and its scenes, from Markdown with the oddities of the real source."""

from stages.sources.plays import parse, printed_play, scenes

PLAY = """# A Play

## ACT I

### SCENE I. A hall with
two doors.

_Enter ROMEO and JULIET, with
a page_

**ROMEO**\x20\x20
She speaks:\x20\x20
O, speak again, 'bright angel'\\--

_Thunder_

What was that?

_Exit page_

**JULIET**\x20\x20
__\\[Aside]_\x20\x20
Ay me! & c.

**ROMEO**\x20\x20
[To her]_\x20\x20
I will __\\[ ]_ go.

*Exeunt.*

### SCENE II. A street.

**First Servant**
Here, sir.

**JULIET**

**First Servant**\x20\x20
Sir?
"""

PRINTED = """A Play

ACT I

SCENE I. A hall with two doors.

[Enter ROMEO and JULIET, with a page]

ROMEO:
She speaks:
O, speak again, 'bright angel'--
[Thunder]
What was that?

[Exit page]

JULIET:
[Aside]
Ay me! &c.

ROMEO:
[To her]
I will go.

[Exeunt.]

SCENE II. A street.

First Servant:
Here, sir.

First Servant:
Sir?
"""


def test_printed_play() -> None:
    """Catches marks left in the text, lost words, names that share a line, and directions that split a
    speech.
    """
    assert printed_play(PLAY) == PRINTED


def test_scenes_hold_spoken_words_alone() -> None:
    """Catches directions or names in the words, speeches joined across scenes, one speaker answering
    himself.
    """
    assert list(scenes(PLAY)) == [
        [
            ("ROMEO", "She speaks:\nO, speak again, 'bright angel'--\nWhat was that?"),
            ("JULIET", "Ay me! &c."),
            ("ROMEO", "I will go."),
        ],
        [("First Servant", "Here, sir.\nSir?")],
    ]


def test_windows_newlines_change_nothing() -> None:
    """Catches a parse that depends on how the file's lines end."""
    assert printed_play(PLAY.replace("\n", "\r\n")) == PRINTED


def test_words_without_a_name_stay_in_the_text_alone() -> None:
    """Catches a nameless song that is lost in print, or that becomes somebody's answer."""
    play = "## ACT I\n\n_Music_\n\nTake, O, take\n\n**A**\nYes.\n"
    assert printed_play(play) == "ACT I\n\n[Music]\n\nTake, O, take\n\nA:\nYes.\n"
    assert list(scenes(play)) == [[("A", "Yes.")]]


def test_every_kind_of_part_in_order() -> None:
    """Catches parts out of order, as when a direction is held back until after the next name."""
    kinds = [part.kind for part in parse(PLAY)]
    assert kinds == ["heading", "heading", "heading", "direction", "speech", "direction", "speech", "speech", "direction",
                     "heading", "speech", "speech"]  # fmt: skip
