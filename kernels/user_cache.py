"""Where compiled kernels, timed choices and fetched files are kept between runs: the user's cache folder."""

import os
import sys
from functools import cache
from pathlib import Path

import platformdirs


def user_cache() -> Path:
    """The folder of this project in the user's cache, e.g. ~/.cache/nanoeuler; the variable NANOEULER_CACHE moves it."""
    return Path(
        os.environ.get("NANOEULER_CACHE") or platformdirs.user_cache_path("nanoeuler", appauthor=False)
    )


@cache
def say_not_kept(reason: str) -> None:
    """Says, once a reason, that the folder takes nothing more. What was made is used, and made anew by the next run."""
    print(
        f"note: {user_cache()} cannot keep what was compiled: {reason}; the next run compiles it again; make room there or set "
        "NANOEULER_CACHE to another folder",
        file=sys.stderr,
    )
