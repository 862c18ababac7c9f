"""Scanners: read the arguments of calls as they come, and write them as the client's JSON.

A scanner is a generator. It yields the pattern of the run of characters that it takes next, and is sent such a run, cut
anywhere, or else one character. It raises ``Broken`` when sent a character that no call has there.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any, Protocol

MAX_DEPTH = 128
"""Brackets within each other; deeper arguments are not a call."""
MAX_NAME = 256
"""Characters of a name or a key."""

_SPACE = re.compile(r"\s+")
_ONE = re.compile(r"(?!)")
_JSON = re.compile('[^"{}\\[\\]\ud800-\udfff]+')
_STRING = re.compile('[^"\\\\\x00-\x1f\ud800-\udfff]+')
_WORD = re.compile(r"\w+")
_PYTHON = re.compile("[^\"'\\\\{}\\[\\](),\ud800-\udfff]+")
_BARE = re.compile('[^{}\\[\\],:"\ud800-\udfff]+')
_SURROGATE = re.compile("[\ud800-\udfff]")
QUOTE = "\udfff"
"""Stands for a quote marker: decoded text never contains it."""
_QUOTES = (QUOTE, '"')
_CLOSERS = {"{": "}", "[": "]", "(": ")"}

Scanner = Generator[re.Pattern[str], str, None]


class Broken(Exception):
    """The text that was read is not a call."""


class Host(Protocol):
    """The parser, as scanners see it."""

    def named(self, name: str) -> None:
        """The name of the call that is read now."""

    def arguments(self, text: str) -> None:
        """Adds to the arguments' JSON, which is kept until the call is named."""

    def end(self) -> None:
        """The call is complete. Raises Broken if it has no name."""


def dumps(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if _SURROGATE.search(text) else text


def escaped(text: str) -> str:
    """Part of the inside of a JSON string."""
    return dumps(text)[1:-1]


def valid(text: str) -> bool:
    """Whether this is JSON as the standard has it."""
    try:
        json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _next() -> Generator[re.Pattern[str], str, str]:
    """The next character that is not whitespace."""
    while True:
        piece = yield _SPACE
        if not piece.isspace():
            return piece


def _string() -> Generator[re.Pattern[str], str, str]:
    """A JSON string after its opening quote, decoded."""
    parts: list[str] = []
    yield from _string_text(parts.append)
    try:
        text: str = json.loads('"' + "".join(parts) + '"')
    except ValueError:
        raise Broken from None
    return text


def _string_text(write: Callable[[str], None]) -> Generator[re.Pattern[str], str, None]:
    """The rest of a JSON string without its closing quote, as it is; raw control characters are escaped."""
    while True:
        piece = yield _STRING
        if piece == '"':
            return
        if piece == "\\":
            piece += yield _ONE
        elif piece < " ":
            piece = escaped(piece)
        if _SURROGATE.search(piece):
            raise Broken
        write(piece)


def _container(opening: str, write: Callable[[str], None]) -> Generator[re.Pattern[str], str, None]:
    """An object or array after its opening bracket, as it is. Ends with its match, where all of it is valid JSON."""
    parts: list[str] = []

    def put(text: str) -> None:
        parts.append(text)
        write(text)

    put(opening)
    closers = [_CLOSERS[opening]]
    while closers:
        piece = yield _JSON
        if piece == '"':
            put(piece)
            yield from _string_text(put)
        elif piece in _CLOSERS:
            _open(piece, closers)
        elif (
            (piece in "}]" and piece != closers.pop())
            or _SURROGATE.match(piece)
            or (not closers and not valid("".join(parts) + piece))
        ):
            raise Broken
        put(piece)


def _open(piece: str, closers: list[str]) -> None:
    """Adds what closes an opening bracket to those that are awaited. Raises Broken if they are too many."""
    closers.append(_CLOSERS[piece])
    if len(closers) > MAX_DEPTH:
        raise Broken


def json_object(host: Host) -> Scanner:
    """One JSON object: the arguments."""
    piece = yield from _next()
    if piece != "{":
        raise Broken
    yield from _container(piece, host.arguments)
    host.end()


_ARGUMENTS = frozenset({"arguments", "parameters"})
_OTHERS = frozenset({"type", "id", "index", "call_id"})


def json_calls(host: Host) -> Scanner:
    """``{"name": ..., "arguments": {...}}``, one or an array of them."""
    piece = yield from _next()
    if piece == "{":
        yield from _json_call(host)
        return
    if piece != "[":
        raise Broken
    yield from _json_list((yield from _next()), host)


def _json_list(piece: str, host: Host) -> Scanner:
    """An array of calls after its opening bracket; ``piece``: the character there."""
    while True:
        if piece != "{":
            raise Broken
        yield from _json_call(host)
        piece = yield from _next()
        while piece == "}":  # one too many
            piece = yield from _next()
        if piece == "]":
            return
        if piece not in ",;":
            raise Broken
        piece = yield from _next()


def _json_call(host: Host) -> Scanner:
    """An object after its opening brace. The call is complete with its name and arguments, whatever follows."""
    named = given = False
    piece = ","
    while piece != "}":
        if piece != ",":
            raise Broken
        piece = yield from _next()
        if piece == "}":
            break
        if piece != '"':
            raise Broken
        key = yield from _string()
        if (yield from _next()) != ":":
            raise Broken
        piece = yield from _next()
        if key == "name" and piece == '"' and not named:
            host.named((yield from _string()))
            named = True
        elif key in _ARGUMENTS and piece in '{"' and not given:
            yield from _argument_value(piece, host.arguments)
            given = True
        elif key in _OTHERS or key in _ARGUMENTS:
            piece = yield from _skipped(piece)
            continue
        else:
            raise Broken
        if named and given:
            host.end()
        piece = yield from _next()
    if not (named and given):
        host.end()


def _argument_value(piece: str, write: Callable[[str], None]) -> Scanner:
    """Arguments as an object, or as JSON text in a string."""
    if piece == "{":
        yield from _container(piece, write)
        return
    text = (yield from _string()).strip() or "{}"
    if not text.startswith("{") or not valid(text) or _SURROGATE.search(text):
        raise Broken
    write(text)


def _skipped(piece: str) -> Generator[re.Pattern[str], str, str]:
    """A value that says nothing. Returns the character after it."""
    if piece == '"':
        yield from _string()
    elif piece in "{[":
        yield from _container(piece, lambda text: None)
    else:
        while piece not in ",}":
            if _SURROGATE.match(piece) or piece in '{[]":':
                raise Broken
            piece = yield _WORD
        return piece
    return (yield from _next())


def python_calls(host: Host) -> Scanner:
    """``[f(a=1, b="x"), g()]``; the brackets may be left out, and line breaks part calls too."""
    piece = yield from _next()
    listed = piece == "["
    if listed:
        piece = yield from _next()
        if piece == "{":  # some models of these families write JSON
            yield from _json_list(piece, host)
            return
    while True:
        yield from _python_call(piece, host)
        piece = yield _ONE
        while piece in " \t" or (listed and piece.isspace()):
            piece = yield _ONE
        if listed and piece == "]":
            return
        if piece not in ",;" and (listed or piece != "\n"):
            raise Broken
        piece = yield from _next()


def _python_call(piece: str, host: Host) -> Scanner:
    """A call after the first character of its name."""
    name = ""
    while piece != "(":
        name += piece
        if not re.fullmatch(r"[^\W\d][\w.\-]*", name) or len(name) > MAX_NAME:
            raise Broken
        piece = yield _ONE
    first = True
    while True:
        piece = yield from _next()
        if piece == ")":
            break
        key = ""
        while piece != "=":
            key += piece
            if not key.strip().isidentifier() or len(key) > MAX_NAME:
                raise Broken
            piece = yield _ONE
        if first:
            host.named(name)
        value, piece = yield from _python_text()
        host.arguments(f"{'{' if first else ', '}{dumps(key.strip())}: {value}")
        first = False
        if piece == ")":
            break
    if first:
        host.named(name)
    host.arguments("{}" if first else "}")
    host.end()


def _python_text() -> Generator[re.Pattern[str], str, tuple[str, str]]:
    """The JSON of a literal, and the ``,`` or ``)`` after it."""
    parts: list[str] = []
    closers: list[str] = []
    while True:
        piece = yield _PYTHON
        if not closers and piece in ",)":
            return literal("".join(parts)), piece
        if piece in "\"'":
            parts.append(piece)
            yield from _python_string(piece, parts)
            continue
        if piece in _CLOSERS:
            _open(piece, closers)
        elif (piece in "}])" and (not closers or piece != closers.pop())) or _SURROGATE.match(piece) or piece == "\\":
            raise Broken
        parts.append(piece)


def _python_string(quote: str, parts: list[str]) -> Scanner:
    """A Python string after its first quote; triple quotes read as an empty string, a string and an empty one."""
    run = re.compile(f"[^{quote}\\\\\ud800-\udfff]+")
    while True:
        piece = yield run
        if piece == "\\":
            piece += yield _ONE
        else:
            piece = piece.replace("\n", "\\n")
        if _SURROGATE.search(piece):
            raise Broken
        parts.append(piece)
        if piece == quote:
            return


def literal(text: str) -> str:
    """JSON of a Python literal, or of JSON's own true, false and null.

    Raises:
        Broken: it is neither.
    """
    text = text.strip()
    try:
        value = dumps(ast.literal_eval(text))
        if valid(value):
            return value
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        pass
    if not valid(text):
        raise Broken
    return text


def quoted_object(host: Host) -> Scanner:
    """``{key: value}`` with bare keys, and strings between quote markers, which come as QUOTE."""
    piece = yield from _next()
    if piece != "{":
        raise Broken
    closers: list[str] = []
    parts: list[str] = []

    def put(text: str) -> None:
        parts.append(text)
        host.arguments(text)

    word = ""
    while True:
        if piece in "{}[],:" or piece in _QUOTES:
            if word.strip():
                bare = word.strip()
                if piece != ":" and not valid(bare):
                    bare = dumps(bare)
                put(dumps(bare) if piece == ":" else bare)
            word = ""
        if piece in _QUOTES:
            put('"')
            yield from _quoted_text(put) if piece == QUOTE else _string_text(put)
            put('"')
        elif piece in _CLOSERS:
            _open(piece, closers)
            put(piece)
        elif piece in "}]":
            if piece != closers.pop() or (not closers and not valid("".join(parts) + piece)):
                raise Broken
            put(piece)
            if not closers:
                break
        elif piece in ",:":
            put(piece)
        elif _SURROGATE.search(piece):
            raise Broken
        else:
            word += piece
        piece = yield _BARE
    host.end()


def _quoted_text(write: Callable[[str], None]) -> Scanner:
    run = re.compile(f"[^{QUOTE}]+")
    while (piece := (yield run)) != QUOTE:
        write(escaped(piece))


SCANNERS: Mapping[str, Callable[[Host], Scanner]] = {
    "json": json_object,
    "calls": json_calls,
    "python": python_calls,
    "quoted": quoted_object,
}


# Raw values


def type_of(value: Any) -> str:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
    return "null" if value is None else kinds.get(type(value), "string")


def cast(text: str, types: frozenset[str]) -> str:
    """The JSON of a raw value of a known or unknown type. What is of none of the types is a string."""
    stripped = text.strip()
    if types == {"string"}:
        return dumps(text)
    for spelling, value in (("True", "true"), ("False", "false"), ("None", "null")):
        if stripped == spelling and types & {"boolean", "null"}:
            stripped = value
    if not valid(stripped):
        if not types & {"object", "array"}:
            return dumps(text)
        try:
            stripped = literal(stripped)
        except Broken:
            return dumps(text)
    kind = type_of(json.loads(stripped))
    accepted = types | ({"integer"} if "number" in types else set())
    if kind == "number" and "integer" in types and float(stripped).is_integer():
        return str(int(float(stripped)))
    return stripped if kind in accepted or not types else dumps(text)
