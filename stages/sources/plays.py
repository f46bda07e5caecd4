"""Converts Markdown of a play to the text of a printed play, and to speeches.

The Markdown has `#` headings (title, acts, scenes). A speaker's name is in bold on its own line, with the
speech below. Stage directions are emphasised (`_Exit_`, `*Exit.*`), in a paragraph of their own or within a
speech. A verse line ends with two spaces.

The printed text has the layout of the Shakespeare file that small models are usually trained on:

    SCENE II. A camp near Forres.

    [Exit Sergeant]

    ROSS:
    God save the king!

One blank line separates headings, directions and speeches; a speech has none inside. Directions are in
brackets, which marks them as not spoken. If the same speaker continues after a direction without a new name,
the direction is a line of the speech.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_SPEAKER = re.compile(r"\*\*(.+)\*\*")
# One emphasised span: from one or two marks at the start of a word to the next mark at the end of a word.
# Some directions of the source lack the opening mark and have only the brackets.
_EMPHASIS = re.compile(r"(?<!\w)(?:_{1,2}(?=\S)|\*(?=\S)|(?=\[))(.+?)(?<=\S)[_*]+(?!\w)", re.DOTALL)
_DIRECTION = re.compile(r"\[[^\[\]]*\]")
_ESCAPE = re.compile(r"\\([^\w\s])")


@dataclass(frozen=True)
class Part:
    """One part of a printed play: a heading, a direction or a speech. A speech's lines may hold directions in
    brackets.
    """

    kind: str
    lines: tuple[str, ...]
    speaker: str = ""


def _bracketed(emphasis: re.Match[str]) -> str:
    inner = " ".join(_ESCAPE.sub(r"\1", emphasis[1]).replace("_", "").replace("*", "").split()).strip("[] ")
    return f"[{inner}]" if inner else ""  # empty if the source marks lost words


def _clean(paragraph: str) -> list[str]:
    """Lines of a paragraph without Markdown marks, with directions in brackets."""
    text = _ESCAPE.sub(r"\1", _EMPHASIS.sub(_bracketed, paragraph)).replace("& c.", "&c.")
    return [" ".join(line.split()) for line in text.split("\n")] if text else []


def parse(markdown: str) -> Iterator[Part]:
    """Headings, directions and speeches of a play in order."""
    speaker: str = ""
    lines: list[str] = []  # of the current speech
    directions: list[str] = []  # since the last spoken line
    for paragraph in re.split(r"\n\s*\n", markdown.replace("\r\n", "\n").strip()):
        first, _, rest = paragraph.strip().partition("\n")
        name = _SPEAKER.fullmatch(first.strip())
        if name or first.startswith("#") or not (speaker or lines):
            yield from _closed(speaker, lines, directions)
            speaker, lines, directions = "", [], []
        if name:
            speaker, lines = name[1].strip(), _clean(rest)
        elif first.startswith("#"):
            yield Part("heading", (" ".join(_clean(paragraph.strip().lstrip("# "))),))
        elif _DIRECTION.fullmatch("".join(cleaned := _clean(paragraph.strip()))):
            directions += cleaned
        else:
            lines += [*directions, *cleaned]
            directions = []
    yield from _closed(speaker, lines, directions)


def _closed(speaker: str, lines: list[str], directions: list[str]) -> Iterator[Part]:
    if lines:
        yield Part("speech", tuple(lines), speaker)
    for direction in directions:
        yield Part("direction", (direction,))


def printed_play(markdown: str) -> str:
    """Text of the printed play, with one trailing newline."""
    parts = []
    for part in parse(markdown):
        name = [f"{part.speaker}:"] if part.speaker else []
        parts.append("\n".join([*name, *part.lines]))
    return "\n\n".join(parts) + "\n"


def scenes(markdown: str) -> Iterator[list[tuple[str, str]]]:
    """Scenes of a play, each a list of pairs (speaker, speech).

    Directions and text without a speaker are left out. Neighbouring speeches of one speaker are joined.
    """
    scene: list[tuple[str, str]] = []
    for part in parse(markdown):
        if part.kind == "heading" and scene:
            yield scene
            scene = []
        if not part.speaker:
            continue
        spoken = (" ".join(_DIRECTION.sub(" ", line).split()) for line in part.lines)
        speech = "\n".join(line for line in spoken if line)
        if speech and scene and scene[-1][0] == part.speaker:
            scene[-1] = (part.speaker, scene[-1][1] + "\n" + speech)
        elif speech:
            scene.append((part.speaker, speech))
    if scene:
        yield scene
