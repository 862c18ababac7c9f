"""Constraints for measurements: grammars that go on for as many tokens as a workload asks for."""

from __future__ import annotations

import json
from typing import Any, Literal

from headrace.sampling_params import StructuredOutputsParams

Constrained = Literal["json-schema"]

_NAME = {"type": "string", "maxLength": 40}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"name": _NAME, "age": {"type": "integer"}}, "required": ["name", "age"]},
    {"type": "object", "properties": {"tags": {"type": "array", "items": _NAME, "minItems": 4}}, "required": ["tags"]},
    {"type": "object", "properties": {"kind": {"enum": ["a", "b", "other"]}, "text": _NAME}, "required": ["kind", "text"]},
    {"type": "object", "properties": {"at": {"type": "string", "format": "date-time"}, "on": {"type": "boolean"}}},
]


def constraint_of(index: int) -> StructuredOutputsParams:
    """Lines of JSON of one of the schemas, without end. ``index``: the request's."""
    schema = {"additionalProperties": False, **SCHEMAS[index % len(SCHEMAS)]}
    return StructuredOutputsParams(grammar=f'start: (item "\\n")+\nitem: %json {json.dumps(schema)}')
