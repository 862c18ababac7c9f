"""The tools that a chat request offers, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.errors import RequestError
from headrace.options import shown
from headrace.server.schema import ChatBody
from headrace.server.settings import ServerSettings

if TYPE_CHECKING:
    from headrace.text.parse.recognise import AnswerFormats

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_CONSTRAINED = "it needs constrained decoding, which this version does not have"


class Tools(NamedTuple):
    """What the model is shown, and whether its answer is searched for calls."""

    schemas: list[dict[str, Any]]
    calls: bool


def offered(body: ChatBody, answers: AnswerFormats | None, settings: ServerSettings) -> Tools:
    """The tools of a request; OpenAI's old ``functions`` are tools too.

    Raises:
        RequestError: 400, naming the part at fault; or the model's tool calls cannot be read.
    """
    given, where = body.tools, "tools"
    if body.functions is not None:
        if given is not None:
            raise _invalid("functions and tools exclude each other", "functions")
        given, where = body.functions, "functions"
    schemas = _schemas([] if given is None else given, where, legacy=where == "functions")
    choice, choice_where = body.tool_choice, "tool_choice"
    if body.function_call is not None:
        if choice is not None:
            raise _invalid("function_call and tool_choice exclude each other", "function_call")
        choice, choice_where = body.function_call, "function_call"
    _check_choice(choice, choice_where)
    if not schemas or choice == "none":
        return Tools(schemas, False)
    if not settings.enable_auto_tool_choice:
        raise _unsupported("this server runs with --no-enable-auto-tool-choice and takes tool_choice none only", choice_where)
    if answers is None or answers.tools is None:
        why = answers.recognised.tools_by if answers is not None else "there is no tokenizer"
        raise _unsupported(
            f"{where}: this model's format of tool calls is not known ({why}): name it with --tool-call-parser, or set "
            "tool_choice to none",
            where,
        )
    if not answers.renders_tools:
        raise _unsupported(f"{where}: this model's chat template shows no tools: give another with --chat-template", where)
    return Tools(schemas, True)


def _schemas(given: Any, where: str, *, legacy: bool) -> list[dict[str, Any]]:
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise _wrong_type(where, "a list of objects")
    tools, names = [], set()
    for index, tool in enumerate(given):
        place = f"{where}[{index}]"
        if not isinstance(tool, Mapping):
            raise _wrong_type(place, "an object")
        tool = {"type": "function", "function": tool} if legacy else tool
        if tool.get("type") != "function":
            raise _unsupported(f"{place}.type is {shown(tool.get('type'))}: there are functions only", f"{place}.type")
        inner = place if legacy else f"{place}.function"
        name = _checked_function(tool.get("function"), inner)
        if name in names:
            raise _invalid(f"{inner}.name {name!r} is there twice", f"{inner}.name")
        names.add(name)
        tools.append(dict(tool))
    return tools


def _checked_function(function: Any, where: str) -> str:
    if not isinstance(function, Mapping):
        raise _wrong_type(where, "an object")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _invalid(f"{where}.name must have 1 to 64 letters, digits, '_', '-' or '.'", f"{where}.name")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise _wrong_type(f"{where}.parameters", "a JSON Schema object")
    if not isinstance(function.get("description") or "", str):
        raise _wrong_type(f"{where}.description", "a string")
    if function.get("strict"):
        raise _unsupported(f"{where}.strict is not supported: {_CONSTRAINED}", f"{where}.strict")
    return name


def _check_choice(choice: Any, where: str) -> None:
    if choice in (None, "none", "auto"):
        return
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind in ("required", "function", "allowed_tools") or (where == "function_call" and isinstance(choice, Mapping)):
        raise _unsupported(f"{where} {shown(kind or 'function')} is not supported: {_CONSTRAINED}", where)
    raise _invalid(f"{where} must be none or auto", where)


def _invalid(message: str, param: str) -> RequestError:
    return RequestError(message, param, code="invalid_value")


def _wrong_type(param: str, accepted: str) -> RequestError:
    return RequestError(f"{param} must be {accepted}", param, code="invalid_type")


def _unsupported(message: str, param: str) -> RequestError:
    return RequestError(message, param, code="unsupported_parameter")
