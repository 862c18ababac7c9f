"""Message: the events of one answer, folded. A non-streaming answer is the stream, folded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from headrace.outputs import Event


@dataclasses.dataclass
class Call:
    """One tool call. ``arguments`` is JSON text, and valid JSON if the call ``ended``."""

    id: str
    name: str
    arguments: str = ""
    ended: bool = False


@dataclasses.dataclass
class Message:
    """What the events of one sample add up to."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = dataclasses.field(default_factory=list)
    reasoning_tokens: int = 0

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event.kind:
                case "content":
                    self.content += event.text
                case "reasoning":
                    self.reasoning += event.text
                    self.reasoning_tokens += event.tokens
                case "call_started":
                    self.calls.append(Call(event.id, event.name))
                case "arguments":
                    self.calls[event.index].arguments += event.text
                case "call_ended":
                    self.calls[event.index].ended = True

    @property
    def has_call(self) -> bool:
        """Whether a call is complete."""
        return any(call.ended for call in self.calls)


def fold(events: Iterable[Event]) -> Message:
    message = Message()
    message.add(events)
    return message
