"""A copy of the repository in its own git repository, with tiny texts and settings, in which DVC runs as for
a user.
"""

import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from shutil import copy

from stages import trained_stages
from stages.trained_stages import TRAINED_STAGES

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
STAGES = list(trained_stages.STAGES)
# Appended to conf/config.yaml: these values win over the groups, and overrides win over them.
TINY = """
train_bpe: {vocab_size: 300}
model: {layers: 1, heads: 2, kv_heads: 1, dim: 16, ffn: 16, context: 32, mtp_heads: 2}
pretrain: {steps: 4, micro_batch: 2, warmup_steps: 1, val_every: 2, sample_every: 4, checkpoint_every: 2}
eval: {max_tokens: 4, micro_batch: 4}
""" + "".join(
    f"{stage.name}: "
    f"{{steps: 3, micro_batch: 2, warmup_steps: 1, val_every: 3, sample_every: 3, checkpoint_every: 3}}\n"
    for stage in TRAINED_STAGES[1:]
)


class Copy:
    """A copy that was made; DVC and the stages are called as by a user who never activated the
    environment.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        # .venv's interpreter finds its own `python` without activation (see the Makefile); another one is
        # given it.
        unactivated = Path(sysconfig.get_path("purelib"), "nanoeuler_path.pth").exists()
        path = os.defpath if unactivated else f"{BIN}{os.pathsep}{os.defpath}"
        kept = {
            name: os.environ[name] for name in ("HOME", "SYSTEMROOT", "NANOEULER_CACHE") if name in os.environ
        }
        self.environment = {**kept, "PATH": path, "DVC_NO_ANALYTICS": "1"}

    def _start(self, *command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command, cwd=self.root, env=self.environment, capture_output=True, text=True, encoding="utf-8"
        )

    def run(self, *command: str) -> str:
        """The output of a command that succeeds."""
        done = self._start(*command)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout

    def fail(self, *command: str) -> str:
        """What a command that fails says on standard error."""
        done = self._start(*command)
        assert done.returncode != 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        return done.stderr

    def dvc(self, *arguments: str) -> str:
        """The output of a dvc command that succeeds."""
        return self.run(str(BIN / "dvc"), *arguments)

    def git(self, *arguments: str) -> str:
        """The output of a git command that succeeds."""
        return self.run("git", *arguments)


def heed_ctrl_c() -> None:
    """Lets SIGINT reach what is started from here: a shell's background jobs ignore it, and so does what they
    start.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


def write(path: Path, text: str) -> None:
    """Writes a text file, and the folders that lead to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")


def make_copy(root: Path, defaults: str, *, lines: int = 300, talks: int = 200) -> Copy:
    """Copies what git knows or would add, but for tests and results, and makes texts for corpus=local.

    Args:
        root: an empty folder.
        defaults: YAML, put at the end of conf/config.yaml.
        lines: of the text.
        talks: conversations.
    """
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=True
    ).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file() and not name.startswith(("tests/", "data/", "dvc.lock")):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            copy(ROOT / name, root / name)
    text = [
        f"Line {number}: the quick brown fox says {number * number} to the lazy dog.\n"
        for number in range(lines)
    ]
    write(root / "texts" / "fox.txt", "".join(text))
    rows = [{"prompt": f"Say {number}.", "completion": f"{number}!"} for number in range(talks)]
    write(root / "conversations" / "talk.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    config = root / "conf" / "config.yaml"
    write(config, config.read_text(encoding="utf-8").replace(": shakespeare", ": local") + defaults)
    copied = Copy(root)
    copied.run(sys.executable, "-m", "stages.params", "--write")
    copied.git("init", "--quiet")
    copied.git("config", "user.name", "test")
    copied.git("config", "user.email", "test@example.org")
    copied.git("add", ".")
    copied.git("commit", "--quiet", "-m", "tiny")
    return copied
