"""The answer of one sample as parts, one after another: reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from headrace.outputs import Event, OutputDelta


class Part(msgspec.Struct, kw_only=True):
    """A run of reasoning or of content, or one tool call."""

    index: int
    kind: Literal["reasoning", "content", "call"]
    text: str = ""
    """Of a call: its arguments, as JSON text."""
    id: str = ""
    name: str = ""
    ended: bool = False
    """Of a call: it is complete."""


class Step(NamedTuple):
    """What happens to a part: it starts, gains text, or ends."""

    what: Literal["start", "gain", "end"]
    part: Part
    text: str = ""


class Parts:
    """Folds the events of one sample into parts. Only the last part is open."""

    def __init__(self) -> None:
        self.all: list[Part] = []
        self._open: Part | None = None

    def add(self, events: Iterable[Event]) -> Iterator[Step]:
        for event in events:
            if event.kind == "call_started":
                yield from self._start(Part(index=len(self.all), kind="call", id=event.id, name=event.name))
            elif event.kind == "call_ended":
                self.all[-1].ended = True
                yield from self.end()
            elif event.text:
                kind = "call" if event.kind == "arguments" else event.kind
                if self._open is None or self._open.kind != kind:
                    yield from self._start(Part(index=len(self.all), kind=kind))
                part = self.all[-1]
                part.text += event.text
                yield Step("gain", part, event.text)

    def end(self) -> Iterator[Step]:
        """Ends the part that is open."""
        if self._open is not None:
            part, self._open = self._open, None
            yield Step("end", part)

    def _start(self, part: Part) -> Iterator[Step]:
        yield from self.end()
        self.all.append(part)
        self._open = part
        yield Step("start", part)

    @property
    def has_call(self) -> bool:
        """Whether a call is complete."""
        return any(part.ended for part in self.all)


def events_of(delta: OutputDelta) -> Sequence[Event]:
    """Of an answer that is not parsed, all text is content."""
    return [Event("content", delta.text)] if delta.text else delta.events
