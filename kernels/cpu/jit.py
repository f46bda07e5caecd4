"""How the CPU's loops are compiled: two decorators over Numba, and a cache keyed by the sources' hash.

`jit` compiles a function that runs on the calling thread. `pjit` compiles one whose `prange` loops run on all
threads. With NUMBA_DISABLE_JIT=1 both return the Python function, and a debugger can step through every line.

Floating point: the compiler may reorder sums and contract products into fused multiply-adds; otherwise no sum
vectorises. NaN and infinity keep their meaning. The compiler fixes the order of each sum, so results repeat
bit for bit.

Aliasing: the compiler assumes that the arrays of a `pjit` call do not overlap. An output may be one of the
inputs only if each element is read before it is written, and never after. The docstrings say where that is
allowed.

Division follows NumPy (x / 0 is inf). Python's check for zero would keep a loop from vectorising.
"""

import hashlib
import os
import sys
from pathlib import Path

import numba
from numba.core.caching import IndexDataCacheFile, UserProvidedCacheLocator
from numba.core.codegen import JITCodeLibrary

from kernels.user_cache import say_not_kept, user_cache

# Numba's own cache tracks only the function's file, not the files of the functions it calls. So we hash all
# sources.
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
    """A cache keyed by the hash of the sources alone: all checkouts of the same code share it."""

    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        """The name of the source's folder. (Numba would add a hash of its path.)"""
        return Path(py_file).parent.name


numba.config.CACHE_LOCATOR_CLASSES = f"{__name__}.{SharedCacheLocator.__name__}"
_FOLDER = user_cache() / "numba" / _sources_hash()
try:
    _FOLDER.mkdir(parents=True, exist_ok=True)
    _UNWRITABLE = None if os.access(_FOLDER, os.W_OK) else "it cannot be written"
except OSError as error:
    _UNWRITABLE = error.strerror
if _UNWRITABLE:  # Numba itself would fail in the middle of an import, without naming NANOEULER_CACHE
    sys.exit(
        f"error: {_FOLDER}, the cache of compiled loops: {_UNWRITABLE}; "
        "set NANOEULER_CACHE to a writable folder"
    )
numba.config.CACHE_DIR = str(_FOLDER)
# With OpenMP the calling thread is one of the workers. workqueue, for machines without an OpenMP library,
# must wake all its threads for each loop, at times two of them on one core.
numba.config.THREADING_LAYER_PRIORITY = ["omp", "workqueue", "tbb"]

_save = IndexDataCacheFile.save


def _save_if_there_is_room(self: IndexDataCacheFile, key: object, data: object) -> None:
    """Numba's save, but a full disk is reported, and the run goes on. Numba would end it in mid-step."""
    try:
        _save(self, key, data)
    except OSError as error:
        say_not_kept(error.strerror or str(error))


IndexDataCacheFile.save = _save_if_there_is_room

_optimize_final_module = JITCodeLibrary._optimize_final_module


def _optimize_own_copy(self: JITCodeLibrary) -> None:
    """Numba's final optimisation of a linked function, with its parallel loops made internal to it first.

    Numba compiles the loops separately and links them with linkage linkonce_odr: another library may define
    them too. The final pass optimises them a second time. The process that compiled them would still run the
    first version. A process that reads the cache would run the second version, and its sums may have another
    order. So the run that fills the cache would differ in its last bits from all later runs.
    """
    for function in self._final_module.functions:
        if not function.is_declaration and function.linkage.name == "linkonce_odr":
            function.linkage = "internal"
    _optimize_final_module(self)


JITCodeLibrary._optimize_final_module = _optimize_own_copy

_FASTMATH = {"reassoc", "contract", "nsz", "arcp"}

jit = numba.njit(cache=True, fastmath=_FASTMATH, error_model="numpy")
pjit = numba.njit(cache=True, fastmath=_FASTMATH, error_model="numpy", parallel=True)
