"""How the CPU's loops are compiled: two decorators over Numba, and a cache that a change of any source empties.

`jit` compiles a function that runs on the calling thread, `pjit` one whose `prange` loops run on all threads. With
NUMBA_DISABLE_JIT=1 both leave the function as it is, so that every line can be stepped through in a debugger.

Floating point: sums may be reordered and products contracted into fused multiply-adds (otherwise no sum vectorises), but
NaN and infinity keep their meaning. The order is fixed when the function is compiled, so results repeat bit for bit.
Arrays that a `pjit` function is given are taken not to overlap. An output may be one of the inputs only where each element is
read before it is written and never after, which the docstrings that allow it say.
Division follows NumPy (x / 0 is inf), since Python's check for zero would keep a loop from vectorising.
"""

import hashlib
import os
import sys
from pathlib import Path

import numba
from numba.core.caching import IndexDataCacheFile, UserProvidedCacheLocator
from numba.core.codegen import JITCodeLibrary

from kernels.user_cache import say_not_kept, user_cache

# Numba's own cache looks at the file of the function alone, not at the functions it calls in other files.
_ROOT = Path(__file__).resolve().parents[2]


def _sources_hash() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    for folder in ("kernels/cpu", "stages"):
        for path in sorted((_ROOT / folder).glob("*.py")):
            text = path.read_bytes()
            if b"cpu.jit" in text or path.parent.name == "cpu":
                digest.update(path.name.encode() + b"\0" + text)
    return digest.hexdigest()[:16]


class SharedCacheLocator(UserProvidedCacheLocator):  # type: ignore[misc]
    """Compiled functions by the hash of their sources alone, so that every checkout of the same code shares them."""

    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        """The folder's name, where Numba would add a hash of its path."""
        return Path(py_file).parent.name


numba.config.CACHE_LOCATOR_CLASSES = f"{__name__}.{SharedCacheLocator.__name__}"
_FOLDER = user_cache() / "numba" / _sources_hash()
try:
    _FOLDER.mkdir(parents=True, exist_ok=True)
    _UNWRITABLE = None if os.access(_FOLDER, os.W_OK) else "it cannot be written"
except OSError as error:
    _UNWRITABLE = error.strerror
if _UNWRITABLE:  # Numba would say so in the middle of an import
    sys.exit(
        f"error: {_FOLDER} is to keep compiled loops: {_UNWRITABLE}; set NANOEULER_CACHE to a folder that can be written"
    )
numba.config.CACHE_DIR = str(_FOLDER)
# OpenMP's first thread is the caller; of workqueue, where there is no OpenMP library, all have to be woken for each loop, now and
# then two of them on one core.
numba.config.THREADING_LAYER_PRIORITY = ["omp", "workqueue", "tbb"]

_save = IndexDataCacheFile.save


def _save_if_there_is_room(self: IndexDataCacheFile, key: object, data: object) -> None:
    """What Numba does with a compiled function, but for a full disk, which would end the run in the middle of a step."""
    try:
        _save(self, key, data)
    except OSError as error:
        say_not_kept(error.strerror or str(error))


IndexDataCacheFile.save = _save_if_there_is_room

_optimize_final_module = JITCodeLibrary._optimize_final_module


def _optimize_own_copy(self: JITCodeLibrary) -> None:
    """What Numba does when a function is linked, after the loops that it compiled apart have become the function's own.

    They come in as functions that another library may define as well, and are optimised once more. A process that has just
    compiled them would then run the first version, one that reads the cache the second, whose sums may have another order:
    the run that fills the cache would differ in its last bits from all later ones.
    """
    for function in self._final_module.functions:
        if not function.is_declaration and function.linkage.name == "linkonce_odr":
            function.linkage = "internal"
    _optimize_final_module(self)


JITCodeLibrary._optimize_final_module = _optimize_own_copy

_FASTMATH = {"reassoc", "contract", "nsz", "arcp"}

jit = numba.njit(cache=True, fastmath=_FASTMATH, error_model="numpy")
pjit = numba.njit(cache=True, fastmath=_FASTMATH, error_model="numpy", parallel=True)
