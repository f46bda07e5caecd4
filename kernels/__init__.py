"""The engine: a transformer trained by hand-written operations."""

import os

# How often OpenMP's threads poll for the next loop before they sleep. By default they poll for some
# milliseconds. If another program runs on the same cores, that stalls both. A lower number costs nothing,
# even without another program. OpenMP reads the variable when the first loop runs.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
