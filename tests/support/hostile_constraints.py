"""Constraints that cost much to compile, or to hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BOMBS: dict[str, dict[str, Any]] = {
    "repetition": {"regex": "(a{1,1000}){1,1000}"},
    "repetition of repetition": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "intersections": {"grammar": "start: X\nX: /(.*a.{15})/ & /(.*b.{15})/ & ~/(.*c.{15})/"},
    "exponential": {"grammar": "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(60)) + '\na60: "x"'},
    "ambiguous": {"grammar": 'start: s\ns: s s | s s s | "a" | ""'},
    "merges": {"json": {"allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {}}} for j in range(4)]} for i in range(8)]}},
    "references": {
        "json": {
            "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)} | {"d30": {}},
            "$ref": "#/$defs/d0",
        }
    },
    "cycle": {"json": {"$ref": "#"}},
    "many values": {"json": {"enum": [f"value {i}" for i in range(15_000)]}},
    "many choices": {"choice": [f"value {i}" for i in range(15_000)]},
    "long": {"json": {"type": "string", "maxLength": 10**6}},
    "dots": {"regex": "(.*a.*b.*c.*d.*e.*){20}"},
}
LINKS: dict[str, Callable[[str], dict[str, Any]]] = {
    "$ref": lambda to: {"$ref": to},
    "anyOf": lambda to: {"anyOf": [{"$ref": to}, {"type": "null"}]},
    "allOf": lambda to: {"allOf": [{"$ref": to}, {"type": "integer"}]},
    "properties": lambda to: {"properties": {"a": {"$ref": to}}},
    "patternProperties": lambda to: {"patternProperties": {"a": {"$ref": to}}},
    "additionalProperties": lambda to: {"additionalProperties": {"$ref": to}},
    "items": lambda to: {"items": {"$ref": to}},
    "prefixItems": lambda to: {"prefixItems": [{"$ref": to}]},
}


def chain(link: str, count: int) -> dict[str, Any]:
    schemas = {f"d{place}": LINKS[link](f"#/$defs/d{place + 1}") for place in range(count)}
    return {"$defs": schemas | {f"d{count}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def rules(count: int) -> str:
    return "start: r0\n" + "\n".join(f"r{place}: r{place + 1}" for place in range(count)) + f'\nr{count}: "x"'
