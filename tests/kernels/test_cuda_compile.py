"""Every instance of every CUDA kernel compiles, without a GPU, and within the registers on record.

registers.json beside this file holds each instance's registers a thread, by architecture, and the compiler's
version. To record what the sources now need: PYTHONPATH=. python tests/kernels/test_cuda_compile.py
"""

import json
import os
import pkgutil
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kernels.cuda.runtime.compile import Compiled
    from kernels.cuda.runtime.launch import Kernel

pytest.importorskip("cupy", reason="CuPy is not installed")

RECORD = Path(__file__).parent / "registers.json"
ARCHITECTURES, HOPPER = ("sm_80", "sm_89", "sm_90"), ("sm_90a",)
Compilation = dict[str, dict[str, "Future[Compiled]"]]


def version() -> str:
    """The compiler's; the test is skipped where it is not installed."""
    from kernels.cuda.runtime import compile as compiler

    try:
        return ".".join(map(str, compiler._version()))
    except ValueError as error:
        pytest.skip(str(error))


@cache
def kernels() -> dict[str, "Kernel"]:
    """Every Kernel of every module of kernels.cuda, by source and name."""
    import kernels.cuda
    from kernels.cuda.runtime.launch import Kernel

    found = {}
    for module in pkgutil.walk_packages(kernels.cuda.__path__, "kernels.cuda."):
        for value in vars(import_module(module.name)).values():
            for kernel in (
                value
                if isinstance(value, tuple | list)
                else value.values()
                if isinstance(value, dict)
                else (value,)
            ):
                if isinstance(kernel, Kernel):
                    found[f"{kernel.source} {kernel.name}"] = kernel
    return found


@cache
def compilation() -> Compilation:
    """Every instance by architecture, being compiled on all cores."""
    from kernels.cuda.runtime.compile import compile_instance

    # Processes: of threads NVRTC lets one compile at a time, and fails at times where several begin.
    pool = ProcessPoolExecutor(os.cpu_count(), get_context("spawn"))
    return {
        f"{kernel.source} {kernel.expression(template)}": {
            arch: pool.submit(compile_instance, kernel.source, kernel.expression(template), arch)
            for arch in (HOPPER if kernel.hopper else ARCHITECTURES)
        }
        for kernel in kernels().values()
        for template in kernel.instances
    }


def instances(source: str) -> dict[str, dict[str, "Compiled"]]:
    """The compiled instances of one file."""
    return {
        name: {arch: one.result() for arch, one in by_arch.items()}
        for name, by_arch in compilation().items()
        if name.split()[0] == source
    }


FOLDER = Path(__file__).parents[2] / "kernels" / "cuda"
SOURCES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.cu"))


# A register that did not fit goes to memory at every use; a warning is a race or a conversion that nobody
# meant.
@pytest.mark.parametrize("source", SOURCES)
def test_compiles_without_spills_or_warnings(source: str) -> None:
    version()
    found = instances(source)
    assert found, f"no Kernel of a module of kernels/cuda is in {source}"
    for name, by_arch in found.items():
        for arch, compiled in by_arch.items():
            assert not compiled.warnings, f"{name} {arch}: {compiled.warnings}"
            assert not compiled.spill_bytes, f"{name} {arch}: {compiled.spill_bytes} bytes of registers spill"


# A launch would fail on a parameter of a type that launch.py does not know, on the first GPU that meets it.
@pytest.mark.parametrize("source", SOURCES)
def test_signatures_are_understood(source: str) -> None:
    version()
    for kernel in kernels().values():
        if kernel.source == source:
            for template in kernel.instances:
                assert kernel.parameters(template)


# A change that costs registers, hence rows or tiles under way, without anyone having looked at it.
@pytest.mark.parametrize("source", SOURCES)
def test_registers_are_those_on_record(source: str) -> None:
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    if version() != recorded["compiler"]:
        pytest.skip(f"registers are on record for NVRTC {recorded['compiler']}, this is {version()}")
    on_record = {name: used for name, used in recorded["registers"].items() if name.split()[0] == source}
    if not on_record:
        pytest.skip(f"{source} is new: record it, as this file's docstring says")
    found = instances(source)
    assert found.keys() == on_record.keys(), "instances changed: record them, as this file's docstring says"
    for name, by_arch in found.items():
        used = {arch: compiled.registers for arch, compiled in by_arch.items()}
        assert all(used[arch] <= on_record[name][arch] for arch in used), (
            f"{name}: {used}, on record {on_record[name]}"
        )


def record() -> None:
    """Write registers.json."""
    registers = {
        name: {arch: one.result().registers for arch, one in by_arch.items()}
        for name, by_arch in sorted(compilation().items())
    }
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(used)}" for name, used in registers.items())
    text = f'{{\n  "compiler": "{version()}",\n  "registers": {{\n{lines}\n  }}\n}}\n'
    RECORD.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    record()
