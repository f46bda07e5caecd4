"""The Python side of a kernel: its entry point, its template instances, and a check of every launch.

A launch names every argument. The order of the arguments and the type of each scalar are read from the .cu
file. So a launcher cannot disagree with its kernel. An array must have the type of its parameter.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from kernels.cuda.runtime.compile import FOLDER, sources

Array = np.ndarray[Any, Any]
Template = tuple[np.dtype[Any] | int | bool, ...]

# CuPy has no bf16 and no FP8. Arrays of uint16 and uint8 hold the bits.
BF16 = np.dtype(np.uint16)
FLOAT = np.dtype(np.float32)
E4M3 = np.dtype(np.uint8)
# A TensorMap of hopper.cuh, which kernels take by value: an array with one element.
TENSOR_MAP = np.dtype([("opaque", np.uint64, (16,))])

_CUDA_TYPES = {FLOAT: "float", BF16: "bf16"}
_POINTERS = {  # Word is defined in decode/inter_block.cuh
    "float": np.float32, "bf16": np.uint16, "int": np.int32, "long long": np.int64, "double": np.float64,
    "bool": np.bool_, "unsigned": np.uint32, "unsigned char": np.uint8, "Word": np.uint64, "e4m3": np.uint8,
}  # fmt: skip
_SCALARS: dict[str, Any] = {
    "int": np.int32, "long long": np.int64, "unsigned": np.uint32, "float": np.float32, "double": np.float64,
    "bool": np.bool_,
}  # fmt: skip


@cache
def constants(source: str, **template: int) -> dict[str, int]:
    """The integer constants of a .cu file and its headers, by name.

    Args:
        source: path of the .cu file in kernels/cuda.
        template: template parameters that constants depend on. A type is given by its bytes.
    """
    found: dict[str, int] = dict(template)
    text = re.sub(r"//[^\n]*", "", sources(source))
    text = re.sub(r"(?<=\w)<[\w, ]+>", "", text).replace("sizeof(unsigned)", "4")
    text = re.sub(r"sizeof\((\w+)\)", r"\1", text)
    for declaration in re.findall(r"constexpr (?:int|unsigned) (\w[^;]*);", text):
        for name, value in re.findall(r"(\w+) = ([^,]+?)(?:,\s*|$)", declaration):
            evaluated = _evaluate(value, found)
            if evaluated is not None:
                found.setdefault(name, evaluated)
    return found


def _evaluate(expression: str, known: Mapping[str, int]) -> int | None:
    """The value of an integer expression: known names, + - * / %, comparisons and ?:. None for any other."""
    expression = expression.strip()
    if "?" in expression and expression[0] == "(" and expression[-1] == ")":
        expression = expression[1:-1]
    condition, mark, rest = expression.partition("?")
    if mark:
        chosen, _, other = rest.partition(":")
        value = _evaluate(condition, known)
        return None if value is None else _evaluate(chosen if value else other, known)
    if not re.fullmatch(r"[\w\s()+\-*/%<>=!]+", expression):
        return None
    try:
        return int(eval(expression.replace("/", "//"), {"__builtins__": {}}, dict(known)))
    except (NameError, SyntaxError, TypeError, ZeroDivisionError):
        return None


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel: its name, its type without const, and whether it points to an array."""

    name: str
    kind: str
    pointer: bool


@dataclass(frozen=True)
class Kernel:
    """An entry point of a .cu file.

    Args:
        source: the file's name.
        name: the __global__ function.
        instances: the template arguments of its launches. A test compiles each instance.
        hopper: whether it needs instructions of sm_90a.
        dependent_launch: whether it may start before the previous kernel has ended, see
            include/dependent_launch.cuh.
        open: whether template arguments depend on the model's sizes. Then `instances` are only examples.
    """

    source: str
    name: str
    instances: tuple[Template, ...]
    hopper: bool = False
    dependent_launch: bool = False
    open: bool = False

    def expression(self, template: Template) -> str:
        """The instance in C++ syntax."""
        spelled = [str(_CUDA_TYPES.get(x, x) if isinstance(x, np.dtype) else x).lower() for x in template]
        return f"{self.name}<{', '.join(spelled)}>" if spelled else self.name

    def parameters(self, template: Template) -> tuple[Parameter, ...]:
        """The parameters of an instance, with the template's types."""
        names, parameters = _signature(self.source, self.name)
        assert len(names) == len(template), f"{self.name}: template {names}, got {template}"
        types = {
            name: _CUDA_TYPES[x] for name, x in zip(names, template, strict=True) if isinstance(x, np.dtype)
        }
        return tuple(Parameter(p.name, types.get(p.kind, p.kind), p.pointer) for p in parameters)


@cache
def _signature(source: str, name: str) -> tuple[tuple[str, ...], tuple[Parameter, ...]]:
    """The names of the template parameters, and the function parameters, read from the file."""
    text = re.sub(r"//[^\n]*", "", (FOLDER / source).read_text(encoding="utf-8"))
    found = re.search(
        r"(?:template\s*<([^>]*)>\s*)?__global__\s+(?:void\s+)?(?:__cluster_dims__\([^)]*\)\s*)?"
        r"(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?(?:void\s+)?"
        + name + r"\s*\(([^)]*)\)\s*\{",
        text,
    )  # fmt: skip
    assert found, f"{source} has no kernel {name}"
    template = tuple(part.split()[-1] for part in (found[1] or "").split(",") if part.strip())
    parameters = []
    for part in found[2].split(","):
        words = re.sub(r"\b(const|__restrict__|__grid_constant__)\b", " ", part).replace("*", " * ").split()
        pointer = "*" in words
        parameters.append(Parameter(words[-1], " ".join(word for word in words[:-1] if word != "*"), pointer))
    return template, tuple(parameters)


def arguments(kernel: Kernel, template: Template, given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments in the kernel's order. Scalars get the parameters' types, None becomes a null pointer."""
    assert kernel.open or template in kernel.instances, (
        f"{kernel.name}: {template} is not among its instances"
    )
    parameters = kernel.parameters(template)
    names = [p.name for p in parameters]
    assert set(names) == set(given), f"{kernel.name} takes {names}, got {list(given)}"
    return tuple(_argument(kernel.name, p, given[p.name]) for p in parameters)


def _argument(kernel: str, parameter: Parameter, value: Any) -> Any:
    if not parameter.pointer:
        if parameter.kind in _SCALARS:
            return _SCALARS[parameter.kind](value)
        assert parameter.kind == "TensorMap", (
            f"{kernel}: {parameter.name} has an unknown type {parameter.kind}"
        )
        assert value.dtype == TENSOR_MAP and value.size == 1, (
            f"{kernel}: {parameter.name} is not a tensor map"
        )
        return value  # CuPy passes NumPy arrays with one element by value
    if value is None:
        return np.uint64(0)
    if parameter.kind != "void":
        expected = np.dtype(_POINTERS[parameter.kind])
        assert value.dtype == expected, f"{kernel}: {parameter.name} expected {expected}, got {value.dtype}"
    assert value.flags.c_contiguous, f"{kernel}: {parameter.name} is not contiguous"
    return value
