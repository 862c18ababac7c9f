"""The answer of one sample as parts, one after another: reasoning, content and tool calls."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from headrace.outputs import Event, OutputDelta


class Part(msgspec.Struct, kw_only=True):
    """A run of reasoning or of content, or one tool call."""

    index: int
    kind: Literal["reasoning", "content", "call"]
    text: str = ""
    """Text of the part; of a call, its arguments as JSON text."""
    id: str = ""
    name: str = ""
    ended: bool = False
    """A call is complete."""


class Step(NamedTuple):
    """A change of a part: it starts, gains text, or ends."""

    what: Literal["start", "gain", "end"]
    part: Part
    text: str = ""


class Parts:
    """Folds the deltas of one sample into parts. Only the last part is open."""

    def __init__(self) -> None:
        self.all: list[Part] = []
        self.finish: OutputDelta | None = None
        """The last delta, once it is there."""
        self._open: Part | None = None

    def add(self, delta: OutputDelta) -> Iterator[Step]:
        for event in events_of(delta):
            if event.kind == "call_started":
                yield from self._start(Part(index=len(self.all), kind="call", id=event.id, name=event.name))
            elif event.kind == "call_ended":
                self.all[-1].ended = True
                yield from self._end()
            elif event.text:
                kind = "call" if event.kind == "arguments" else event.kind
                if self._open is None or self._open.kind != kind:
                    yield from self._start(Part(index=len(self.all), kind=kind))
                part = self.all[-1]
                part.text += event.text
                yield Step("gain", part, event.text)
        if delta.finish_reason is not None:
            self.finish = delta
            yield from self._end()

    def _end(self) -> Iterator[Step]:
        """Ends the part that is open."""
        if self._open is not None:
            part, self._open = self._open, None
            yield Step("end", part)

    def _start(self, part: Part) -> Iterator[Step]:
        yield from self._end()
        self.all.append(part)
        self._open = part
        yield Step("start", part)

    @property
    def cut(self) -> bool:
        """Whether the answer ends for lack of room: its last part may then be incomplete."""
        return self.finish is not None and self.finish.finish_reason == "length"

    @property
    def has_call(self) -> bool:
        """Whether a call is complete."""
        return any(part.ended for part in self.all)


class PartialText:
    """A string of an object whose JSON text comes in pieces: what is known of it so far."""

    def __init__(self, name: str) -> None:
        self.text = ""
        self._name = name
        self._opening = re.compile(rf'\s*\{{\s*"{name}"\s*:\s*"')
        self._opened = self._closed = False
        self._rest = ""

    def add(self, piece: str) -> str:
        """The text that this piece adds."""
        self._rest += piece
        if not self._opened and (found := self._opening.match(self._rest)) is not None:
            self._opened, self._rest = True, self._rest[found.end() :]
        if not self._opened or self._closed or (whole := _CHARACTERS.match(self._rest)) is None:
            return ""
        self._rest = self._rest[whole.end() :]
        self._closed = self._rest.startswith('"')
        more: str = json.loads(f'"{whole[0]}"', strict=False)
        self.text += more
        return more

    def finish(self, text: str) -> str:
        """Returns the missing end of the text, from the whole JSON text: all of it, where that is not such object."""
        whole = self.text if self._opened else text
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found = json.loads(text, strict=False)[self._name]
            whole = str(found).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        more = whole.removeprefix(self.text)
        self.text += more
        return more


_CHARACTERS = re.compile(
    r'(?:[^"\\]|\\u(?:[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?![dD][89a-fA-F])[0-9a-fA-F]{4})|\\["\\/bfnrt])+'
)
"""Whole characters of a JSON string."""


def events_of(delta: OutputDelta) -> Sequence[Event]:
    """Returns a delta's events. All text of an answer that is not parsed is content."""
    return [Event("content", delta.text)] if delta.text else delta.events
