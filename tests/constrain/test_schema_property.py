"""Random schemas: what is held is valid for the schema as it was given, and nothing but a refusal comes of one that is none."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from support.words import matcher, walk

from headrace.errors import RequestError

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: pip install 'headrace[dev]'")

VALUES = ["a", "b", 1, None, True, {"x": 1}, [1, 2], 1.5, 'é/\\"']
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email", "hostname", "duration"]
PATTERNS = ["^[a-c]+$", "x", "^ab?", "[0-9]{2}$", "^(foo|bar)", "a.c"]


def scalar(chance: random.Random) -> dict[str, Any]:
    kind = chance.choice(["string", "number", "boolean", "null", "enum", "const", "format", "pattern"])
    if kind == "string":
        bounds = {"maxLength": chance.randint(2, 6), "minLength": chance.randint(0, 2)}
        return {"type": "string", **{name: bound for name, bound in bounds.items() if chance.random() < 0.5}}
    if kind == "number":
        made: dict[str, Any] = {"type": chance.choice(["integer", "number"])}
        if chance.random() < 0.5:
            made[chance.choice(["minimum", "exclusiveMinimum"])] = chance.choice([0, -3, 5, 1.5, 2**53 + 1])
        if chance.random() < 0.5:
            made[chance.choice(["maximum", "exclusiveMaximum"])] = chance.choice([9, 100, 7.25, 2**60 + 1, 10**19])
        return made | ({"multipleOf": chance.choice([2, 3, 0.5, 10])} if chance.random() < 0.2 else {})
    if kind == "enum":
        return {"enum": chance.sample(VALUES, chance.randint(1, 4))}
    if kind == "const":
        return {"const": chance.choice(VALUES)}
    if kind in ("format", "pattern"):
        return {"type": "string", kind: chance.choice(FORMATS if kind == "format" else PATTERNS)}
    return {"type": kind}


def schema(chance: random.Random, shared: tuple[str, ...], depth: int = 0) -> dict[str, Any]:
    def inner() -> dict[str, Any]:
        return schema(chance, shared, depth + 1)

    if depth > 2 or chance.random() < 0.35:
        return scalar(chance)
    kind = chance.choice(["object", "object", "array", "anyOf", "allOf", "oneOf", "tagged", "reference", "beside", "patterns"])
    if kind == "object":
        names = chance.sample(["a", "b", "c/d", "kind", "é"], chance.randint(0, 3))
        made: dict[str, Any] = {"type": "object", "properties": {name: inner() for name in names}}
        made["required"] = [name for name in [*names, "other"] if chance.random() < 0.4]
        if chance.random() < 0.3:
            made["additionalProperties"] = chance.choice([True, False, scalar(chance)])
        if chance.random() < 0.2:
            made[chance.choice(["minProperties", "maxProperties"])] = chance.randint(0, 3)
        return made
    if kind == "array":
        parts = {"items": inner(), "prefixItems": [inner()], "minItems": chance.randint(0, 1), "maxItems": chance.randint(1, 3)}
        return {"type": "array", **{name: part for name, part in parts.items() if chance.random() < 0.5}}
    if kind == "tagged":
        branches = [{"properties": {"kind": {"const": tag}, "a": inner()}, "required": ["kind"]} for tag in ("x", "y")]
        return {"oneOf": [{"type": "object", **branch} for branch in branches]}
    if kind == "reference" and shared:
        return {"$ref": f"#/$defs/{chance.choice(shared)}"}
    if kind == "beside":
        return {**inner(), chance.choice(["anyOf", "allOf"]): [inner(), inner()]}
    if kind == "patterns":
        return {
            "type": "object",
            "patternProperties": {"^x": inner()},
            "additionalProperties": chance.choice([False, scalar(chance)]),
        }
    return {kind if kind in ("anyOf", "allOf", "oneOf") else "anyOf": [inner() for _ in range(chance.randint(1, 3))]}


def test_outputs_are_valid_for_the_schema_as_it_was_given() -> None:
    held = complete = 0
    for seed in range(120):
        chance = random.Random(seed)
        shared = ("p", "q") if chance.random() < 0.4 else ()
        given = schema(chance, shared)
        if shared:
            given = {"$defs": {name: schema(chance, shared, 1) for name in shared}, **given}
        try:
            made = matcher(json=given)
        except RequestError:
            continue
        held += 1
        validator = jsonschema.Draft202012Validator(given, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
        for number in range(3):
            text, done = walk(made, 10 * seed + number, 150)
            if done:
                complete += 1
                validator.validate(json.loads(text))
    assert held > 50 and complete > 120


KEYWORDS = [
    *(
        "type",
        "enum",
        "const",
        "anyOf",
        "oneOf",
        "allOf",
        "$ref",
        "$defs",
        "$id",
        "$anchor",
        "properties",
        "required",
        "items",
        "prefixItems",
    ),
    *("additionalProperties", "patternProperties", "minProperties", "minItems", "maxLength", "pattern", "format", "minimum"),
    *("maximum", "exclusiveMinimum", "multipleOf", "uniqueItems", "title", "x-a", "nope"),
]
JUNK = [None, True, 0, -1, 2.5, 1e308, 2**70, "", "#", "#/%zz", "#/properties/~", "a", "#a", "http://[a", "(", "string"]
JUNK += ["date", [], {}, ["a"], [1, 1]]


def junk(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.random()
    if depth > 3 or kind < 0.45:
        return chance.choice(JUNK)
    if kind < 0.65:
        return [junk(chance, depth + 1) for _ in range(chance.randint(0, 3))]
    return {chance.choice([*KEYWORDS, "a", "b"]): junk(chance, depth + 1) for _ in range(chance.randint(0, 4))}


def test_junk_is_refused_with_a_pointer_that_resolves() -> None:
    refused = 0
    for seed in range(2500):
        chance = random.Random(seed)
        given = {chance.choice(KEYWORDS): junk(chance) for _ in range(chance.randint(1, 4))}
        try:
            matcher(json=json.dumps(given))
        except RequestError as error:
            refused += 1
            value: Any = given
            for part in error.message.partition("#")[2].partition(": ")[0].split("/")[1:]:
                part = part.replace("~1", "/").replace("~0", "~")
                value = value[int(part)] if isinstance(value, list) else value[part]
    assert refused > 2000
