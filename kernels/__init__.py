"""The engine: a transformer trained by hand-written operations."""

import os

# How often OpenMP's threads look for the next loop before they sleep. By default they look for some milliseconds, which another
# program on the same cores turns into a standstill; so few cost nothing even where there is none (NOTES.md). Read when the
# first loop runs.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
