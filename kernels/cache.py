"""Where compiled kernels, timed choices and fetched files are kept between runs: the user's cache folder."""

import os
from pathlib import Path

import platformdirs


def user_cache() -> Path:
    """The folder of this project in the user's cache, e.g. ~/.cache/nanoeuler; the variable NANOEULER_CACHE moves it."""
    return Path(os.environ.get("NANOEULER_CACHE") or platformdirs.user_cache_path("nanoeuler", appauthor=False))
