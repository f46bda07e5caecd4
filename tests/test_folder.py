"""The folder that a checkout lives in: moved, without git, or under a path that DVC cannot write."""

import os
import subprocess
import sys
import venv
from pathlib import Path
from shutil import copy, which

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str | Path, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, encoding="utf-8", check=False
    )


# After `mv` of a checkout every program in .venv/bin named an interpreter that is gone, by either of pip's
# two openings.
def test_programs_of_a_moved_folder_start_again(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new place"
    venv.create(old / ".venv")
    python = old / ".venv" / "bin" / "python"
    plain, long = old / ".venv" / "bin" / "plain", old / ".venv" / "bin" / "long"
    plain.write_text(f"#!{python}\nprint('plain')\n", encoding="utf-8", newline="\n")
    long.write_text(
        f"#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\nprint('long')\n",
        encoding="utf-8",
        newline="\n",
    )
    other = old / ".venv" / "bin" / "other"
    other.write_text("#!/bin/sh\necho other\n", encoding="utf-8", newline="\n")
    for path in (plain, long, other):
        path.chmod(0o755)
    old.rename(new)
    programs = new / ".venv" / "bin"
    for _ in range(2):  # the second time there is nothing to do
        assert run(programs / "python", ROOT / ".ci" / "venv_moved.py", cwd=new).returncode == 0
        assert [run(programs / name, cwd=new).stdout for name in ("plain", "long", "other")] == [
            "plain\n",
            "long\n",
            "other\n",
        ]
    assert run(programs / "python", ROOT / ".ci" / "venv_moved.py", cwd=new).stderr == ""


# DVC ends with a codec's error, or hangs, where it copies a checkout whose path is not ASCII.
@pytest.mark.parametrize(("folder", "refused"), [("frisch \u00f6", True), ("plain", False)])
@pytest.mark.parametrize("option", ["--temp", "--queue", "--run-all"])
def test_copies_under_a_path_beyond_ascii_are_refused(
    tmp_path: Path, folder: str, option: str, refused: bool
) -> None:
    (tmp_path / folder).mkdir()
    start = f"import runpy; runpy.run_path({str(ROOT / '.ci' / 'venv_start.py')!r}); print('started')"
    done = run(sys.executable, "-c", start, "exp", "run", option, cwd=tmp_path / folder)
    if refused:
        assert done.returncode == 1 and done.stderr.startswith(f"error: {option}: DVC cannot do this in ")
        assert done.stdout == "" and done.stderr.count("\n") == 1
    else:
        assert done.stdout == "started\n"


# A workspace run works under such a path, and so does every other program of .venv.
def test_other_programs_start_under_a_path_beyond_ascii(tmp_path: Path) -> None:
    folder = tmp_path / "\u00f6"
    folder.mkdir()
    start = f"import runpy; runpy.run_path({str(ROOT / '.ci' / 'venv_start.py')!r}); print('started')"
    for arguments in (["exp", "run"], ["repro"], ["queue", "start"]):
        assert run(sys.executable, "-c", start, *arguments, cwd=folder).stdout == "started\n"


# Unpacked from an archive, the folder is no git repository: DVC says that, but not what to do, and after an
# installation.
@pytest.mark.skipif(which("make") is None, reason="needs make")
def test_a_folder_without_git_is_told_what_to_do(tmp_path: Path) -> None:
    copy(ROOT / "Makefile", tmp_path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "repro"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "git init && git add . && git commit -m start" in done.stderr
    assert not (tmp_path / ".venv").exists()
