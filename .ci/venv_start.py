"""Runs whenever .venv's interpreter starts: `make` copies it there as nanoeuler_start, and a .pth file
imports it.

dvc.yaml says `python -m stages.NAME`, and DVC gives that line to a shell. So `python` has to be .venv's,
without activation, for `.venv/bin/dvc repro`, for `exp run --temp` and for the workers that `queue start`
leaves behind.
"""

import os
import sys

os.environ["PATH"] = os.path.join(sys.prefix, "bin") + os.pathsep + os.environ.get("PATH", os.defpath)

# DVC writes the path of the checkout as ASCII into the copies that these options make, and fails late and
# unclearly.
APART = {"--temp", "--queue", "--run-all"}

if "exp" in sys.orig_argv and APART.intersection(sys.orig_argv) and not os.getcwd().isascii():
    option, folder = min(APART.intersection(sys.orig_argv)), ascii(os.getcwd())
    print(f"error: {option}: DVC cannot do this in {folder}, whose path is not ASCII; move the checkout to a "
          "path of ASCII "
          f"letters, or run without {option}", file=sys.stderr)  # fmt: skip
    os._exit(1)
