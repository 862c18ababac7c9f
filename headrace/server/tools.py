"""The tools that a chat request offers, checked, and which calls it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.constrain.choice import read_choice, rules_of
from headrace.constrain.compose import CallRules, TextGrammar
from headrace.constrain.fields import NAMES
from headrace.errors import RequestError, unsupported
from headrace.server.schema import ChatBody
from headrace.server.settings import ServerSettings
from headrace.text.tools import checked_tools

if TYPE_CHECKING:
    from headrace.text.answers import AnswerFormats


class Tools(NamedTuple):
    """The tools that the model is shown, and the calls that its answer may have."""

    schemas: list[dict[str, Any]]
    calls: bool
    """Whether the answer is searched for calls."""
    rules: CallRules | None = None
    """None: the model calls what it likes, as it likes."""


def names_function(body: ChatBody) -> bool:
    """Whether the choice of a checked request is one function."""
    choice = body.tool_choice if body.function_call is None else body.function_call
    return isinstance(choice, Mapping) and choice.get("type", "function") == "function"


def parallel_calls(body: ChatBody) -> bool:
    """Whether an answer may have several calls; to the older ``functions`` it has one."""
    return body.parallel_tool_calls and body.functions is None


def offered(
    body: ChatBody,
    answers: AnswerFormats | None,
    settings: ServerSettings,
    grammars: Mapping[str, TextGrammar] = MappingProxyType({}),
) -> Tools:
    """The tools of a request; OpenAI's old ``functions`` are tools too. ``grammars``: as for ``held_tools``.

    Raises:
        RequestError: 400, naming the part at fault; or the model's tool calls cannot be read.
    """
    given, where = body.tools, "tools"
    if body.functions is not None:
        if given is not None:
            raise RequestError("functions and tools exclude each other", "functions")
        given, where = body.functions, "functions"
    schemas = checked_tools([] if given is None else given, where, legacy=where == "functions")
    choice, choice_where = body.tool_choice, "tool_choice"
    if body.function_call is not None:
        if choice is not None:
            raise RequestError("function_call and tool_choice exclude each other", "function_call")
        choice, choice_where = body.function_call, "function_call"
    choice = read_choice(choice, schemas, choice_where)
    if not schemas or choice.mode == "none":
        return Tools([] if settings.exclude_tools_when_tool_choice_none else schemas, False)
    if not settings.enable_auto_tool_choice:
        message = "this server runs with --no-enable-auto-tool-choice and takes tool_choice none only"
        raise unsupported(choice_where, message)
    if answers is None or answers.tools is None:
        why = answers.recognised.tools_by if answers is not None else "there is no tokenizer"
        raise unsupported(
            where,
            f"{where}: this model's format of tool calls is not known ({why}): name it with --tool-call-parser, or set "
            "tool_choice to none",
        )
    if not (answers.renders_tools or answers.spells_tools):
        raise unsupported(
            where,
            f"{where}: this model's chat template shows no tools: give another with --chat-template, or set "
            "--tool-call-parser generic",
        )
    rules = rules_of(schemas, choice, where, content=_content_is_held(body), parallel=parallel_calls(body), grammars=grammars)
    return Tools(schemas, True, rules)


def _content_is_held(body: ChatBody) -> bool:
    """Whether the request says what the content must be."""
    given = any(body.sampling.get(name) is not None for name in NAMES if name != "guided_whitespace_pattern")
    given = given and (body.sampling.get("response_format") or {}) != {"type": "text"}
    return given or body.sampling.get("structured_outputs") is not None
