"""Branches of a oneOf that exclude each other: it allows then what an anyOf of them does."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace.constrain.references import References, escaped

ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "discriminator"),
        *("$comment", "$schema", "$id", "id", "$anchor", "contentEncoding", "contentMediaType", "contentSchema"),
        # Of editors.
        *("markdownDescription", "enumDescriptions", "markdownEnumDescriptions", "deprecationMessage", "errorMessage"),
        *("patternErrorMessage", "defaultSnippets", "doNotSuggest", "suggestSortText", "allowComments", "allowTrailingCommas"),
    }
)
"""Say nothing about which values are valid. So do names that begin with x-."""
TYPES = ("null", "boolean", "object", "array", "number", "string", "integer")
_COMPARED = 256
"""Branches that are compared with each other, at most."""
_STEPS = 8
"""References that are followed from one schema, at most."""

Values = dict[tuple[str, Any], Any]


class Alternative(NamedTuple):
    """A branch, or one of those that it stands for."""

    pointer: str
    types: set[str]
    values: Values
    """Allowed values, where the schema names them."""
    constants: dict[str, Values]
    """Property -> the values that it may have, where they are named."""
    required: set[str]


class Apart(NamedTuple):
    """A oneOf whose branches exclude each other."""

    alternatives: list[Alternative]
    discriminator: str | None = None
    """The property that must be there so that they do; None: they do anyway."""


def told_apart(links: References, schema: Mapping[str, Any], pointer: str) -> Apart | None:
    """Returns what distinguishes the branches of a schema's oneOf: their types or values, or a property's. None: unknown.

    Its ``discriminator`` need not be required: who writes one means that each object has it.
    """
    found: list[Alternative] = []
    groups = []
    for index in range(len(schema["oneOf"])):
        own = _alternatives(links, f"{pointer}/oneOf/{index}", _COMPARED - len(found))
        if own is None:
            return None
        groups.append(range(len(found), len(found) + len(own)))
        found += own
    named = schema.get("discriminator")
    name = named.get("propertyName") if isinstance(named, Mapping) else None
    alone = True
    for one, other in itertools.combinations(groups, 2):
        for a, b in itertools.product(one, other):
            if not _exclusive(found[a], found[b], None):
                alone = False
                if not isinstance(name, str) or not _exclusive(found[a], found[b], name):
                    return None
    return Apart(found, None if alone else name)


def followed(links: References, pointer: str) -> tuple[str, Any] | None:
    """The schema at a pointer, or the one that it stands for if it is a bare $ref, and where that is. None: not known."""
    for _ in range(_STEPS):
        schema = links.schemas.get(pointer)
        if schema is None:
            return None
        if "$ref" not in schema or combines(schema):
            return pointer, schema
        target = links.target(pointer)
        if target is None:
            return None
        pointer = target
    return None


def combines(schema: Mapping[str, Any]) -> bool:
    """Whether a schema's own keywords are combined with those of others beside them."""
    combining = [name for name in ("$ref", "anyOf", "oneOf", "allOf") if name in schema]
    return bool(combining) and any(says(name) for name in schema if name not in combining[:1])


def types_named(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema names; all of them where it names none that there is."""
    named = schema.get("type")
    found = {name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)} or {*TYPES}
    return found | {"integer"} if "number" in found else found


def constants(schema: Any) -> Values:
    """The values that a schema names, if they are scalars, by what tells them apart; empty where it allows others."""
    if not isinstance(schema, dict):
        return {}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or any(isinstance(value, list | dict) for value in values):
        return {}
    # 1 and 1.0 are one value; true and 1 are two.
    return {("number" if type(value) in (int, float) else type(value).__name__, value): value for value in values}


def _alternatives(links: References, pointer: str, most: int) -> list[Alternative] | None:
    """Schemas of which one allows whatever that at the pointer allows. None: there are more, or they are not known."""
    found: list[Alternative] = []
    pending, passed = [pointer], set()
    while pending:
        place = followed(links, pending.pop())
        if place is None or len(found) + len(pending) >= most:
            return None
        pointer, schema = place
        if pointer in passed:
            continue
        passed.add(pointer)
        union = next((name for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)), None)
        if union is None or combines(schema):
            found.append(_alternative(links, pointer, schema))
        else:
            pending += (f"{pointer}/{union}/{index}" for index in range(len(schema[union])))
    return found


def _alternative(links: References, pointer: str, schema: Mapping[str, Any]) -> Alternative:
    properties = schema.get("properties")
    named = {}
    for name in properties if isinstance(properties, dict) else ():
        place = followed(links, f"{pointer}/properties/{escaped(name)}")
        if place is not None and (values := constants(place[1])):
            named[name] = values
    required = schema.get("required")
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    return Alternative(pointer, types_named(schema), constants(schema), named, names)


def _exclusive(one: Alternative, other: Alternative, name: str | None) -> bool:
    """Whether no value is valid for both. ``name``: of a property that each object has; None: the required ones."""
    shared = one.types & other.types
    if not shared or _disjoint(one.values, other.values):
        return True
    names = one.required & other.required if name is None else {name}
    return shared == {"object"} and any(_disjoint(one.constants.get(each, {}), other.constants.get(each, {})) for each in names)


def _disjoint(one: Values, other: Values) -> bool:
    return bool(one and other) and not one.keys() & other.keys()


def says(name: str) -> bool:
    """Whether a keyword can say which values are valid."""
    return name not in ANNOTATIONS and name not in ("$defs", "definitions") and not name.startswith("x-")
