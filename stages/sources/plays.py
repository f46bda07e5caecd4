"""Markdown of a play -> the text of a printed play, and its speeches.

The Markdown: `#` headings (title, acts, scenes); a speaker in bold on a line of his own, his words below him; stage
directions emphasised (`_Exit_`, `*Exit.*`), alone in a paragraph or among the words; two spaces at a verse line's end.

The printed text, as in the Shakespeare file that small models are usually trained on:

    SCENE II. A camp near Forres.

    [Exit Sergeant]

    ROSS:
    God save the king!

One blank line stands between a heading, a direction and a speech, none within a speech. Headings and directions are
kept, since they are part of a printed play; directions stand in brackets, so that they aren't taken for spoken words. A
direction after which the same speaker goes on without a new name is a line of his speech.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_SPEAKER = re.compile(r"\*\*(.+)\*\*")
# One emphasised span: it opens at a word's start with one or two marks and runs to the next mark that ends a word. Some
# directions of the source lack the opening mark and have the brackets alone.
_EMPHASIS = re.compile(r"(?<!\w)(?:_{1,2}(?=\S)|\*(?=\S)|(?=\[))(.+?)(?<=\S)[_*]+(?!\w)", re.DOTALL)
_DIRECTION = re.compile(r"\[[^\[\]]*\]")
_ESCAPE = re.compile(r"\\([^\w\s])")


@dataclass(frozen=True)
class Part:
    """One part of a printed play: a heading, a direction or a speech, whose lines may hold directions in brackets."""

    kind: str
    lines: tuple[str, ...]
    speaker: str = ""


def _bracketed(emphasis: re.Match[str]) -> str:
    inner = " ".join(_ESCAPE.sub(r"\1", emphasis[1]).replace("_", "").replace("*", "").split()).strip("[] ")
    return f"[{inner}]" if inner else ""  # empty where the source marks words that are lost


def _clean(paragraph: str) -> list[str]:
    """Lines of a paragraph without Markdown's marks, directions in brackets."""
    text = _ESCAPE.sub(r"\1", _EMPHASIS.sub(_bracketed, paragraph)).replace("& c.", "&c.")
    return [" ".join(line.split()) for line in text.split("\n")] if text else []


def parse(markdown: str) -> Iterator[Part]:
    """Headings, directions and speeches of a play in order."""
    speaker: str = ""
    lines: list[str] = []  # of the open speech
    directions: list[str] = []  # after its last words so far
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
    """Text of the printed play, one trailing newline."""
    parts = []
    for part in parse(markdown):
        name = [f"{part.speaker}:"] if part.speaker else []
        parts.append("\n".join([*name, *part.lines]))
    return "\n\n".join(parts) + "\n"


def scenes(markdown: str) -> Iterator[list[tuple[str, str]]]:
    """Scenes of a play, each a list of (speaker, words).

    Directions and words without a speaker's name are left out; neighbouring speeches of one speaker are joined.
    """
    scene: list[tuple[str, str]] = []
    for part in parse(markdown):
        if part.kind == "heading" and scene:
            yield scene
            scene = []
        if not part.speaker:
            continue
        spoken = (" ".join(_DIRECTION.sub(" ", line).split()) for line in part.lines)
        words = "\n".join(line for line in spoken if line)
        if words and scene and scene[-1][0] == part.speaker:
            scene[-1] = (part.speaker, scene[-1][1] + "\n" + words)
        elif words:
            scene.append((part.speaker, words))
    if scene:
        yield scene
