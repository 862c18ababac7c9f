"""Converting the conversations of other protocols to the fields of a chat request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from pydantic_core import from_json

from headrace.errors import RequestError, did_you_mean, missing, unknown, unsupported
from headrace.options import shown
from headrace.server.errors import ApiError
from headrace.server.prompts import need_tokenizer
from headrace.server.shape.unknown_keys import unknown_keys
from headrace.server.state import Serving
from headrace.text.content import PlacedPart

_INDEXED = re.compile(r"^tools\[(\d+)\]")
ContentPart = str | dict[str, Any]
"""A text, or a part of a chat message."""


class Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of a request, which has no other fields."""


class Turns:
    """The messages of a chat request. What the assistant says, thinks and calls in a row is one message."""

    def __init__(self, late_system: bool) -> None:
        """``late_system``: whether the chat template takes a system message after others."""
        self._messages: list[dict[str, Any]] = []
        self._late_system = late_system
        self._calls: set[str] = set()
        self._open: set[str] = set()
        """Calls without a result."""
        self._held: list[ContentPart] = []
        """System messages between a call and its result, which templates take behind the result only."""
        self._thoughts: dict[int, list[str]] = {}
        """Pieces of reasoning by message: a conversation may have very many."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        self._release()
        for index, texts in self._thoughts.items():
            self._messages[index]["reasoning_content"] = "".join(texts)
        return self._messages

    def instruct(self, parts: Sequence[ContentPart]) -> None:
        """Adds a system message. Where it is late and the template does not take it, its parts go to the user's turn at this
        place: in front of the conversation they would change the prefix of every later prompt."""
        if self._open:
            self._held += parts
        elif self._late_system or all(message["role"] == "system" for message in self._messages):
            self.say("system", parts)
        else:
            self.say("user", [_reminder(part) for part in parts])

    def say(self, role: str, parts: Sequence[ContentPart]) -> None:
        """Adds to the last message, if it has the same role: some templates take no two of one role in a row."""
        if role == "user":
            self._release()
        parts = [_part(part) for part in parts]
        if self._messages and self._messages[-1]["role"] == role:
            self._messages[-1]["content"] += parts
        else:
            self._messages.append({"role": role, "content": parts})

    def think(self, text: str) -> None:
        self._answer()
        self._thoughts.setdefault(len(self._messages) - 1, []).append(text)

    def call(self, identity: str, name: str, arguments: str) -> None:
        """``arguments``: JSON text."""
        self._calls.add(identity)
        self._open.add(identity)
        function = {"name": name, "arguments": arguments}
        self._answer().setdefault("tool_calls", []).append({"id": identity, "type": "function", "function": function})

    def result(self, identity: str, parts: Sequence[ContentPart], where: str) -> None:
        """Text parts are joined by newlines, unless there are others among them. ``where``: the place of ``identity``.

        Raises:
            RequestError: no call before it has this id.
        """
        if identity not in self._calls:
            raise RequestError(f"{where} {shown(identity)} is the id of no call before it", where)
        texts = [part for part in parts if isinstance(part, str)]
        content = "\n".join(texts) if len(texts) == len(parts) else [_part(part) for part in parts]
        self._messages.append({"role": "tool", "tool_call_id": identity, "content": content})
        self._open.discard(identity)
        if not self._open:
            self._release()

    def _release(self) -> None:
        """Adds what was held back; calls that are open still get no result."""
        self._open.clear()
        if held := self._held:
            self._held = []
            self.instruct(held)

    def _answer(self) -> dict[str, Any]:
        self.say("assistant", ())
        return self._messages[-1]


async def late_system(state: Serving, turn: str) -> bool:
    """Whether the chat template takes a system message after others. ``turn``: as in ``Caller``."""
    if state.late_system is None:
        word = "headrace"
        probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
        try:
            render = need_tokenizer(state, "messages").render_chat
            probe.append({"role": "system", "content": word})
            state.late_system = word in await state.llm.inputs.in_thread(turn, lambda: render(probe))
        except RequestError:
            state.late_system = False
    return state.late_system


def partial_object(text: str) -> dict[str, Any]:
    """Returns the arguments of a call that was cut off, as far as they are there."""
    try:
        value = from_json(text or "{}", allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def whole_arguments(arguments: str, where: str) -> str:
    """The arguments of a call in a history. Those that ``max_tokens`` cut off are as much of an object as is there.

    Raises:
        RequestError: they are not the beginning of a JSON object.
    """
    try:
        begun = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        begun = None
    if not isinstance(begun, dict):
        raise RequestError(f"{where} is not a JSON object", where)
    try:
        from_json(arguments)
    except ValueError:
        return json_text(begun)
    return arguments


def _reminder(part: ContentPart) -> ContentPart:
    return f"<system-reminder>\n{part}\n</system-reminder>" if isinstance(part, str) else part


def _part(part: ContentPart) -> dict[str, Any]:
    return {"type": "text", "text": part} if isinstance(part, str) else part


def image_part(url: str, where: str) -> PlacedPart:
    """A picture, which the request has at ``where``."""
    return PlacedPart({"type": "image_url", "image_url": {"url": url}}, where)


class Kind:
    """A type that a part of a request must have.

    msgspec reads the fields of a struct at the struct's first use, during which a use in another thread crashes the process.
    Kinds are therefore made while their module is imported, before there are requests.
    """

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        msgspec.json.Decoder(kind)

    def checked(self, value: Any, where: str = "", *, strict: bool = True) -> Any:
        """``value`` as this kind. ``strict``: no text is read as another type.

        Raises:
            RequestError: names the place at fault.
        """
        try:
            return msgspec.convert(value, self._kind, strict=strict)
        except msgspec.ValidationError as error:
            what, _, at = str(error).partition(" - at `$")
        path = (where + at.rstrip("`")).removeprefix(".")
        if what.startswith("Object contains unknown field"):
            key = next(unknown_keys(value, self._kind, where), None)
            if key is not None:
                raise unknown(key.path.removeprefix("."), did_you_mean(key.name, key.known))
        if what.startswith("Object missing required field"):
            raise missing(f"{path}.{what.split('`')[1]}".removeprefix("."))
        if what.startswith("Invalid enum value") and not where:
            words = _words(get_type_hints(self._kind)[path.partition("[")[0]])
            raise RequestError(f"{path} must be one of {', '.join(words)}", path)
        if what.startswith("Invalid value") and path.endswith(".type"):
            raise unsupported(path, f"{path}: {what.removeprefix('Invalid value ')} is not supported here")
        code = "invalid_type" if what.startswith("Expected") else None
        raise RequestError(f"{path}: {what}" if path else what, path or None, code=code)


def _words(hint: Any) -> Iterator[str]:
    """Words of the literal types in a field's type."""
    for part in get_args(hint):
        if get_origin(hint) is Literal:
            yield part
        else:
            yield from _words(part)


OBJECTS = Kind(list[dict[str, Any]])


def function_tool(**function: Any) -> dict[str, Any]:
    """A tool of a chat request, of the fields that are not None: templates show them all, in their order."""
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def json_text(value: Mapping[str, Any]) -> str:
    """Returns JSON text in the form that models write."""
    return json.dumps(value, ensure_ascii=False)


@contextmanager
def renamed(names: Mapping[str, str], parameters: str = "parameters", tools: Sequence[str] = ()) -> Iterator[None]:
    """Errors of a chat request name the fields that it was made of.

    Args:
        names: Field of the chat -> the field that sets it.
        parameters: The field of a tool that has the schema of its arguments.
        tools: Where the request has each tool of the chat.
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
            if root == "tools" and tools:
                error.param = _INDEXED.sub(lambda found: tools[int(found[1])], error.param)
            error.message = error.message.replace(given, error.param, 1)
            error.args = (error.message,)
        raise
