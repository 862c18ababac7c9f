"""The walk over schemas: what is held, what is refused and where, what is narrowed, and that nothing is widened."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.words import accepts, matcher, walk

from headrace.constrain.schema import SchemaError, SchemaOptions, narrow
from headrace.errors import RequestError

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: pip install 'headrace[dev]'")

A, B = {"type": "string"}, {"type": "integer"}
DRAFT = "http://json-schema.org/draft-{}/schema#"
DISCRIMINATED = {
    "oneOf": [
        {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": B}, "required": ["kind", "lives"]},
        {"type": "object", "properties": {"kind": {"const": "dog"}, "name": A}, "required": ["kind"]},
    ]
}
LIST = {
    "$defs": {"n": {"properties": {"v": B, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}, "type": "object"}}
}

HELD: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "null"}, [None], [0, "null"]),
    ({"type": "boolean"}, [True, False], [1, None]),
    ({"type": "string"}, ["", "a", 'q"\\\n', "é北"], [1, None]),
    ({"type": "integer"}, [0, -5, 10**17], [1.5, "1"]),
    ({"type": "number"}, [0, -1.5, 2e10], ["1", None]),
    ({"type": ["string", "null"]}, ["a", None], [1, []]),
    ({"type": "array"}, [[], [1, "a", [None]]], [{}, 1]),
    ({"type": "object"}, [{}, {"a": [1]}], [[], 1]),
    ({}, [None, 1, "a", [], {}], []),
    ({"enum": ["a", 1, None, [1, {"b": 2}]]}, ["a", 1, None, [1, {"b": 2}]], ["b", 2, [1]]),
    ({"const": {"a": 1}}, [{"a": 1}], [{"a": 2}, {}]),
    ({"minLength": 2, "maxLength": 3, "type": "string"}, ["ab", "aé北"], ["a", "abcd"]),
    ({"pattern": "^[a-c]{2}[0-9]$", "type": "string"}, ["ab1", "cc9"], ["ab", "abd1", "xab1"]),
    ({"pattern": "b", "type": "string"}, ["abc", "b"], ["ac", ""]),
    (
        {"format": "date", "type": "string"},
        ["2026-11-22", "2024-02-29", "2000-02-29"],
        ["2026-02-29", "1900-02-29", "2026-04-31"],
    ),
    ({"format": "time", "type": "string"}, ["23:59:59Z", "00:00:00.5-08:30"], ["24:00:00Z", "22:59:60Z", "12:00:00"]),
    ({"format": "date-time", "type": "string"}, ["2026-11-22T10:00:00Z"], ["2026-11-22 10:00:00Z", "2026-11-22"]),
    ({"format": "date", "pattern": "^20", "type": "string"}, ["2026-11-22"], ["1926-11-22", "20"]),
    ({"format": "uuid", "type": "string"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123"]),
    ({"format": "ipv4", "type": "string"}, ["10.0.0.1"], ["10.0.0.300"]),
    ({"format": "ipv6", "type": "string"}, ["::ffff:10.0.0.1", "::", "1:2::7:8"], ["::ffff:10.0.0.300", "1:2", ":::1"]),
    ({"pattern": "^(?=.*[0-9])(?!ab).{2}$", "type": "string"}, ["a1", "1b"], ["ab", "aa", "1"]),
    ({"uniqueItems": True, "items": {"enum": ["a", 1, 2]}, "type": "array"}, [[], [2, "a"]], [[1, 1], ["a", 2, "a"]]),
    ({"uniqueItems": True, "items": {"type": "boolean"}, "minItems": 1, "type": "array"}, [[True, False]], [[], [True, True]]),
    ({"uniqueItems": True, "items": A, "maxItems": 1, "type": "array"}, [[], ["a"]], [["a", "b"]]),
    ({"minimum": 3, "maximum": 12, "type": "integer"}, [3, 12], [2, 13]),
    ({"exclusiveMinimum": 3, "exclusiveMaximum": 5, "type": "integer"}, [4], [3, 5]),
    ({"minimum": 3, "exclusiveMinimum": True, "type": "integer"}, [4], [3]),
    ({"maximum": 9007199254740995, "type": "integer"}, [9007199254740992], [9007199254740996]),
    ({"multipleOf": 7, "type": "integer"}, [0, 14, -7], [1, 15]),
    ({"items": B, "type": "array"}, [[], [1, 2]], [["a"]]),
    ({"prefixItems": [A, B], "items": False, "type": "array"}, [["a", 1]], [[1, "a"], ["a", 1, 2]]),
    ({"minItems": 1, "maxItems": 2, "items": B, "type": "array"}, [[1], [1, 2]], [[], [1, 2, 3]]),
    ({"properties": {"a": A, "b": B}, "required": ["a"], "type": "object"}, [{"a": "x"}, {"a": "x", "b": 1}], [{"b": 1}, {}]),
    ({"properties": {"a": A}, "additionalProperties": B, "type": "object"}, [{"a": "x", "c": 1}], [{"a": 1}, {"c": "x"}]),
    ({"properties": {"a/b": B}, "additionalProperties": True, "type": "object"}, [{"a/b": 1, "c": "x"}], [{"a/b": "x"}]),
    ({"patternProperties": {"^x": B}, "additionalProperties": False, "type": "object"}, [{"xa": 1}], [{"y": 1}, {"xa": ""}]),
    ({"required": ["a"], "type": "object"}, [{"a": 1}], [{}]),
    ({"minProperties": 1, "type": "object"}, [{"a": 1}], [{}]),
    ({"maxProperties": 1, "type": "object"}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    ({"anyOf": [A, B]}, ["a", 1], [None, 1.5]),
    ({"allOf": [{"minimum": 2, "type": "integer"}, {"maximum": 4}]}, [2, 4], [1, 5]),
    (DISCRIMINATED, [{"kind": "cat", "lives": 9}, {"kind": "dog"}], [{"kind": "cat"}, {"kind": "cow"}]),
    ({"oneOf": [A, B]}, ["a", 1], [None]),
    ({**LIST, "$ref": "#/$defs/n"}, [{"v": 1, "next": {"v": 2, "next": None}}], [{"v": "x"}, {"next": {"v": "x"}}]),
    (
        {"$id": "urn:x", "$defs": {"s": A}, "properties": {"a": {"$ref": "urn:x#/$defs/s"}}, "type": "object"},
        [{"a": "x"}],
        [{"a": 1}],
    ),
    *(
        (
            {"$id": root, "$defs": {"n": {**named, "$defs": {"b": B}, "type": "object"}, "s": A}, "items": {"$ref": ref}},
            ["a", [own]],
            [[other]],
        )
        for root, named, ref, own, other in [
            ("", {"$anchor": "it"}, "#it", {}, None),
            ("http://a.org/d/root.json", {"$id": "n.json"}, "n.json#/$defs/b", 1, "b"),
            ("http://a.org/d/root.json", {"$id": "n.json", "$anchor": "it"}, "http://a.org/d/n.json#it", {}, None),
            ("http://a.org/d/root.json", {"$id": "/n/"}, "../n/#/$defs/b", 1, "b"),
            ("http://a.org/d/root.json", {"$id": "/n/"}, "root.json#/$defs/s", "s", 1),
            ("urn:x", {"$id": "urn:y"}, "urn:y", {}, None),
        ]
    ),
    (
        {"$defs": {"n": {"$id": "n", "$defs": {"b": B}, "items": {"$ref": "#/$defs/b"}}, "b": A}, "items": {"$ref": "n"}},
        [[[1]]],
        [[["b"]]],
    ),
    ({"$schema": DRAFT.format("07"), "definitions": {"n": {"$id": "#n", "type": "integer"}}, "$ref": "#n"}, [1], ["b"]),
    ({"$schema": DRAFT.format("04"), "definitions": {"n": {"id": "n", "type": "integer"}}, "$ref": "n"}, [1], ["b"]),
    ({"properties": {"a": {"id": "a", "type": "string"}}, "type": "object"}, [{"a": "x"}], [{"a": 1}]),
    ({"title": "T", "x-order": 3, "default": 1, "examples": [2], "deprecated": True, "type": "integer"}, [1], ["a"]),
]
"""(schema, instances that pass, instances that do not)."""


@pytest.mark.parametrize(("schema", "right", "wrong"), HELD, ids=lambda value: json.dumps(value)[:50])
def test_a_keyword_is_held(schema: dict[str, Any], right: list[Any], wrong: list[Any]) -> None:
    made = matcher(json=schema)
    for value in right:
        for indent in (None, 2):
            assert accepts(made, json.dumps(value, ensure_ascii=False, indent=indent)), value
    for value in wrong:
        assert not accepts(made, json.dumps(value, ensure_ascii=False)), value


@pytest.mark.parametrize("schema", [schema for schema, _, _ in HELD], ids=lambda value: json.dumps(value)[:50])
def test_every_walk_through_a_grammar_is_valid(schema: dict[str, Any]) -> None:
    """Random outputs are instances, for the schema that was given and not for the one it was narrowed to."""
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    kind = jsonschema.Draft4Validator if schema.get("exclusiveMinimum") is True else kind
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    made = matcher(json=schema)
    complete = 0
    for seed in range(6):
        text, done = walk(made, seed, 200)
        if done:
            complete += 1
            validator.validate(json.loads(text))
    assert complete


REFUSED: list[tuple[Any, str]] = [
    ({"propertes": {}}, "/propertes"),
    ({"properties": {"a": {"not": {}}}}, "/properties/a/not"),
    ({"properties": {"a/b~c": {"if": {}}}}, "/properties/a~1b~0c/if"),
    ({"items": {"uniqueItems": True}}, "/items/uniqueItems"),
    ({"type": "array", "uniqueItems": True, "items": {"type": "string"}}, "/uniqueItems"),
    ({"type": "array", "uniqueItems": True, "items": {"enum": [*range(6)]}}, "/uniqueItems"),
    ({"items": {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}}, "/items"),
    ({"$defs": {"a": {"multipleOf": 997}}, "$ref": "#/$defs/a", "multipleOf": 991}, ""),
    ({"$ref": "#"}, ""),
    ({"allOf": [{"$ref": "#/allOf/0"}]}, "/allOf/0"),
    ({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}, "type": "object"}, "/$defs/a"),
    ({"anyOf": [{}, {"contains": {}}]}, "/anyOf/1/contains"),
    ({"$defs": {"a": {"dependentRequired": {}}}}, "/$defs/a/dependentRequired"),
    ({"unevaluatedProperties": False}, "/unevaluatedProperties"),
    ({"propertyNames": {}}, "/propertyNames"),
    ({"nullable": True, "type": "string"}, "/nullable"),
    ({"type": "strin"}, "/type"),
    ({"type": []}, "/type"),
    ({"enum": []}, "/enum"),
    ({"anyOf": []}, "/anyOf"),
    ({"properties": []}, "/properties"),
    ({"properties": {"a": 1}}, "/properties/a"),
    ({"required": "a"}, "/required"),
    ({"minLength": -1}, "/minLength"),
    ({"minItems": 1.5}, "/minItems"),
    ({"maximum": "1"}, "/maximum"),
    ({"multipleOf": 0}, "/multipleOf"),
    ({"multipleOf": 999_983}, "/multipleOf"),
    ({"pattern": 1}, "/pattern"),
    ({"format": "iri", "type": "string"}, "/format"),
    ({"$ref": "#/nope"}, "/$ref"),
    ({"$ref": "https://example.com/schema"}, "/$ref"),
    ({"const": {"$ref": "#/x"}, "properties": {"a": {"$ref": "#/const"}}}, "/properties/a/$ref"),
    ({"$defs": {"a": {"$id": "urn:a"}}, "$ref": "urn:b"}, "/$ref"),
    ({"$defs": {"a": {"$id": "urn:a"}, "b": {"$id": "urn:a"}}, "$ref": "urn:a"}, "/$ref"),
    ({"$defs": {"a": {"$anchor": "a"}, "b": {"$anchor": "a"}}, "$ref": "#a"}, "/$ref"),
    ({"$defs": {"a": {"$id": "urn:a", "items": {"$ref": "#/$defs/b"}}, "b": {}}}, "/$defs/a/items/$ref"),
    ({"$defs": {"a": {"id": "a", "items": {"$ref": "#/$defs/b"}}, "b": {}}}, "/$defs/a/items/$ref"),
    ({"$defs": {"a": {"$id": "a", "$ref": "#/$defs/b"}, "b": {}}}, "/$defs/a/$ref"),
    ({"$ref": "http://[a"}, "/$ref"),
    ({"minProperties": 2, "type": "object"}, "/minProperties"),
    ({"properties": {"a": {"type": "string", "pattern": "(?=x)"}, "b": {}}}, "/properties/a"),
    ({"properties": {"p": {"oneOf": [{"minimum": 1}, {"maximum": 5}]}}}, "/properties/p"),
]


@pytest.mark.parametrize(("schema", "pointer"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_a_refusal_points_to_the_keyword(schema: Any, pointer: str) -> None:
    with pytest.raises(RequestError) as caught:
        matcher(json=schema)
    assert caught.value.param == "structured_outputs.json"
    assert caught.value.code == "unsupported_schema"
    shown = caught.value.message.partition("#")[2].partition(": ")[0]
    assert shown == pointer
    value = schema
    for part in pointer.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        value = value[int(part)] if isinstance(value, list) else value[part]


def test_a_misspelt_keyword_is_recognised() -> None:
    with pytest.raises(SchemaError, match="did you mean additionalProperties"):
        narrow({"additionalProperty": False}, SchemaOptions())


def test_only_schema_positions_are_looked_at() -> None:
    """Words inside values and names are not keywords, and annotations do not reach the grammar."""
    schema = {
        "description": {"not": 1},
        "default": {"not": {}},
        "x-guidance": {"lenient": True},
        "properties": {"not": {"const": {"uniqueItems": True}}, "$id": {"enum": [{"if": 1}]}},
        "type": "object",
    }
    narrowed = narrow(schema, SchemaOptions())
    assert narrowed == {"type": "object", "properties": schema["properties"], "additionalProperties": False}


CLOSED = {"additionalProperties": False}
OBJECT = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (OBJECT, OBJECT | CLOSED),
        (OBJECT | {"additionalProperties": True}, OBJECT | {"additionalProperties": True}),
        ({"type": "object"}, {"type": "object"}),
        (OBJECT | {"required": ["b"]}, OBJECT | {"required": ["b"]}),
        ({"anyOf": [OBJECT, A]}, {"anyOf": [OBJECT | CLOSED, A]}),
        ({"allOf": [OBJECT]}, {"allOf": [OBJECT | CLOSED]}),
        ({"allOf": [OBJECT, {"required": ["b"]}]}, {"allOf": [OBJECT, {"required": ["b"]}]}),
        (OBJECT | {"anyOf": [{"required": ["b"]}]}, OBJECT | {"anyOf": [{"required": ["b"]}]}),
        ({"oneOf": [OBJECT, {"type": "object"}]}, {"oneOf": [OBJECT, {"type": "object"}]}),
        (
            {"$defs": {"o": OBJECT}, "properties": {"x": {"$ref": "#/$defs/o"}}},
            {"$defs": {"o": OBJECT | CLOSED}, "properties": {"x": {"$ref": "#/$defs/o"}}} | CLOSED,
        ),
        (
            {"$defs": {"o": OBJECT}, "allOf": [{"$ref": "#/$defs/o"}, {"required": ["b"]}]},
            {"$defs": {"o": OBJECT}, "allOf": [{"$ref": "#/$defs/o"}, {"required": ["b"]}]},
        ),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_objects_are_closed_where_nothing_else_has_a_say(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert narrow(schema, SchemaOptions()) == expected
    assert narrow(schema, SchemaOptions(closed=False)) == schema


def test_closing_the_branches_of_a_one_of_would_allow_more() -> None:
    """{"b": 1} is valid for both branches as they were given; closed, the first would not see it."""
    schema = {
        "oneOf": [{"type": "object", "properties": {"a": B}}, {"type": "object", "properties": {"b": B}, "required": ["b"]}]
    }
    try:
        made = matcher(json=schema)
    except RequestError:
        return
    assert not accepts(made, '{"b": 1}')


def test_branches_that_are_named_are_told_apart() -> None:
    """The names tell them apart, unless a pointer is one of another schema."""
    cat, dog = DISCRIMINATED["oneOf"]
    named = {"$defs": {"cat": {"$id": "urn:cat"} | cat, "dog": {"$anchor": "dog"} | dog}}
    kinds = named | {"oneOf": [{"$ref": "urn:cat"}, {"$ref": "#dog"}]}
    narrowed = narrow(kinds, SchemaOptions())
    assert isinstance(narrowed, dict) and narrowed["anyOf"] == [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]
    assert all(kind["additionalProperties"] is False for kind in narrowed["$defs"].values())
    inner = {"$id": "urn:n", "$defs": {"cat": dog, "dog": dog}, "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]}
    narrowed = narrow({"$defs": {"cat": cat, "dog": dog}, "items": inner}, SchemaOptions())
    assert isinstance(narrowed, dict)
    assert all("additionalProperties" not in kind for kind in narrowed["items"]["$defs"].values())


CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": B}, "required": ["lives"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}, "name": A}, "required": ["name"]}
FISH = {"type": "object", "properties": {"kind": {"const": 3}}, "required": ["kind"]}
PETS = {"$defs": {"cat": CAT, "dog": DOG, "fish": FISH}}
REFS = [{"$ref": f"#/$defs/{name}"} for name in PETS["$defs"]]
BY_KIND = {"discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/cat"}}}


@pytest.mark.parametrize(
    "schema",
    [
        PETS | BY_KIND | {"oneOf": REFS},
        PETS | {"oneOf": [{"oneOf": REFS[:2], **BY_KIND}, REFS[2]], **BY_KIND},
    ],
    ids=["references", "unions"],
)
def test_a_one_of_with_a_discriminator_is_an_any_of(schema: dict[str, Any]) -> None:
    made = matcher(json=schema)
    for valid in ({"kind": "cat", "lives": 9}, {"kind": "wolf", "name": "a"}, {"kind": 3}):
        assert accepts(made, json.dumps(valid)), valid
    # The discriminator is there, though not required: {"lives": 9, "name": "a"} is valid for two.
    for other in ({"lives": 9}, {"kind": "dog", "lives": 9}, {"kind": "fish"}):
        assert not accepts(made, json.dumps(other)), other


@pytest.mark.parametrize(
    "branches",
    [
        [{"properties": {"kind": {"const": name}}, "required": ["kind"]} for name in "ab"],
        [CAT, DOG],
        [FISH, FISH | {"properties": {"kind": {"const": 3.0}}}],
    ],
)
def test_branches_that_share_a_value_stay_a_one_of(branches: list[dict[str, Any]]) -> None:
    narrowed = narrow({"oneOf": branches}, SchemaOptions())
    assert isinstance(narrowed, dict) and "oneOf" in narrowed


def test_a_refusal_of_a_one_of_names_no_option() -> None:
    with pytest.raises(RequestError, match="exclude each other") as caught:
        matcher(json={"oneOf": [{"type": "string"}, {"minLength": 2}]})
    assert "coerce" not in caught.value.message


@pytest.mark.parametrize("pattern", ["^a$", "^[ab]$", "^(a|b)$"])
def test_an_object_without_a_further_name_is_refused(pattern: str) -> None:
    """Behind a comma, its grammar waited for a name that there is not, and failed."""
    closed = {"type": "object", "additionalProperties": False}
    with pytest.raises(RequestError, match="#/items/patternProperties: it allows no name beside"):
        matcher(json={"type": "array", "items": closed | {"properties": {"a": B, "b": B}, "patternProperties": {pattern: B}}})
    made = matcher(json=closed | {"properties": {"b": B}, "patternProperties": {pattern.replace("b", "c"): B}})
    assert accepts(made, '{"b": 1, "a": 2}') and not accepts(made, '{"b": 1, "d": 2}')


def test_a_pointer_to_a_branch_leads_there() -> None:
    made = matcher(json={"oneOf": [A, {"type": "array", "items": {"$ref": "#/oneOf/0"}}]})
    assert accepts(made, '["a"]') and not accepts(made, "[1]")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": B}, "additionalProperties": True},
        {"type": "object", "patternProperties": {"^a": B}},
        {"type": "array", "items": {"type": "object", "properties": {"a": B}, "required": ["b"]}},
    ],
)
def test_no_escape_spells_a_key_that_the_schema_names(schema: dict[str, Any]) -> None:
    made = matcher(json=schema)
    around = "[{}]" if schema["type"] == "array" else "{}"
    assert accepts(made, around.replace("{}", '{"a": 1, "b": "\\n"}'))
    for key in (r"\u0061", r"\u0061b", r"b\u0062"):
        assert not accepts(made, around.replace("{}", f'{{"{key}": "x", "b": 1}}'))
    assert accepts(matcher(json={"type": "object"}), r'{"\u0001": "\u0001"}')


def test_integers_are_bounded() -> None:
    bound = 10**18
    assert narrow(B, SchemaOptions()) == {"type": "integer", "minimum": -bound, "maximum": bound}
    assert narrow({"type": "integer", "minimum": -(2**63)}, SchemaOptions()) == {
        "type": "integer",
        "minimum": -bound,
        "maximum": bound,
    }
    assert narrow({"type": "integer", "minimum": 2**70}, SchemaOptions()) == {"type": "integer", "minimum": 2**70}
    assert narrow({"type": "integer", "const": 2**70}, SchemaOptions()) == {"type": "integer", "const": 2**70}


def test_limits_are_named() -> None:
    deep: Any = {}
    for _ in range(70):
        deep = {"items": deep}
    with pytest.raises(SchemaError, match="deeper than 64"):
        narrow(deep, SchemaOptions())
    # 100 kB, of which the pointers and URIs of the schemas would be 100 MB.
    long, names = "k" * 100_000, [f"a{number}" for number in range(1000)]
    for value in (
        {"properties": {long: {"properties": {name: {} for name in names}}}},
        {"$id": f"http://a.org/{long}/b", "$defs": {name: {"$id": name} for name in names}},
        {"$id": f"http://a.org/{long}", "$defs": {name: {"$anchor": name} for name in names}},
    ):
        with pytest.raises(SchemaError, match="too long"):
            narrow(value, SchemaOptions())
    with pytest.raises(SchemaError, match="must point to"):
        narrow({"$defs": {long: {"$id": "n"}}, "prefixItems": [{"$ref": "n"} for _ in names]}, SchemaOptions())
    with pytest.raises(SchemaError, match="more than 20000"):
        narrow({"enum": list(range(20_001))}, SchemaOptions())


def test_formats_are_annotations_where_the_request_is_not_strict() -> None:
    schema = {"type": "string", "format": "iri"}
    assert accepts(matcher(json=schema, strict=False), '"x"')
    assert accepts(matcher(json={"type": "integer", "format": "int32"}), "7")
