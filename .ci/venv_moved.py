"""Gives the programs in .venv/bin their interpreter's new path after the folder was moved; `make` runs it
before each target.
"""

import re
import sys
from pathlib import Path

BIN = Path(sys.prefix, "bin")
# The two first lines that pip writes: a plain path, or a shell that starts a path too long or with a space in
# it.
SCRIPT = re.compile(
    rb"""#!(/[^\n]*/python[\d.]*)\n|#!/bin/sh\n'''exec' "?(/[^"\n]*?)"? "\$0" "\$@"\n' '''\n"""
)

moved = 0
for path in BIN.iterdir():
    text = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
    found = SCRIPT.match(text)
    if found and Path((found[1] or found[2]).decode()).parent.resolve() != BIN.resolve():
        opening = f"""#!/bin/sh\n'''exec' "{BIN / "python"}" "$0" "$@"\n' '''\n"""
        path.write_bytes(opening.encode() + text[found.end() :])
        moved += 1
if moved:
    print(f"this folder was moved: {moved} programs in {BIN} name their interpreter anew", file=sys.stderr)
