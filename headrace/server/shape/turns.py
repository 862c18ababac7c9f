"""From the conversations of other protocols to the fields of a chat request."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from headrace.errors import RequestError, unsupported
from headrace.options import shown
from headrace.server.errors import ApiError
from headrace.server.settings import ServerSettings
from headrace.text.content import PlacedPart

logger = logging.getLogger("headrace.server")
T = TypeVar("T")
ContentPart = str | dict[str, Any]
"""A text, or a part of a chat message."""


class Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of a request, which has no other fields."""


class Turns:
    """The messages of a chat request. What the assistant says, thinks and calls in a row is one message."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._thoughts: dict[int, list[str]] = {}
        """Pieces of reasoning by message: a conversation may have very many."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        for index, texts in self._thoughts.items():
            self._messages[index]["reasoning_content"] = "".join(texts)
        return self._messages

    def say(self, role: str, parts: Sequence[ContentPart], *, merge: bool = True) -> None:
        """``merge``: with the last message, if it has the same role."""
        parts = [_part(part) for part in parts]
        if merge and self._messages and self._messages[-1]["role"] == role:
            self._messages[-1]["content"] += parts
        else:
            self._messages.append({"role": role, "content": parts})

    def think(self, text: str) -> None:
        self._answer()
        self._thoughts.setdefault(len(self._messages) - 1, []).append(text)

    def call(self, identity: str, name: str, arguments: str) -> None:
        """``arguments``: JSON text."""
        function = {"name": name, "arguments": arguments}
        self._answer().setdefault("tool_calls", []).append({"id": identity, "type": "function", "function": function})

    def result(self, identity: str, parts: Sequence[ContentPart]) -> None:
        """Text parts are joined by newlines, unless there are others among them."""
        texts = [part for part in parts if isinstance(part, str)]
        content = "\n".join(texts) if len(texts) == len(parts) else [_part(part) for part in parts]
        self._messages.append({"role": "tool", "tool_call_id": identity, "content": content})

    def _answer(self) -> dict[str, Any]:
        self.say("assistant", ())
        return self._messages[-1]


def _part(part: ContentPart) -> dict[str, Any]:
    return {"type": "text", "text": part} if isinstance(part, str) else part


def image_part(url: str, where: str) -> PlacedPart:
    """A picture, which the request has at ``where``."""
    return PlacedPart({"type": "image_url", "image_url": {"url": url}}, where)


def checked(value: Any, kind: Any, where: str) -> Any:
    """``value`` as ``kind``.

    Raises:
        RequestError: names the place at fault.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, at = str(error).partition(" - at `$")
    path = where + at.rstrip("`")
    if what.startswith("Invalid value") and path.endswith(".type"):
        raise unsupported(path, f"{path}: {what.removeprefix('Invalid value ')} is not supported here")
    unknown = what.startswith("Object contains unknown field")
    raise RequestError(f"{path}: {what}", path, code="unknown_parameter" if unknown else "invalid_value")


def function_tool(**function: Any) -> dict[str, Any]:
    """A tool of a chat request, of the fields that are not None: templates show them all, in their order."""
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def json_text(value: Mapping[str, Any]) -> str:
    """As models write it."""
    return json.dumps(value, ensure_ascii=False)


def served_tools(
    tools: Any, served: Callable[[Mapping[str, Any]], bool], settings: ServerSettings
) -> tuple[list[tuple[str, dict[str, Any]]], list[str]]:
    """The tools that clients run, each with its place, and the types of those that are skipped.

    Raises:
        RequestError: there are others, and the server does not skip them.
    """
    kept, skipped = [], []
    for index, tool in enumerate(checked([] if tools is None else tools, list[dict[str, Any]], "tools")):
        place = f"tools[{index}]"
        if served(tool):
            kept.append((place, tool))
        elif settings.unsupported_tools == "skip":
            skipped.append(str(tool.get("type"))[:64])
        else:
            message = f"{place}.type {shown(tool.get('type'))} is not supported: the server runs no tools of its own; with "
            raise unsupported(place, f"{message}--unsupported-tools skip it leaves them out")
    if skipped:
        logger.info("skipped tools that are not supported: %r", skipped)
    return kept, skipped


@contextmanager
def renamed(names: Mapping[str, str], parameters: str = "parameters") -> Iterator[None]:
    """Errors of a chat request name the fields that it was made of.

    Args:
        names: Field of the chat -> the field that sets it.
        parameters: The field of a tool that has the schema of its arguments.
    """
    try:
        yield
    except (ApiError, RequestError) as error:
        given = error.param or ""
        roots = [name for name in names if given == name or given.startswith((f"{name}.", f"{name}["))]
        if roots:
            root = max(roots, key=len)
            rest = given.removeprefix(root).replace(".parameters", f".{parameters}").replace(".function", "")
            # The messages of a chat are counted otherwise than what they are made of.
            error.param = names[root] + ("" if root == "messages" else rest)
            error.message = error.message.replace(given, error.param, 1)
            error.args = (error.message,)
        raise
