"""ParsedText: one sequence's text as events, with stop strings looked for in its content."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from headrace.core.request import ParseOptions
from headrace.outputs import Event, EventKind
from headrace.text.parse.engine import Parser
from headrace.text.parse.format import Machine
from headrace.text.parse.recognise import recognise, vocabulary_of
from headrace.text.stops import StopStrings

if TYPE_CHECKING:
    from headrace.text.tokenizer import Tokenizer


class Parsing:
    """Makes the parsers' machines for one tokenizer, each once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._vocabulary = vocabulary_of(tokenizer)
        self._template = tokenizer.response_template
        self.machine = functools.lru_cache(maxsize=None)(self._machine)

    def _machine(self, tools: str, thought: str, calls: bool, reasoning: bool) -> Machine:
        choice = recognise(None, self._vocabulary, tools=tools, reasoning=thought, response_template=self._template).choice
        states = choice.states(calls=calls, reasoning=reasoning)
        name, ids = (choice.tools.name, choice.tools.ids) if choice.tools is not None else (thought, "call")
        return Machine(states, self._vocabulary, name, ids)


class ParsedText:
    """Parses text and ends it at a stop string, or at the end of the only call that is allowed."""

    def __init__(self, parser: Parser, options: ParseOptions, stops: StopStrings | None) -> None:
        self._parser = parser
        self._stops = stops
        self._parallel = options.parallel
        self._watched: tuple[EventKind, ...] = ("content", "reasoning") if options.stop_in_reasoning else ("content",)
        self._kind: EventKind = "content"
        """Kind of the text that the stop strings hold back."""
        self.ended = False
        """Nothing more comes."""

    @property
    def format(self) -> str:
        return self._parser.format

    @property
    def num_fallbacks(self) -> int:
        return self._parser.num_fallbacks

    def push(self, text: str) -> tuple[list[Event], str | None]:
        """The events of one further token, and the stop string that it completed."""
        events = self._parser.push(text)
        if self._stops is None and self._parallel:
            return events, None
        return self._until_stop(events, 1)

    def finish(self, text: str) -> list[Event]:
        """The last events; ``text``: what the detokeniser held back."""
        if self.ended:
            return []
        events, match = self._until_stop(self._parser.push(text, 0) + self._parser.finish(), 0)
        return events if match is not None else events + self._held()

    def _until_stop(self, events: list[Event], num_tokens: int) -> tuple[list[Event], str | None]:
        found: list[Event] = []
        for event in events:
            if event.kind not in self._watched or event.kind != self._kind:
                found += self._held()
            if event.kind in self._watched and self._stops is not None:
                self._kind = event.kind
                text, match = self._stops.push(event.text, num_tokens)
                num_tokens = 0
                if text or event.tokens:
                    found.append(Event(event.kind, text, tokens=event.tokens))
                if match is not None:
                    self.ended = True
                    return found, match
                continue
            found.append(event)
            if event.kind == "call_ended" and not self._parallel:
                self.ended = True
                return found, None
        if num_tokens and self._stops is not None:
            self._stops.push("", num_tokens)
        return found, None

    def _held(self) -> list[Event]:
        held = self._stops.flush() if self._stops is not None else ""
        return [Event(self._kind, held)] if held else []
