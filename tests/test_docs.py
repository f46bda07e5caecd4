"""README.md and docs/: what they quote is what the program says and takes."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.overrides import flat, read_params

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def source() -> str:
    """Our Python, Makefile and .ci as one text; literals over several lines are joined."""
    files = [
        path for folder in ("stages", "kernels", ".ci") for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    text = "".join(path.read_text(encoding="utf-8") for path in [*files, ROOT / "Makefile"])
    return re.sub(r"""["'] *\n *f?["']""", "", text)


def quoted_messages() -> Iterator[str]:
    """What recovery.md quotes of our messages, in the first column of its tables."""
    page = (ROOT / "docs" / "recovery.md").read_text(encoding="utf-8")
    for row in page.partition("### Parameters")[2].splitlines():
        if row.startswith("| ") and not row.startswith("| message"):
            yield from re.findall(r"`([^`]+)`", row.split(" | ")[0])


# A message that was reworded is not found by the user who searches the page for it.
def test_quoted_messages_are_ours() -> None:
    text, quoted = source(), list(quoted_messages())
    assert len(quoted) > 30
    missing = [message for message in quoted for part in message.split("...") if part not in text]
    assert missing == []


# A command that names a module or a parameter of an earlier version ends in an error at a reader's first try.
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_name_what_there_is(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for module in re.findall(r"python -m ((?:stages|tests|docs)\.[a-z_.]+)", text):
        path = f"{module.replace('.', '/')}.py"
        assert (ROOT / path).is_file() or f"New file `{path}`" in text, module
    keys = flat(read_params(ROOT / "params.yaml"))
    for key in re.findall(r"-S '?\+?([a-z_.0-9]+)=", text):
        assert key in keys or (ROOT / "conf" / key).is_dir(), key


# A table of operations that lacks a new one, or links to files that have moved.
def test_the_table_of_operations_is_current() -> None:
    from docs.ops import page

    assert (ROOT / "docs" / "ops.md").read_text(encoding="utf-8") == page(), "run python -m docs.ops"


# A link to a page or file that is not there.
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", prose):
        assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"
