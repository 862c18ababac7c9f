"""What the references of a JSON Schema point to: places of the document, by JSON Pointer, ``$id`` or ``$anchor``.

Base URIs are those of JSON Schema 2020-12, section 8.2, and RFC 3986; nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote, urljoin

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "additionalItems")


class References:
    """The references of one document."""

    def __init__(self, root: Any) -> None:
        old = isinstance(root, dict) and "draft-04" in str(root.get("$schema"))
        self._own, self._other = ("id", "$id") if old else ("$id", "id")
        """What names a schema, and what does so in other drafts."""
        self.schemas: dict[str, dict[str, Any]] = {}
        """By pointer."""
        self._bases: dict[str, str | None] = {}
        """Of each schema; None: drafts differ in what it is."""
        self._places: dict[str, str | None] = {}
        """URI, with an anchor or without -> pointer; None: several schemas have this name."""
        pending: list[tuple[str, Any, str | None]] = [("", root, "")]
        while pending:
            pointer, schema, base = pending.pop()
            if isinstance(schema, dict):
                self.schemas[pointer] = schema
                self._bases[pointer] = base = self._base(pointer, schema, base)
                pending += [(pointer + step, own, base) for step, own in _within(schema)]

    def target(self, pointer: str) -> str | None:
        """The pointer that the ``$ref`` of the schema at a pointer stands for, if that is known. It may lead nowhere."""
        base, value = self._bases[pointer], self.schemas[pointer]["$ref"]
        if base is None or not isinstance(value, str):
            return None
        try:
            uri, _, fragment = _joined(base, value).partition("#")
            fragment = unquote(fragment, errors="strict")
        except ValueError:  # UnicodeDecodeError too
            return None
        if fragment and not fragment.startswith("/"):
            return self._places.get(f"{uri}#{fragment}")
        place = self._places.get(uri)
        return None if place is None else place + fragment

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
            self._places[name] = pointer if self._places.get(name, pointer) == pointer else None
        return uri


def local(value: str, target: str) -> str:
    """A ``$ref`` to the pointer ``target``, as it was written if that is what it says."""
    return value if value.startswith("#") and unquote(value[1:]) == target else "#" + quote(target, safe="/~!$&'()*+,;=:@")


def escaped(name: str) -> str:
    """A name as a step of a JSON Pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _joined(base: str, value: str) -> str:
    """Raises: ValueError: it is no URI."""
    return base + value if value.startswith("#") else urljoin(base, value)


def _within(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(step, schema) of what stands where schemas stand."""
    for name in _BY_NAME:
        if isinstance(own := schema.get(name), dict):
            yield from ((f"/{escaped(name)}/{escaped(key)}", each) for key, each in own.items())
    for name in _LISTS:
        if isinstance(own := schema.get(name), list):
            yield from ((f"/{name}/{index}", each) for index, each in enumerate(own))
    for name in _SINGLE:
        if isinstance(own := schema.get(name), dict):
            yield f"/{name}", own
