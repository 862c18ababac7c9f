"""The tools that a chat request offers, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.errors import RequestError
from headrace.options import shown
from headrace.server.schema import ChatBody
from headrace.server.settings import ServerSettings
from headrace.text.tools import UNCONSTRAINED, checked_tools

if TYPE_CHECKING:
    from headrace.text.answers import AnswerFormats


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
    schemas = checked_tools([] if given is None else given, where, legacy=where == "functions")
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


def _check_choice(choice: Any, where: str) -> None:
    if choice in (None, "none", "auto"):
        return
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind in ("required", "function", "allowed_tools") or (where == "function_call" and isinstance(choice, Mapping)):
        raise _unsupported(f"{where} {shown(kind or 'function')} is not supported: {UNCONSTRAINED}", where)
    raise _invalid(f"{where} must be none or auto", where)


def _invalid(message: str, param: str) -> RequestError:
    return RequestError(message, param, code="invalid_value")


def _unsupported(message: str, param: str) -> RequestError:
    return RequestError(message, param, code="unsupported_parameter")
