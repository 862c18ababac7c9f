"""Parser: the state machine that turns generated text into events."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Mapping

from msgspec.structs import replace

from headrace.outputs import Event, EventKind
from headrace.text.parse import arguments as args
from headrace.text.parse.arguments import Broken
from headrace.text.parse.format import TEXT_SINKS, CompiledState, Machine, Sink

Types = Mapping[str, Mapping[str, frozenset[str]]]
"""tool -> parameter -> the JSON types of its schema"""

_NO_NAME = re.compile("[<>{}\\[\\]()\"'\ud800-\udfff]")
_NO_KEY = re.compile('[<>"\ud800-\udfff]')
_NEVER: Mapping[Sink, re.Pattern[str]] = {
    "name": _NO_NAME,
    "skip": _NO_NAME,
    "key": _NO_KEY,
    "flag": _NO_KEY,
    "header": re.compile(r"[^\w\s.=:/\-]"),
}
"""Characters that a captured text never has: if one is read, the marker behind the text is missing."""
_TAIL_PIECE = 256
_BEHIND_CALL = string.whitespace + "}])"
"""Right behind a call, a closing bracket is one too many."""
_LETTERS = string.ascii_letters + string.digits


class Parser:
    """Parses one sample's text. Never raises: what breaks a format becomes content.

    Until the first call starts, that is verbatim, from the marker on: it may be a quotation. Behind it, a marker that has lost
    its place is damage, and the content has the text around it alone.

    Text comes in pieces, cut anywhere, as the machine's input: with marker tokens as its characters. At most the longest
    suffix that begins a marker is held back, and in a call what is still ambiguous.
    """

    def __init__(
        self,
        machine: Machine,
        types: Types | None = None,
        tail: str = "",
        *,
        show_special: bool = False,
        ids: random.Random | None = None,
    ) -> None:
        """
        Args:
            tail: The prompt from the start of the assistant's turn on. What it opens is open when the answer begins.
            show_special: Marker tokens that are text after all show also where they are special.
            ids: Source of the calls' ids.
        """
        self._machine = machine
        self._types = types or {}
        self._special = show_special
        self._ids = ids or random.Random()
        self._state = machine.states["start"]
        self._buffer = ""
        self._events: list[Event] = []
        self._raw: list[str] = []
        """Text read of a call that has not started."""
        self._fresh = True
        """Reasoning or a value has no text yet: a line break at its start is dropped."""
        self._num_calls = 0
        self._started = False
        """Whether the call that is read has started."""
        self._name = self._id = self._key = self._flag = self._header = ""
        self._captured = ""
        self._space = ""
        """Whitespace before anything else of the answer."""
        self._skipped: str | None = None
        """Characters that the state skips before anything else; None: whitespace."""
        self._pending: list[str] = []
        """Arguments of a call without a name yet."""
        self._value: list[str] | None = None
        """Text of a value that is cast when it closes. None: it streams as a string."""
        self._num_parameters = 0
        self._scanner: args.Scanner | None = None
        self._wants: re.Pattern[str] | None = None
        self.num_fallbacks = 0
        """Number of times that a format broke and its text became content."""
        if tail:
            self._begin_at(tail)

    @property
    def format(self) -> str:
        return self._machine.name

    @property
    def markers(self) -> Mapping[int, str]:
        """Tokens that the parser takes as characters of their own."""
        return self._machine.markers

    @property
    def in_reasoning(self) -> bool:
        return self._state.sink == "reasoning"

    @property
    def at_start(self) -> bool:
        """Whether nothing but whitespace was read."""
        return self._state is self._machine.states["start"]

    @property
    def in_text(self) -> bool:
        return self._state.sink in TEXT_SINKS

    def push(self, text: str, num_tokens: int = 1) -> list[Event]:
        """The events of ``num_tokens`` further tokens."""
        reasoning = self.in_reasoning
        self._buffer += text
        self._run()
        if reasoning or self.in_reasoning:
            self._count(num_tokens)
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """Returns the events of the text held back at the end of the answer. An open call stays without its end."""
        self._run(final=True)
        sink, self._buffer = self._state.sink, ""
        if sink == "value":
            if self._value is not None:
                self._parameter("".join(self._value))
        elif sink == "start":
            self._emit("content", self._space)
        elif sink not in TEXT_SINKS and not self._num_calls:
            self._emit("content", self._shown("".join(self._raw)))
        events, self._events = self._events, []
        return events

    # The loop

    def _run(self, *, final: bool = False) -> None:
        while self._buffer:
            before, state = self._buffer, self._state
            if state.sink == "scan" and not state.marks:
                self._buffer = ""
                self._scan(before)
            else:
                self._read(state, before, final)
            if self._state is state and len(self._buffer) == len(before):
                return

    def _read(self, state: CompiledState, text: str, final: bool) -> None:
        """Reads up to the first marker, or up to what may begin one. ``final``: nothing follows, so that what may begin one is
        text, except in or right behind a call: there the answer was cut off within a marker."""
        if state.first is None or state.first.search(text) is None:
            self._buffer = ""
            self._take(state, text)
            return
        found = state.find.search(text)
        if found is None:
            held = state.partial.search(text, max(0, len(text) - state.longest))
            whole = final and (not self._num_calls or state.sink in ("content", "reasoning", "value"))
            keep = len(text) if held is None or whole else held.start()
            self._buffer = text[keep:]
            if keep:
                self._take(state, text[:keep])
            return
        start = found.start()
        self._buffer = text[start:]
        if start and not self._take(state, text[:start]):
            return
        marker = found[found.lastindex or 0]
        self._marker(state, marker, text[start : found.end()])

    def _take(self, state: CompiledState, text: str) -> bool:
        """Text of a state; puts back what belongs to another, and is False then."""
        sink = state.sink
        if sink in TEXT_SINKS:
            return self._text(state, text)
        if sink == "scan":
            return self._scan(text)
        if sink == "value":
            self._value_text(text)
            return True
        if sink == "space":
            stripped = text.lstrip(self._skipped)
            self._keep_frame(text[: len(text) - len(stripped)])
            if stripped:
                self._break(stripped)
            return not stripped
        return self._capture(state, text)

    def _text(self, state: CompiledState, text: str) -> bool:
        if state.sink in ("start", "after"):
            stripped = text.lstrip(self._skipped)
            self._space += text[: len(text) - len(stripped)]
            if not stripped:
                return True
            space = self._space if state.sink == "start" else ""
            self._buffer = stripped + self._buffer
            if (lead := state.lead.get(stripped[0])) is not None:
                self._enter(lead)
                self._raw.append(space)
            else:
                self._enter(state.then)
                self._emit("content", space)
            return False
        if state.sink == "reasoning":
            text = text.lstrip("\n") if self._fresh else text
            self._fresh = self._fresh and not text
            self._emit("reasoning", self._shown(text))
        else:
            self._emit("content", self._shown(text))
        return True

    def _capture(self, state: CompiledState, text: str) -> bool:
        room = args.MAX_NAME - len(self._captured)
        if (wrong := _NEVER[state.sink].search(text)) is not None:
            room = min(room, wrong.start())
        lead = state.lead.get(text.lstrip()[:1]) if state.lead and not self._captured.strip() else None
        if lead is not None:
            self._buffer = text + self._buffer
            self._enter(lead)
            return False
        self._captured += text[:room]
        self._keep(text[:room])
        if len(text) > room:
            self._break(text[room:])
            return False
        return True

    def _marker(self, state: CompiledState, marker: str, text: str) -> None:
        """``text``: the marker and what is trimmed before it; it is at the start of the buffer."""
        mark = state.marks[marker]
        if state.sink == "scan":
            self._buffer = self._buffer[len(text) :]
            self._scan(args.QUOTE, marker)
            return
        try:
            self._leave(state)
            if mark.ends:
                self._end_object()
        except Broken:
            rest, self._buffer = self._buffer, ""
            self._break(rest)
            return
        if not mark.keep:
            self._buffer = self._buffer[len(text) :]
            if not mark.ends:
                self._keep_frame(text)
        self._enter(mark.to, header=state.sink == "header")

    def _enter(self, name: str, *, header: bool = False) -> None:
        if name == "route":
            name = self._route()
        self._state = state = self._machine.state(name, behind_call=self._num_calls > 0)
        self._captured = ""
        self._skipped = None
        if state.sink in TEXT_SINKS:
            self._raw.clear()
            self._forget()
        self._space = ""
        if state.sink != "header" or not header:
            self._header = ""
        self._fresh = True
        if state.sink == "scan":
            self._scanner = args.SCANNERS[state.scan](self)
            self._wants = next(self._scanner)
        elif state.sink == "value":
            types = self._types_of_value()
            self._value = None if types == {"string"} else []
            if self._value is None:
                self._start_parameter()
                self.arguments('"')

    def _leave(self, state: CompiledState) -> None:
        """Uses what a state has captured. Raises Broken if it cannot be that."""
        text = self._captured.strip()
        match state.sink:
            case "name" | "skip":
                if (match := state.pattern.fullmatch(text)) is None:
                    raise Broken
                if state.sink == "name":
                    self._id = text if match.groupdict() else ""
                    self._name = match.groupdict().get("name") or text
            case "key":
                if not text:
                    raise Broken
                self._key = text
            case "flag":
                self._flag = text
            case "header":
                self._header += " " + text
            case "value":
                if self._value is None:
                    self.arguments('"')
                else:
                    raw = self._shown("".join(self._value))
                    self._parameter(args.cast(raw, self._types_of_value()))
                self._value, self._flag = None, ""

    def _break(self, rest: str) -> None:
        """Turns the text that was read into content, because it is not a call; ``rest``, which comes next, is content too."""
        self._buffer = rest + self._buffer
        raw = self._shown("".join(self._raw))
        if self._num_calls and not raw.strip():  # lines of calls have no other end
            self._enter("after")
        else:
            self.num_fallbacks += 1
            self._emit("content", raw)
            self._enter("content")

    def _keep(self, text: str) -> None:
        if not self._started:
            self._raw.append(text)

    def _keep_frame(self, text: str) -> None:
        """Keeps a marker, or the whitespace between two."""
        if not self._num_calls:
            self._keep(text)

    def _forget(self) -> None:
        """Forgets the call that is read."""
        self._started = False
        self._name = self._id = ""
        self._pending.clear()
        self._num_parameters = 0

    # Scanners, and what they call

    def _scan(self, text: str, spelled: str = "") -> bool:
        """Feeds the scanner. ``spelled``: how the marker is written that ``text`` stands for."""
        scanner, wants, place = self._scanner, self._wants, 0
        if scanner is None or wants is None:
            return True
        state = self._state
        try:
            while place < len(text):
                run = wants.match(text, place)
                piece = run[0] if run is not None else text[place]
                kept = len(self._raw)
                self._raw.append(spelled or piece)
                try:
                    wants = scanner.send(piece)
                except Broken:
                    del self._raw[kept:]
                    self._break(spelled + text[place + 1 :] if spelled else text[place:])
                    return False
                place += len(piece)
                if self._started:
                    self._raw.clear()
        except StopIteration:
            self._raw.clear()
            self._buffer = text[place + len(piece) :] + self._buffer
            self._enter(state.then)
            self._skipped = _BEHIND_CALL
            return False
        self._wants = wants
        return True

    def named(self, name: str) -> None:
        if self._name or not name or len(name) > args.MAX_NAME or not name.isprintable():
            raise Broken
        self._name = name
        if self._pending:
            pending, self._pending = "".join(self._pending), []
            self.arguments(pending)

    def arguments(self, text: str) -> None:
        if not self._name:
            self._pending.append(text)
            return
        self._start()
        self._emit("arguments", text, self._num_calls - 1)

    def end(self) -> None:
        if not self._name:
            raise Broken
        if not self._started:
            self.arguments("{}")
        self._events.append(Event("call_ended", index=self._num_calls - 1))
        self._raw.clear()
        self._forget()

    def _start(self) -> None:
        if self._started:
            return
        if self._machine.ids == "alphanumeric9":
            self._id = self._id or "".join(self._ids.choices(_LETTERS, k=9))
        name, identity = self._name, self._id or "call_" + "".join(self._ids.choices(_LETTERS, k=24))
        self._events.append(Event("call_started", index=self._num_calls, name=name, id=identity))
        self._num_calls += 1
        self._started = True
        self._raw.clear()

    # Raw parameters

    def _types_of_value(self) -> frozenset[str]:
        if self._flag:
            return frozenset({"string"} if self._flag == "true" else {"object", "array", "number", "boolean", "null"})
        return self._types.get(self._name, {}).get(self._key, frozenset())

    def _start_parameter(self) -> None:
        self.arguments(("{" if not self._num_parameters else ", ") + args.dumps(self._key) + ": ")
        self._num_parameters += 1

    def _parameter(self, text: str) -> None:
        self._start_parameter()
        self.arguments(text)

    def _value_text(self, text: str) -> None:
        if self._fresh and text:
            self._fresh = False
            text = text.removeprefix("\n") if self._state.strip else text
        if self._value is None:
            self.arguments(args.escaped(self._shown(text)))
        else:
            self._value.append(text)

    def _end_object(self) -> None:
        """Ends a call of raw parameters, or what a call was in."""
        if self._name:
            self.arguments("{}" if not self._num_parameters else "}")
            self.end()

    # Others

    def _route(self) -> str:
        """The state that a header opens."""
        header = self._machine.shown(self._header, True)
        recipient = re.search(r"\bto=(?:functions\.)?([\w.\-]+)", header)
        if recipient is not None:
            self._name = recipient[1]
            return "call"
        return "reasoning" if re.search(r"\banalysis\b", header) else "content"

    def _begin_at(self, tail: str) -> None:
        text = self._machine.translate(tail)
        # In small pieces, so that the time is linear in a long one's length.
        for place in range(0, len(text), _TAIL_PIECE):
            self._buffer += text[place : place + _TAIL_PIECE]
            self._run()
            if not self._started:
                self._events.clear()
        # A call that the prompt has opened is the answer's; the rest is not.
        started = max((place for place, event in enumerate(self._events) if event.kind == "call_started"), default=0)
        self._events = [replace(event, index=0) for event in self._events[started:]] if self._started else []
        self._num_calls = int(self._started)
        self._raw.clear()
        self._buffer = ""
        self.num_fallbacks = 0

    def _shown(self, text: str) -> str:
        return self._machine.shown(text, self._special)

    def _emit(self, kind: EventKind, text: str, index: int = 0) -> None:
        if not text:
            return
        if self._events and (last := self._events[-1]).kind == kind:
            self._events[-1] = Event(kind, last.text + text, index)
        else:
            self._events.append(Event(kind, text, index))

    def _count(self, num_tokens: int) -> None:
        """Adds tokens to the reasoning of this push."""
        place = next((place for place, event in enumerate(self._events) if event.kind == "reasoning"), None)
        if place is None:
            self._events.insert(0, Event("reasoning", tokens=num_tokens))
        else:
            self._events[place] = replace(self._events[place], tokens=num_tokens)
