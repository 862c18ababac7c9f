"""The tools that a chat request offers, checked, and which calls it asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.constrain.compose import CallRules, held_tools, strict_at
from headrace.constrain.fields import NAMES
from headrace.errors import RequestError
from headrace.options import shown
from headrace.server.schema import ChatBody
from headrace.server.settings import ServerSettings
from headrace.text.tools import checked_tools

if TYPE_CHECKING:
    from headrace.text.answers import AnswerFormats


class Tools(NamedTuple):
    """What the model is shown, and what its answer may have of it."""

    schemas: list[dict[str, Any]]
    calls: bool
    """Whether the answer is searched for calls."""
    rules: CallRules | None = None
    """None: the model calls what it likes, as it likes."""


def names_function(body: ChatBody) -> bool:
    """Whether the choice of a checked request is one function."""
    choice = body.tool_choice if body.function_call is None else body.function_call
    return isinstance(choice, Mapping) and choice.get("type", "function") == "function"


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
    schemas = checked_tools([] if given is None else given, where, legacy=where == "functions")
    choice, choice_where = body.tool_choice, "tool_choice"
    if body.function_call is not None:
        if choice is not None:
            raise _invalid("function_call and tool_choice exclude each other", "function_call")
        choice, choice_where = body.function_call, "function_call"
    choice = _choice(choice, choice_where, schemas)
    if not schemas or choice.mode == "none":
        return Tools([] if settings.exclude_tools_when_tool_choice_none else schemas, False)
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
    return Tools(schemas, True, _rules(schemas, choice, body, where, choice_where))


@dataclasses.dataclass(frozen=True)
class _Choice:
    mode: str
    """none, auto or required"""
    names: frozenset[str] | None = None
    """None: all."""
    named: bool = False


def _choice(choice: Any, where: str, schemas: list[dict[str, Any]]) -> _Choice:
    if choice is None or choice in ("none", "auto"):
        return _Choice(choice or "auto")
    names = frozenset(tool["function"]["name"] for tool in schemas)
    if choice == "required" and where == "tool_choice":
        if not names:
            raise _invalid(f"{where} is required, and there are no tools", where)
        return _Choice("required")
    if not isinstance(choice, Mapping):
        kinds = "none, auto, required or an object" if where == "tool_choice" else "none, auto or an object"
        raise _invalid(f"{where} must be {kinds}", where)
    if where == "function_call":
        return _Choice("required", frozenset({_offered(choice, where, names)}), named=True)
    kind = choice.get("type")
    if kind == "function":
        return _Choice("required", frozenset({_offered(choice.get("function"), f"{where}.function", names)}), named=True)
    if kind != "allowed_tools":
        raise _invalid(f"{where}.type must be function or allowed_tools, not {shown(kind)}", f"{where}.type")
    allowed, inner = choice.get("allowed_tools"), f"{where}.allowed_tools"
    if not isinstance(allowed, Mapping):
        raise RequestError(f"{inner} must be an object with mode and tools", inner, code="invalid_type")
    mode, tools = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise _invalid(f"{inner}.mode must be auto or required", f"{inner}.mode")
    if not isinstance(tools, list) or not tools:
        raise _invalid(f"{inner}.tools must be a list of at least one function", f"{inner}.tools")
    found = set()
    for index, tool in enumerate(tools):
        place = f"{inner}.tools[{index}]"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise _invalid(f"{place} must be an object of the type function", place)
        found.add(_offered(tool.get("function"), f"{place}.function", names))
    return _Choice(mode, frozenset(found))


def _offered(function: Any, where: str, names: frozenset[str]) -> str:
    """The name of a function that the request offers."""
    name = function.get("name") if isinstance(function, Mapping) else None
    if name not in names:
        raise _invalid(f"{where}.name must be one of the tools that the request offers, not {shown(name)}", f"{where}.name")
    return str(name)


def _rules(schemas: list[dict[str, Any]], choice: _Choice, body: ChatBody, where: str, choice_where: str) -> CallRules | None:
    """What a grammar holds of the calls; None: nothing asks for one."""
    required = choice.mode == "required"
    content = any(body.sampling.get(name) is not None for name in NAMES if name != "guided_whitespace_pattern")
    content = content and (body.sampling.get("response_format") or {}) != {"type": "text"}
    content = content or body.sampling.get("structured_outputs") is not None
    names = choice.names
    held = tuple(tool for tool in held_tools(schemas, where, always=required) if names is None or tool.name in names)
    strict = strict_at(held)
    if not (required or names is not None or strict or content):
        return None
    param = choice_where if required or names is not None else strict or "response_format"
    return CallRules(held, required, body.parallel_tool_calls and not choice.named, param)


def _invalid(message: str, param: str) -> RequestError:
    return RequestError(message, param, code="invalid_value")


def _unsupported(message: str, param: str) -> RequestError:
    return RequestError(message, param, code="unsupported_parameter")
