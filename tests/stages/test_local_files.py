"""Local files by globs: each real file once, in a fixed order, and what is no file is named."""

import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from stages.sources.corpus import Source
from stages.sources.local_files import display_name, find_files
from stages.sources.records import open_source, read_source


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(*names: str) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name, encoding="utf-8", newline="\n")


def found(*patterns: str) -> list[str]:
    return [path.as_posix() for path in find_files(patterns)]


# A glob that matches other files than before, or in another order, gives another corpus.
@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["t/**/*"], ["t/a.txt", "t/b.md", "t/d/c.txt", "t/d/e/f.txt"]),
        (["t/*"], ["t/a.txt", "t/b.md"]),
        (["t/**/*.txt"], ["t/a.txt", "t/d/c.txt", "t/d/e/f.txt"]),
        (["t/*/*.txt"], ["t/d/c.txt"]),
        (["t/**"], ["t/a.txt", "t/b.md", "t/d/c.txt", "t/d/e/f.txt"]),
        (["**/[cf].txt"], ["t/d/c.txt", "t/d/e/f.txt"]),
        (["t/?.md", "t/a.txt", "t/*.md"], ["t/a.txt", "t/b.md"]),
        (["t/.h*/*"], ["t/.hidden/g.txt"]),
    ],
)
def test_globs(patterns: list[str], names: list[str]) -> None:
    make("t/b.md", "t/a.txt", "t/d/c.txt", "t/d/e/f.txt", "t/.hidden/g.txt", "t/.DS_Store")
    assert found(*patterns) == names
    absolute = [str(Path(pattern).absolute()) for pattern in patterns]
    assert found(*absolute) == [Path(name).absolute().as_posix() for name in names]


# A loop of links gave one file 40 times; two loops would be walked 2^40 times.
def test_loops_of_links_give_each_file_once() -> None:
    make("t/a.txt", "t/d/b.txt")
    for name, target in (("t/loop", "."), ("t/again", "."), ("t/d/up", ".."), ("t/side", "d")):
        Path(name).symlink_to(target, target_is_directory=True)
    assert found("t/**/*") == ["t/a.txt", "t/d/b.txt"]


# The same text twice is trained on twice.
def test_links_to_one_file_give_it_once() -> None:
    make("t/z.txt", "away.txt")
    Path("t/a.txt").symlink_to("z.txt")
    for name in ("t/c.txt", "t/b.txt"):
        Path(name).symlink_to("../away.txt")
    assert found("t/*", "t/**/*") == ["t/b.txt", "t/z.txt"]


# DVC does not hash a folder that is a link: a change there would leave the old text in place, as up to date.
def test_a_link_to_a_folder_elsewhere_is_named() -> None:
    make("t/a.txt", "away/b.txt")
    Path("t/novels").symlink_to("../away", target_is_directory=True)
    with pytest.raises(ValueError, match=r"^t/novels: a link to the folder .*away: DVC does not follow it"):
        find_files(["t/**/*"])
    assert found("t/*.txt") == ["t/a.txt"]
    Path("all").symlink_to(
        "away", target_is_directory=True
    )  # where the watched folder itself is the link, DVC follows it
    assert found("all/**/*") == ["all/b.txt"]


# Opening a pipe waits for ever; a broken link that is skipped is a text that nobody misses until the model is
# trained.
@pytest.mark.parametrize("kind", ["pipe", "socket", "broken link", "link to itself", "link to a device"])
def test_what_is_no_file_is_named(kind: str) -> None:
    make("t/a.txt")
    if kind == "pipe":
        os.mkfifo("t/b.txt")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind("t/b.txt")
    else:
        Path("t/b.txt").symlink_to(
            {"broken link": "gone", "link to itself": "b.txt", "link to a device": "/dev/null"}[kind]
        )
    reason = (
        "cannot be read: "
        if "link" in kind and "device" not in kind
        else "a pipe, socket or device, not a file; remove it"
    )
    for pattern in ("t/**/*", "t/b.txt", "t/[b].*"):
        with pytest.raises(ValueError, match=f"^t/b.txt: {reason}"):
            find_files([pattern])


def test_nothing_found_is_named() -> None:
    """Would catch a mistyped name that trains on less text, and a folder's name that gives nothing."""
    make("t/a.txt")
    Path("empty").mkdir()
    for pattern in ("x.txt", "x/*.txt", "t/*.md", "empty/**/*"):
        with pytest.raises(
            ValueError, match=f"^files: {re.escape(pattern)}: no such file; paths are relative to"
        ):
            find_files(["t/a.txt", pattern])
    with pytest.raises(ValueError, match=r"^files: t is a folder; write t/\*\*/\* for all that is in it"):
        find_files(["t"])


# A name of other bytes than UTF-8 ended as a codec's error in the middle of the output.
def test_names_that_are_not_utf8_are_written_with_replacements(capsys: pytest.CaptureFixture[str]) -> None:
    Path("t").mkdir()
    names = [os.fsdecode(b"t/caf" + byte + b".txt") for byte in (b"\xe9", b"\xe8")]
    try:
        for name in names:
            Path(name).write_text(f"text of {len(name)}", encoding="utf-8", newline="\n")
    except OSError:
        pytest.skip("this file system takes UTF-8 names alone")
    source = Source("local", files=("t/*",))
    opened = open_source(source, ("text",))
    assert [document.name for document in read_source(source, opened.records)] == ["t/caf\ufffd.txt"] * 2
    facts: Any = opened.facts["files"]
    assert [file["name"] for file in facts] == ["t/caf\ufffd.txt"] * 2
    assert (
        capsys.readouterr().err.count(
            "note: t/caf\ufffd.txt: the name is not UTF-8, so DVC cannot hash its folder"
        )
        == 2
    )
    Path(names[0]).write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"caf\ufffd[.]txt: not UTF-8 at byte 0"):
        list(read_source(source, open_source(source, ("text",)).records))
    print(display_name(names[0]))
    assert capsys.readouterr().out == "t/caf\ufffd.txt\n"
