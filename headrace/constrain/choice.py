"""The calls of tools that a request asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from headrace.constrain.compose import CallRules, TextGrammar, held_tools, strict_at
from headrace.errors import RequestError, wrong_type
from headrace.options import shown


@dataclasses.dataclass(frozen=True)
class Choice:
    """The tools that a request lets the model call."""

    mode: str
    """none, auto or required"""
    names: frozenset[str] | None = None
    """Names of these tools; None: all."""
    named: bool = False
    param: str = "tool_choice"


def read_choice(choice: Any, schemas: Sequence[Mapping[str, Any]], where: str = "tool_choice") -> Choice:
    """``tool_choice``, or OpenAI's old ``function_call``, of a request with these checked tools.

    Raises:
        RequestError: names the part at fault.
    """
    return dataclasses.replace(_choice(choice, schemas, where), param=where)


def _choice(choice: Any, schemas: Sequence[Mapping[str, Any]], where: str) -> Choice:
    if choice is None or choice in ("none", "auto"):
        return Choice(choice or "auto")
    names = frozenset(tool["function"]["name"] for tool in schemas)
    if choice == "required" and where == "tool_choice":
        if not names:
            raise RequestError(f"{where} is required, and there are no tools", where)
        return Choice("required")
    if not isinstance(choice, Mapping):
        kinds = "none, auto, required or an object" if where == "tool_choice" else "none, auto or an object"
        raise RequestError(f"{where} must be {kinds}", where)
    if where == "function_call":
        return Choice("required", frozenset({_offered(choice, where, names)}), named=True)
    kind = choice.get("type")
    if kind == "function":
        return Choice("required", frozenset({_offered(choice.get("function"), f"{where}.function", names)}), named=True)
    if kind != "allowed_tools":
        raise RequestError(f"{where}.type must be function or allowed_tools, not {shown(kind)}", f"{where}.type")
    allowed, inner = choice.get("allowed_tools"), f"{where}.allowed_tools"
    if not isinstance(allowed, Mapping):
        raise wrong_type(inner, "an object with mode and tools")
    mode, tools = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise RequestError(f"{inner}.mode must be auto or required", f"{inner}.mode")
    if not isinstance(tools, list) or not tools:
        raise RequestError(f"{inner}.tools must be a list of at least one function", f"{inner}.tools")
    found = set()
    for index, tool in enumerate(tools):
        place = f"{inner}.tools[{index}]"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise RequestError(f"{place} must be an object of the type function", place)
        found.add(_offered(tool.get("function"), f"{place}.function", names))
    return Choice(mode, frozenset(found))


def _offered(function: Any, where: str, names: frozenset[str]) -> str:
    """The name of a function that the request offers."""
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in names:
        raise RequestError(f"{where}.name must be one of the tools that the request offers, not {shown(name)}", f"{where}.name")
    return name


def rules_of(
    schemas: Sequence[Mapping[str, Any]],
    choice: Choice,
    where: str = "tools",
    *,
    content: bool = False,
    parallel: bool = True,
    grammars: Mapping[str, TextGrammar] = MappingProxyType({}),
) -> CallRules | None:
    """Returns the rules of calls that a grammar enforces; None: nothing in the request asks for a grammar.

    Args:
        where: The parameter that has the tools.
        content: The request says what the content must be.
        grammars: As for ``held_tools``.
    """
    required, names = choice.mode == "required", choice.names
    held = held_tools(schemas, where, always=required, grammars=grammars)
    held = tuple(tool for tool in held if names is None or tool.name in names)
    strict = strict_at(held)
    if not (required or names is not None or strict or content):
        return None
    param = choice.param if required or names is not None else strict or "response_format"
    return CallRules(held, required, parallel and not choice.named, param)
