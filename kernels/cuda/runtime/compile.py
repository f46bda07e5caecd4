"""Compiles a .cu file to machine code with NVRTC.

That needs two wheels, but no GPU, driver, CuPy or CUDA toolkit. Each kernel instance (one choice of template
arguments) is compiled separately and kept in the user's cache folder. Its key is a hash of the .cu file, its
headers, the instance, the options, the architecture and the compiler's version.
"""

import ctypes
import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from cuda.pathfinder import find_nvidia_header_directory, load_nvidia_dynamic_lib

from kernels.user_cache import say_not_kept, user_cache

FOLDER = Path(__file__).parent.parent  # kernels/cuda
INCLUDE = FOLDER / "include"
# -default-device: helper functions need no __device__. --no-cache: code from NVRTC's own cache comes without
# ptxas' report of registers and spills.
OPTIONS = ("--std=c++17", "-default-device", "-lineinfo", "--ptxas-options=-v", "--no-cache")
INSTALL = "python -m pip install nvidia-cuda-nvrtc nvidia-cuda-runtime, both of CUDA 13.0"


@dataclass(frozen=True)
class Compiled:
    """Machine code of one kernel instance.

    Args:
        symbol: name of the kernel in the code.
        cubin: the code.
        registers: registers per thread.
        spill_bytes: stores and loads of spilled registers.
        warnings: warnings of ptxas, e.g. about serialization.
    """

    symbol: str
    cubin: bytes
    registers: int
    spill_bytes: int
    warnings: tuple[str, ...]


def compile_instance(source: str, instance: str, arch: str) -> Compiled:
    """Compile one instance of a kernel, or load it from the cache.

    Args:
        source: path of a .cu file in kernels/cuda, "rmsnorm.cu".
        instance: the kernel with its template arguments, "rmsnorm_forward<float>".
        arch: "sm_80", "sm_90a", ...

    Raises:
        ValueError: NVRTC or the CUDA headers are missing, or the code does not compile. The message has the
            log.
    """
    options = (*OPTIONS, f"-arch={arch}")
    digest = hashlib.sha256(
        "\0".join((sources(source), instance, *options, str(_version()))).encode()
    ).hexdigest()[:32]
    code, notes = (user_cache() / "cuda" / f"{digest}.{suffix}" for suffix in ("cubin", "json"))
    if code.is_file() and notes.is_file():
        fields = json.loads(notes.read_text(encoding="utf-8"))
        return Compiled(cubin=code.read_bytes(), **{**fields, "warnings": tuple(fields["warnings"])})
    compiled = _compile(source, instance, options)
    fields = {name: value for name, value in asdict(compiled).items() if name != "cubin"}
    try:
        code.parent.mkdir(parents=True, exist_ok=True)
        for path, content in ((code, compiled.cubin), (notes, json.dumps(fields).encode())):
            _write(path, content)
    except OSError as error:
        say_not_kept(error.strerror or str(error))
    return compiled


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically. Several processes may write the same file."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@cache
def sources(source: str) -> str:
    """The text of every header that the file includes, directly or not, then the text of the file."""
    found: dict[Path, str] = {}

    def read(path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r'^#include "([^"]+)"', text, re.MULTILINE):
            header = next(folder / name for folder in (path.parent, INCLUDE) if (folder / name).is_file())
            if header not in found:
                read(header)
        found[path] = text

    read(FOLDER / source)
    return "\n".join(found.values())


@cache
def _nvrtc() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(load_nvidia_dynamic_lib("nvrtc").abs_path))
    except Exception as error:  # pathfinder raises many types
        raise ValueError(f"CUDA: the compiler library NVRTC was not found ({error}); {INSTALL}") from None


@cache
def _version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return major.value, minor.value


@cache
def _headers() -> str:
    folder = find_nvidia_header_directory("cudart")
    if folder is None:
        raise ValueError(f"CUDA: the headers (cuda_bf16.h) were not found; {INSTALL}")
    return str(folder)


def _check(status: int, call: str) -> None:
    if status:
        raise ValueError(f"CUDA: {call} failed with NVRTC status {status}")


def _compile(source: str, instance: str, options: tuple[str, ...]) -> Compiled:
    nvrtc, program, name, path = _nvrtc(), ctypes.c_void_p(), instance.encode(), FOLDER / source
    text = path.read_bytes()
    _check(
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, source.encode(), 0, None, None),
        "nvrtcCreateProgram",
    )
    try:
        _check(nvrtc.nvrtcAddNameExpression(program, name), "nvrtcAddNameExpression")
        flags = [
            option.encode()
            for option in (*options, *(f"-I{folder}" for folder in (path.parent, INCLUDE, _headers())))
        ]
        status = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
        log = _output(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if status:
            raise ValueError(
                f"CUDA: {source} does not compile as {instance} with {' '.join(options)}:\n{log}"
            )
        symbol = ctypes.c_char_p()
        _check(nvrtc.nvrtcGetLoweredName(program, name, ctypes.byref(symbol)), "nvrtcGetLoweredName")
        assert symbol.value is not None
        # The log also reports the file's kernels that are not templates. So only this instance's report is
        # read. Warnings may come before it.
        own = log.partition(f"Compiling entry function '{symbol.value.decode()}'")[2].partition(
            "Compiling entry function"
        )[0]
        spills = [int(number) for number in re.findall(r"(\d+) bytes spill", own)]
        registers = [int(number) for number in re.findall(r"Used (\d+) registers", own)]
        warnings = tuple(
            line for line in log.splitlines() if "warning" in line.lower() or "Performance Loss" in line
        )
        return Compiled(
            symbol.value.decode(), _output(program, "CUBIN"), max(registers), sum(spills), warnings
        )
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _output(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(_nvrtc(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"nvrtcGet{what}Size")
    content = ctypes.create_string_buffer(size.value)
    _check(getattr(_nvrtc(), f"nvrtcGet{what}")(program, content), f"nvrtcGet{what}")
    return content.raw
