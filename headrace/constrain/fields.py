"""Other names under which a request may say what its output must be, and what they mean in StructuredOutputsParams."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec

from headrace.errors import RequestError, wrong_type
from headrace.options import OptionSpec, api, options, shown

_SCHEMA = {"anyOf": [{"type": "object"}, {"type": "string"}]}
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ConstraintFields(msgspec.Struct, frozen=True, kw_only=True):
    """The declaration of these names."""

    response_format: Annotated[
        Any, OptionSpec(schema={"type": "object"}, apis=api("OpenAI", "chat") | api("vLLM", "completions"))
    ] = None
    """Form of the output: an object with type text, json_object, json_schema or structural_tag."""
    guided_json: Annotated[Any, OptionSpec(schema=_SCHEMA, apis=api("vLLM"))] = None
    """Older name of structured_outputs.json."""
    guided_regex: Annotated[str | None, OptionSpec(apis=api("vLLM"))] = None
    """Older name of structured_outputs.regex."""
    guided_choice: Annotated[list[str] | None, OptionSpec(apis=api("vLLM"))] = None
    """Older name of structured_outputs.choice."""
    guided_grammar: Annotated[str | None, OptionSpec(apis=api("vLLM"))] = None
    """Older name of structured_outputs.grammar."""
    guided_whitespace_pattern: Annotated[str | None, OptionSpec(apis=api("vLLM"))] = None
    """Older name of structured_outputs.whitespace_pattern."""
    json_schema: Annotated[Any, OptionSpec(schema=_SCHEMA, apis=api("SGLang"))] = None
    """SGLang's and llama.cpp's name of structured_outputs.json."""
    regex: Annotated[str | None, OptionSpec(apis=api("SGLang"))] = None
    """SGLang's name of structured_outputs.regex."""
    ebnf: Annotated[str | None, OptionSpec(apis=api("SGLang"))] = None
    """SGLang's name of structured_outputs.grammar."""
    grammar: Annotated[str | None, OptionSpec(apis=api("llama.cpp"))] = None
    """llama.cpp's name of structured_outputs.grammar."""


NAMES = tuple(options(ConstraintFields))
_MEANING = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}


def folded(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Request fields with what these names say in ``structured_outputs``.

    Raises:
        RequestError: two fields hold a constraint, or response_format cannot be read.
    """
    kept = {name: value for name, value in fields.items() if name not in NAMES}
    if len(kept) == len(fields):
        return kept
    found: dict[str, Any] = {}
    holders = ["structured_outputs"] if kept.get("structured_outputs") is not None else []
    for name in NAMES:
        value = fields.get(name)
        if value is None or name == "guided_whitespace_pattern":
            continue
        meaning = _response_format(value) if name == "response_format" else {_MEANING[name]: value}
        if meaning:
            holders.append(name)
            found |= meaning
    if len(holders) > 1:
        raise RequestError(f"{holders[0]} and {holders[1]} both say what the output must be: give one of them", holders[1])
    whitespace = fields.get("guided_whitespace_pattern")
    if whitespace is not None:
        if not found.keys() & {"json", "json_object"}:
            message = "guided_whitespace_pattern is for guided_json and the other names of JSON schemas"
            raise RequestError(message, "guided_whitespace_pattern")
        found["whitespace_pattern"] = whitespace
    return kept | {"structured_outputs": found} if found else kept


def sources(fields: Mapping[str, Any]) -> dict[str, str]:
    """Parameter of the engine -> the field of this request that sets it."""
    names = {}
    if "guided_whitespace_pattern" in fields:
        names["structured_outputs.whitespace_pattern"] = "guided_whitespace_pattern"
    for name, value in fields.items():
        if name in _MEANING and value is not None:
            names |= {f"structured_outputs.{_MEANING[name]}": name, "structured_outputs": name}
        elif name == "response_format" and isinstance(value, dict):
            inner = "response_format.json_schema.schema" if value.get("type") == "json_schema" else "response_format.schema"
            names |= {"structured_outputs.json": inner, "structured_outputs": name, "structured_outputs.json_object": name}
            names["structured_outputs.structural_tag"] = name
    return names


def _response_format(value: Any) -> dict[str, Any]:
    """``response_format`` in fields of StructuredOutputsParams; empty for free text."""
    if not isinstance(value, dict):
        raise wrong_type("response_format", f"an object, not {shown(value)}")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _FORMATS:
        raise RequestError(
            f"response_format.type must be one of {', '.join(_FORMATS)}, not {shown(kind)}", "response_format.type"
        )
    allowed, read = _FORMATS[kind]
    _only(value, ("type", *allowed), "response_format")
    return read(value)


def _json_object(value: dict[str, Any]) -> dict[str, Any]:
    schema = value.get("schema")
    return {"json_object": True} if schema is None else {"json": schema}


def _json_schema(value: dict[str, Any]) -> dict[str, Any]:
    where, inner = "response_format.json_schema", value.get("json_schema")
    if not isinstance(inner, dict):
        raise wrong_type(where, f"an object with name and schema, not {shown(inner)}")
    _only(inner, ("name", "description", "schema", "strict"), where)
    name = inner.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(f"{where}.name must be 1 to 64 letters, digits, - and _, not {shown(name)}", f"{where}.name")
    schema, strict, described = inner.get("schema"), inner.get("strict"), inner.get("description")
    if not isinstance(schema, dict):
        raise wrong_type(f"{where}.schema", f"a JSON Schema, not {shown(schema)}")
    if strict is not None and not isinstance(strict, bool):
        raise wrong_type(f"{where}.strict", f"true or false, not {shown(strict)}")
    if described is not None and not isinstance(described, str):
        raise wrong_type(f"{where}.description", "a string")
    return {"json": schema} | ({"strict": False} if strict is False else {})


_FORMATS: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "text": ((), lambda value: {}),
    "json_object": (("schema",), _json_object),
    "json_schema": (("json_schema",), _json_schema),
    "structural_tag": (("format", "structures", "triggers"), lambda value: {"structural_tag": value}),
}
"""Type of a ``response_format`` -> the fields that it may have, and what reads it."""


def _only(value: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    unknown = next((name for name in value if name not in known), None)
    if unknown is not None:
        message = f"{where} has no field {shown(unknown)}; it has {', '.join(known)}"
        raise RequestError(message, f"{where}.{shown(unknown)[1:-1]}", code="unknown_parameter")
