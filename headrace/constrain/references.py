"""Targets of the references of a JSON Schema: places of the document, by JSON Pointer, ``$id`` or ``$anchor``.

Base URIs are those of JSON Schema 2020-12, section 8.2, and RFC 3986; nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote, urljoin

_MOST_CHARS = 2**24
"""Characters of all pointers and URIs together: a long name with many schemas below it is in the pointer of each."""
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "additionalItems")


class References:
    """The references of one document."""

    def __init__(self, root: Any, max_depth: int) -> None:
        """Schemas nested deeper than ``max_depth`` are not looked at."""
        old = isinstance(root, dict) and "draft-04" in str(root.get("$schema"))
        self._own, self._other = ("id", "$id") if old else ("$id", "id")
        """Keyword that names a schema, and the one that does so in other drafts."""
        self.schemas: dict[str, dict[str, Any]] = {}
        """Schemas by pointer."""
        self._bases: dict[str, str | None] = {}
        """Base URI of each schema, by pointer; None: drafts differ in what it is."""
        self._places: dict[str, str | None] = {}
        """URI, with an anchor or without -> pointer; None: several schemas have this name."""
        self._left = _MOST_CHARS
        pending: list[Iterator[tuple[str, Any, str | None, int]]] = [iter([("", root, "", 0)])]
        while pending:
            pointer, schema, base, depth = next(pending[-1], ("", None, None, -1))
            if depth < 0:
                pending.pop()
            elif isinstance(schema, dict) and depth <= max_depth:
                self._left -= len(pointer)
                if self.too_long:
                    return
                self.schemas[pointer] = schema
                self._bases[pointer] = base = self._base(pointer, schema, base)
                pending.append(_below(schema, pointer, base, depth))

    @property
    def too_long(self) -> bool:
        """Whether the names of schemas take too much memory; not all schemas are known then."""
        return self._left < 0

    def target(self, pointer: str) -> str | None:
        """The pointer that the ``$ref`` of the schema at a pointer stands for, if that is known. It may lead nowhere."""
        base, value = self._bases[pointer], self.schemas[pointer]["$ref"]
        if base is None or self.too_long or not isinstance(value, str):
            return None
        try:
            uri, _, fragment = _joined(base, value).partition("#")
            fragment = unquote(fragment, errors="strict")
        except ValueError:  # UnicodeDecodeError too
            return None
        if fragment and not fragment.startswith("/"):
            return self._places.get(f"{uri}#{fragment}")
        place = self._places.get(uri)
        if place is None:
            return None
        self._left -= len(base) + len(place) + len(fragment)
        return place + fragment

    def _base(self, pointer: str, schema: dict[str, Any], base: str | None) -> str | None:
        """The base URI within a schema; notes the schema's names."""
        other, given, anchor = schema.get(self._other), schema.get(self._own), schema.get("$anchor")
        if not pointer:
            given = given if isinstance(given, str) else other
        elif (isinstance(other, str) and not other.startswith("#")) or (isinstance(given, str) and "$ref" in schema):
            return None
        given = given if isinstance(given, str) else ""
        if base is None:
            return None
        try:
            uri, _, fragment = _joined(base, given).partition("#")
        except ValueError:
            return None
        names = [] if pointer and uri == base else [uri]
        names += [f"{uri}#{name}" for name in (fragment, anchor) if isinstance(name, str) and name and name[0] != "/"]
        for name in names:
            self._left -= len(name)
            self._places[name] = pointer if self._places.get(name, pointer) == pointer else None
        return uri


def local(value: str, target: str) -> str:
    """A ``$ref`` to the pointer ``target``, as it was written if that is what it says."""
    return value if value.startswith("#") and unquote(value[1:]) == target else "#" + quote(target, safe="/~!$&'()*+,;=:@")


def escaped(name: str) -> str:
    """A name as a step of a JSON Pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _joined(base: str, value: str) -> str:
    """Raises: ValueError: it is not a URI."""
    return base + value if value.startswith("#") else urljoin(base, value)


def _below(schema: dict[str, Any], pointer: str, base: str | None, depth: int) -> Iterator[tuple[str, Any, str | None, int]]:
    return ((pointer + step, own, base, depth + 1) for step, own in subschemas(schema))


def subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """(pointer, schema) of what stands where schemas stand directly within one, which need not have been checked."""
    if not isinstance(schema, dict):
        return
    for name in _BY_NAME:
        if isinstance(own := schema.get(name), dict):
            yield from ((f"/{escaped(name)}/{escaped(key)}", each) for key, each in own.items())
    for name in _LISTS:
        if isinstance(own := schema.get(name), list):
            yield from ((f"/{name}/{index}", each) for index, each in enumerate(own))
    for name in _SINGLE:
        if isinstance(own := schema.get(name), dict):
            yield f"/{name}", own
