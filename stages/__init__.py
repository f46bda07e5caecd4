"""The pipeline's stages and commands, each a program: `python -m stages.NAME`."""

import os
import signal
import sys
from types import FrameType


def _leave(number: int, frame: FrameType | None) -> None:
    """Ends a program that is still importing its modules: Ctrl-C there would be a traceback of some
    library.
    """
    os.write(2, b"interrupted\n")
    os._exit(130)


if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave)  # until stages.program takes over
