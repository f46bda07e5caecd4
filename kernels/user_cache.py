"""The user's cache folder. It keeps compiled kernels, timed choices and fetched files between runs."""

import os
import sys
from functools import cache
from pathlib import Path

import platformdirs


def user_cache() -> Path:
    """This project's cache folder, e.g. ~/.cache/nanoeuler. The variable NANOEULER_CACHE changes it."""
    return Path(
        os.environ.get("NANOEULER_CACHE") or platformdirs.user_cache_path("nanoeuler", appauthor=False)
    )


@cache
def say_not_kept(reason: str) -> None:
    """Print once per reason that the folder cannot store compiled code. This run still uses the code."""
    print(
        f"note: {user_cache()} cannot store compiled code: {reason}; the next run compiles it again; "
        "free some space there or set NANOEULER_CACHE to another folder",
        file=sys.stderr,
    )
