"""Records (dataclasses, structs, named tuples) of headrace as plain data, by the names of their classes.

For trees whose types msgspec cannot tell apart: a model's specs, a selector's config. Decoding makes only records.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import msgspec

_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "frozenset": frozenset}


def to_plain(value: Any) -> Any:
    """Raises: TypeError: the value is neither a record nor plain data."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes):
        return value
    if kind.__name__ in _SEQUENCES and kind.__module__ == "builtins":
        return [kind.__name__, *map(to_plain, value)]
    if isinstance(value, dict):
        return ["dict", *([to_plain(key), to_plain(item)] for key, item in value.items())]
    if not _is_record(kind):
        raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not a record")
    return [f"{kind.__module__}:{kind.__name__}", *(to_plain(getattr(value, name)) for name in _fields(kind))]


def from_plain(data: Any) -> Any:
    """Raises: TypeError: the data names something else than a record of headrace's."""
    if not isinstance(data, list):
        return data
    name, *values = data
    if name == "dict":
        return {from_plain(key): from_plain(item) for key, item in values}
    if name in _SEQUENCES:
        return _SEQUENCES[name](map(from_plain, values))
    module, _, kind_name = name.partition(":")
    kind: Any = getattr(importlib.import_module(module), kind_name) if module.startswith("headrace.") else None
    if not _is_record(kind):
        raise TypeError(f"{name} is not a record")
    return kind(**dict(zip(_fields(kind), map(from_plain, values), strict=True)))


def _is_record(kind: Any) -> bool:
    own = isinstance(kind, type) and kind.__module__.startswith("headrace.")
    return own and (dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct) or hasattr(kind, "_fields"))


def _fields(kind: Any) -> tuple[str, ...]:
    """Names of the constructor's arguments."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind) if field.init)
    return tuple(kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else kind._fields)
