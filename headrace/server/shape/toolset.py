"""The tools of Responses and Messages requests: which of them the model is shown, and by what names."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.constrain.compose import TextGrammar
from headrace.constrain.parameters import CUSTOM_INPUT
from headrace.errors import unsupported
from headrace.options import shown
from headrace.server.settings import ServerSettings
from headrace.server.shape.items import (
    AllowedTools,
    CustomTool,
    FunctionTool,
    GrammarFormat,
    Named,
    NamedCustom,
    Namespace,
    Tool,
    ToolChoice,
)
from headrace.server.shape.turns import OBJECTS, Kind, function_tool

logger = logging.getLogger("headrace.server")
_MAX_NAME = 64
_TOOL, _CHOICE, _NAMED = map(Kind, (Tool, ToolChoice, Named | NamedCustom))
_DIGEST = 8
_DISPENSABLE = re.compile(
    r"(web_search|web_fetch|image_generation|tool_search|code_interpreter|code_execution|file_search|computer|browser|mcp"
    r"|local_shell|shell|bash|text_editor|apply_patch|memory|advisor|programmatic_tool_calling)(_\w+)?"
)
"""Types of tools that a provider runs or has trained its models for: agents offer them always, and work without them."""


class SkippedTools:
    """The tools that a request offers and the model is not shown."""

    def __init__(self, settings: ServerSettings) -> None:
        self.types: list[str] = []
        self._which = settings.unsupported_tools

    def add(self, tool: Mapping[str, Any], place: str) -> None:
        """Leaves out a tool that is not a function.

        Raises:
            RequestError: the server refuses it.
        """
        kind = tool.get("type")
        dispensable = isinstance(kind, str) and _DISPENSABLE.fullmatch(kind) is not None
        if self._which == "refuse" or (self._which == "auto" and not dispensable):
            way = "--unsupported-tools auto" if dispensable else "--unsupported-tools skip"
            message = f"{place}.type {shown(kind)} is not supported: the server runs no tools of its own; with {way} it leaves "
            raise unsupported(place, f"{message}such tools out")
        self.types.append(str(kind)[:64])

    def log(self) -> None:
        if self.types:
            logger.info("skipped tools that are not supported: %r", self.types)


def check_callers(callers: Sequence[str] | None, place: str) -> None:
    """Raises: RequestError: only programs that the server would run may call the tool."""
    if callers is not None and "direct" not in callers:
        path = f"{place}.allowed_callers"
        raise unsupported(path, f"{path} must have direct: the server runs no programs that could call tools")


def shown_name(namespace: str | None, name: str) -> str:
    """The name by which the model is shown a tool of a namespace. It follows from the two names alone, so that calls in a
    history have it too."""
    if namespace is None:
        return name
    whole = f"{namespace}__{name}"
    if len(whole) <= _MAX_NAME:
        return whole
    digest = hashlib.sha256(f"{namespace}\0{name}".encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST]
    return f"{whole[: _MAX_NAME - _DIGEST - 1]}_{digest}"


class Toolset:
    """The tools of a Responses request. Those of namespaces are functions of a chat like the others."""

    def __init__(self, settings: ServerSettings) -> None:
        self.functions: list[dict[str, Any]] = []
        """Functions in the form of a chat request."""
        self.places: list[str] = []
        """Place in the request of each of them."""
        self.custom: set[str] = set()
        """Names, as the model is shown them, of the tools that take a text."""
        self.grammars: dict[str, TextGrammar] = {}
        """Grammars of the custom tools that have one."""
        self.kept: list[dict[str, Any]] = []
        """Tools in the form of the request."""
        self.skipped = SkippedTools(settings)
        self._members: dict[str, tuple[str, str]] = {}
        """Name that the model is shown -> namespace and name."""

    def add(self, tools: Any, where: str) -> None:
        """Raises: RequestError: names the tool at fault."""
        for index, given in enumerate(OBJECTS.checked([] if tools is None else tools, where)):
            place = f"{where}[{index}]"
            if given.get("type") not in ("function", "custom", "namespace"):
                self.skipped.add(given, place)
                continue
            self.kept.append(given)
            tool = _TOOL.checked(given, place)
            if not isinstance(tool, Namespace):
                self._add(tool, place)
                continue
            for number, member in enumerate(tool.tools):
                self._add(member, f"{place}.tools[{number}]", tool, first=number == 0)

    def _add(
        self, tool: FunctionTool | CustomTool, place: str, namespace: Namespace | None = None, first: bool = False
    ) -> None:
        check_callers(tool.allowed_callers, place)
        name, description = tool.name, tool.description
        if namespace is not None:
            name = shown_name(namespace.name, tool.name)
            self._members[name] = (namespace.name, tool.name)
            if first and namespace.description:
                # Once: a namespace may have dozens of tools.
                about = f"About all tools of {namespace.name}: {namespace.description}"
                description = f"{description}\n\n{about}" if description else about
        if isinstance(tool, FunctionTool):
            result = {"return": tool.output_schema}
            parameters, strict = tool.parameters, tool.strict
        else:
            self.custom.add(name)
            if isinstance(tool.format, GrammarFormat):
                self.grammars[name] = TextGrammar(tool.format.syntax, tool.format.definition)
            parameters = {"type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}, "required": [CUSTOM_INPUT]}
            result, strict = {}, None
        self.functions.append(function_tool(name=name, description=description, parameters=parameters, strict=strict, **result))
        self.places.append(place)

    def called(self, shown: str) -> dict[str, str]:
        """The name of a call, and its namespace, as the client knows them."""
        if shown not in self._members:
            return {"name": shown}
        namespace, name = self._members[shown]
        return {"name": name, "namespace": namespace}

    def choice(self, given: Any) -> Any:
        """``tool_choice`` of the chat request."""
        if given is None or isinstance(given, str):
            return given
        choice = _CHOICE.checked(given, "tool_choice")
        if not isinstance(choice, AllowedTools):
            return function_tool(name=shown_name(choice.namespace, choice.name))
        allowed = {"mode": choice.mode, "tools": list(self._allowed(choice.tools))}
        return {"type": "allowed_tools", "allowed_tools": allowed}

    def _allowed(self, tools: Sequence[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
        for index, tool in enumerate(tools):
            if tool.get("type") not in self.skipped.types:
                named = _NAMED.checked(tool, f"tool_choice.tools[{index}]")
                yield function_tool(name=shown_name(named.namespace, named.name))
