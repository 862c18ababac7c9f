"""Tools that a conversation offers, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import RequestError, unsupported, wrong_type
from headrace.options import shown
from headrace.text.content import no_others

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_FIELDS = ("type", "function")
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict", "return")
"""``return`` describes the result, in the schemas that transformers makes of Python functions; templates may show it."""


def checked_tools(given: Any, where: str = "tools", *, legacy: bool = False) -> list[dict[str, Any]]:
    """The tools that a request offers. ``legacy``: they are OpenAI's old functions.

    Raises:
        RequestError: names the part at fault.
    """
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise wrong_type(where, "a list of objects")
    tools, names = [], set()
    for index, tool in enumerate(given):
        place = f"{where}[{index}]"
        if not isinstance(tool, Mapping):
            raise wrong_type(place, "an object")
        tool = {"type": "function", "function": tool} if legacy else tool
        if tool.get("type") != "function":
            raise unsupported(f"{place}.type", f"{place}.type is {shown(tool.get('type'))}: there are functions only")
        no_others(place, tool, _FIELDS)
        inner = place if legacy else f"{place}.function"
        name = _checked_function(tool.get("function"), inner)
        if name in names:
            raise RequestError(f"{inner}.name {name!r} is there twice", f"{inner}.name")
        names.add(name)
        tools.append(dict(tool))
    return tools


def _checked_function(function: Any, where: str) -> str:
    if not isinstance(function, Mapping):
        raise wrong_type(where, "an object")
    no_others(where, function, _FUNCTION_FIELDS)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(f"{where}.name must have 1 to 64 letters, digits, '_', '-' or '.'", f"{where}.name")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise wrong_type(f"{where}.parameters", "a JSON Schema object")
    if parameters is not None and parameters.get("type", "object") != "object":
        message = f"{where}.parameters.type must be object, not {shown(parameters['type'])}: arguments have names"
        raise RequestError(message, f"{where}.parameters.type")
    if not isinstance(function.get("description") or "", str):
        raise wrong_type(f"{where}.description", "a string")
    if not isinstance(function.get("strict"), bool | None):
        raise wrong_type(f"{where}.strict", "true or false")
    return name
