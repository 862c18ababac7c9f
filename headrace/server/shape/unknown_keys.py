"""Keys of a request's objects that the types declared for them do not have."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from msgspec import inspect


class UnknownKey(NamedTuple):
    path: str
    owner: dict[str, Any]
    name: str
    known: tuple[str, ...]
    """The keys that the object may have."""


def unknown_keys(value: Any, kind: Any, where: str) -> Iterator[UnknownKey]:
    """The unknown keys in a JSON value of a type, which is built of structs, unions of tagged structs and lists. What is of
    another type is passed over."""
    yield from _unknown(value, _type_info(kind), where)


@cache
def _type_info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _unknown(value: Any, kind: inspect.Type, where: str) -> Iterator[UnknownKey]:
    if isinstance(value, list):
        of_items = next((one.item_type for one in _alternatives(kind) if isinstance(one, inspect.ListType)), inspect.AnyType())
        for index, item in enumerate(value):
            yield from _unknown(item, of_items, f"{where}[{index}]")
    elif isinstance(value, dict) and (struct := _struct(value, kind)) is not None:
        fields = {field.encode_name: field.type for field in struct.fields}
        known = (*fields, *([struct.tag_field] if struct.tag_field else []))
        for name, item in value.items():
            if name in fields:
                yield from _unknown(item, fields[name], f"{where}.{name}")
            elif name not in known:
                yield UnknownKey(f"{where}.{name}", value, name, known)


def _alternatives(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _struct(value: dict[str, Any], kind: inspect.Type) -> inspect.StructType | None:
    """The declared struct of an object: the one with its tag, which may be left out where there is no other."""
    structs = [one for one in _alternatives(kind) if isinstance(one, inspect.StructType)]
    alone = len(structs) == 1
    tagged = ((one, value.get(one.tag_field, one.tag if alone else None)) for one in structs if one.tag_field is not None)
    return next((one for one, tag in tagged if tag == one.tag), next((one for one in structs if one.tag_field is None), None))
