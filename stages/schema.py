"""Plain values -> frozen dataclasses. The types in settings.py are the schema of params.yaml."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from stages.overrides import REGENERATE_HINT, nearest
from stages.sources.corpus import NOTHING

# Sections in which a key with a default may be missing: each kind of source has its own keys.
OPTIONAL_KEYS = ("corpus", "conversations", "model")


def require(ok: bool, key: str, expected: str, value: object) -> None:
    """Raises ValueError if the value of a key is not as expected."""
    if not ok:
        raise ValueError(f"{key}: expected {expected}, got {value!r}")


def build(kind: Any, value: Any, key: str) -> Any:
    """Converts a plain value to the type of a field.

    Args:
        kind: a dataclass, Literal, tuple[X, ...], X | None, Literal | int, float, int, bool or str.
            Path | None is a text; NOTHING means None.
        value: from params.yaml. An int is valid for a float; a bool is not valid for an int.
        key: the dotted key, for the message.

    Raises:
        ValueError: a key is unknown or missing, or a value has another type; the message names the key.
    """
    if is_dataclass(kind):
        return _build_section(kind, value, key)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (UnionType, Union) and NoneType not in arguments:
        words, other = get_args(arguments[0]), arguments[1]
        ok = value in words if isinstance(value, str) else _fits(other, value)
        require(ok, key, f"{', '.join(words)} or {_describe(other)}", value)
        return value
    if origin is UnionType:
        assert arguments[1:] == (NoneType,), f"{key}: a field is X or X | None"
        if arguments[0] is Path:
            require(isinstance(value, str) and value != "", key, f"a path, or {NOTHING} for none", value)
            return None if value == NOTHING else Path(value)
        return None if value is None else build(arguments[0], value, key)
    if origin is tuple:
        require(isinstance(value, list), key, "a list", value)
        return tuple(build(arguments[0], item, f"{key}[{index}]") for index, item in enumerate(value))
    if origin is Literal:
        require(isinstance(value, str) and value in arguments, key, f"one of {', '.join(arguments)}", value)
        return value
    require(_fits(kind, value), key, _describe(kind), value)
    return float(value) if kind is float else value


def _build_section(kind: Any, value: Any, key: str) -> Any:
    section = key or "params.yaml"
    if not isinstance(value, Mapping):
        hint = f"; to choose a file of conf/{section}, run `dvc exp run -S {section}=FILE` without --no-hydra"
        raise ValueError(f"{section}: expected a mapping of keys, got {value!r}{hint}")
    known = {field.name: field for field in fields(kind)}
    for name in value:
        if name not in known:
            raise ValueError(f"{section}: unknown key {name!r}{nearest(f'{section}.{name}', known)}")
    kinds, found = get_type_hints(kind), {}
    for name, field in known.items():
        if name in value:
            found[name] = build(kinds[name], value[name], f"{key}.{name}" if key else name)
        elif not key.startswith(OPTIONAL_KEYS) or (
            field.default is MISSING and field.default_factory is MISSING
        ):
            raise ValueError(f"{section}: the key {name!r} is missing{REGENERATE_HINT}")
    return kind(**found)


def _fits(kind: type, value: object) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return type(value) is kind


def _describe(kind: Any) -> str:
    return {float: "a finite number", int: "a whole number", bool: "true or false", str: "a text"}.get(
        kind, "a value"
    )
