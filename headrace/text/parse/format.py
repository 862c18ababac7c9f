"""Format: how a model writes reasoning, content and tool calls, as data; Machine: a format over one vocabulary."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

Sink = Literal[
    "content", "reasoning", "start", "after",  # text of the answer
    "space", "skip", "name", "key", "flag", "value", "header", "scan",  # parts of a call
]  # fmt: skip
"""Use that a state makes of text between markers.

``start`` and ``after`` read whitespace before content; ``after`` drops it. ``space`` allows only whitespace. ``name``, ``key``
and ``flag`` capture it, ``skip`` reads a word that says nothing. ``value`` is raw text, typed by the tool's schema. ``header``
captures over several markers. ``scan`` hands it to a scanner of ``arguments.py``.
"""
TEXT_SINKS: frozenset[Sink] = frozenset({"content", "reasoning", "start", "after"})
Ids = Literal["call", "alphanumeric9"]


@dataclasses.dataclass(frozen=True)
class Mark:
    """A marker that a state watches."""

    text: str
    to: str
    """The next state. Empty: the marker is a piece that the scanner reads."""
    keep: bool = False
    """The marker is left for the next state to read."""
    ends: bool = False
    """The marker ends the call."""
    trim: int = 0
    """Line breaks before the marker that go with it, at most."""
    token_only: bool = False
    """Watched only where the vocabulary has the marker as a token: spelled out, it may be a quotation."""


@dataclasses.dataclass(frozen=True)
class State:
    """One state of a format."""

    sink: Sink
    on: tuple[Mark, ...] = ()
    then: str = "content"
    """The state after a scanner has ended, and after the whitespace of ``start`` and ``after``."""
    scan: str = ""
    """Name of the scanner."""
    lead: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """First character after whitespace -> state that reads from this character on."""
    pattern: str = r"[^\s<>{}\[\]()\"']+"
    """Regular expression of a captured name; a group ``name`` is the name, and the whole is then the call's id."""


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """Markers around reasoning."""

    name: str
    open: str
    close: str
    aliases: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    """A chat template that contains one of these is of this format. Default: the markers."""


@dataclasses.dataclass(frozen=True)
class Literals:
    """Syntax of values that are neither JSON nor raw text."""

    member: str
    """A member of an object, with KEY and VALUE."""
    joint: str
    """Text between members and items."""
    words: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """JSON's true, false and null -> the format's."""
    quote: str = ""
    """The marker around strings; empty: they are JSON's."""
    keys: str = r"[^\x00-\x1f\"\\]+"
    """Regular expression of the keys of objects."""


@dataclasses.dataclass(frozen=True)
class Written:
    """Form in which a model was trained to write calls, for the grammars that hold it to them.

    Words in capitals stand for parts: NAME, INDEX (a number), ARGUMENTS (a JSON object), PARAMETERS (each as ``parameter``
    has it, with KEY, VALUE and STRING, which says whether it is a string).
    """

    call: str
    begin: str = ""
    """Text before the first call."""
    between: str = ""
    end: str = ""
    """Text after the last call."""
    parameter: str = ""
    joint: str = ""
    """Text between parameters."""
    keys: str = r"[^\x00-\x1f<>\"]+"
    """Regular expression of the names of parameters, as ``names`` is of tools."""
    names: str = ".+"
    literals: Literals | None = None
    """Syntax of the values of parameters. None: strings as raw text, others as JSON."""
    optional: str = ""
    """A marker that may come before all of it."""
    several: bool = True
    """Whether an answer may have several calls."""

    @property
    def first(self) -> str:
        """Text with which calls begin."""
        return self.begin or self.call


@dataclasses.dataclass(frozen=True)
class Format:
    """Syntax of a model family's tool calls."""

    name: str
    aliases: tuple[str, ...] = ()
    hints: tuple[tuple[str, ...], ...] = ()
    """A chat template that contains all strings of one entry is of this format."""
    opens: tuple[Mark, ...] = ()
    """Markers that begin a call in content."""
    lead: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Calls that begin an answer without a marker; see ``State``."""
    wrap: tuple[str, ...] = ()
    """Markers around content that are not shown."""
    states: Mapping[str, State] = dataclasses.field(default_factory=dict)
    whole: bool = False
    """``states`` has the states of content and reasoning too."""
    ids: Ids = "call"
    written: tuple[Written, ...] = ()
    """The forms of calls that a grammar may hold; none: it cannot."""
    thought: Reasoning | None = None
    """Markers of reasoning, with ``whole``."""
    answer: str = ""
    """Text before content."""


def marked(
    name: str,
    scan: str,
    openings: tuple[str, ...],
    closing: str = "",
    hints: tuple[str, ...] = (),
    written: tuple[Written, ...] = (),
) -> Format:
    """Calls that a scanner reads as a whole, between markers or after one.

    Args:
        hints: One of them is enough.
        written: Without markers; they are added.
    """
    states = {"call": State("scan", scan=scan, then="close" if closing else "after")}
    if closing:
        states["close"] = State("space", (Mark(closing, "after"),))
    opens = tuple(Mark(opening, "call") for opening in openings)
    forms = tuple(dataclasses.replace(form, begin=openings[0] + form.begin, end=form.end + closing) for form in written)
    return Format(name, hints=tuple((hint,) for hint in hints or openings), opens=opens, states=states, written=forms)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The formats of a model's answers. Either may be missing."""

    tools: Format | None = None
    reasoning: Reasoning | None = None

    def states(self, *, calls: bool, reasoning: bool) -> Mapping[str, State]:
        """The states of an answer in which ``calls`` and ``reasoning`` are looked for."""
        tools, thought = self.tools, self.reasoning if reasoning else None
        if tools is not None and tools.whole:
            return _whole(tools, calls=calls, reasoning=reasoning)
        opens = tools.opens if tools is not None and calls else ()
        opens = tuple(dataclasses.replace(mark, trim=2) for mark in opens)
        wrap = tuple(Mark(text, "after", trim=1) for text in tools.wrap) if tools is not None else ()
        lead = tools.lead if tools is not None and calls else {}
        think = Mark(thought.open, "reasoning", trim=2) if thought is not None else None
        first = (*opens, *wrap, *([think] if think else []))
        later = (*opens, *wrap, *([dataclasses.replace(think, token_only=True)] if think else []))
        states = {
            # Templates that close reasoning at once leave a marker alone at the start.
            "start": State("start", (*first, *([Mark(thought.close, "after")] if thought else [])), lead=lead),
            "after": State("after", first, lead=lead),
            "content": State("content", later),
        }
        if thought is not None:
            within = tuple(dataclasses.replace(mark, token_only=True) for mark in opens)
            states["reasoning"] = State("reasoning", (Mark(thought.close, "after", trim=2), *within))
        return {**(tools.states if tools is not None and calls else {}), **states}


def _whole(format: Format, *, calls: bool, reasoning: bool) -> Mapping[str, State]:
    states = dict(format.states)
    if not calls:
        states["call"] = states["content"]
    if not reasoning:
        states["reasoning"] = states["content"]
    return states


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Added tokens of a tokenizer that may be markers."""

    tokens: Mapping[str, int]
    """text -> token id"""
    special: frozenset[int] = frozenset()


class Machine:
    """The states of a format over one vocabulary.

    A marker that the vocabulary has as a token is one character to the machine, a lone surrogate, which decoded text never
    contains. So the marker's spelling by ordinary tokens is text.
    """

    def __init__(self, states: Mapping[str, State], vocabulary: Vocabulary | None, name: str, ids: Ids = "call") -> None:
        self.name = name
        self.ids = ids
        texts = {mark.text for state in states.values() for mark in state.on}
        tokens = vocabulary.tokens if vocabulary is not None else {}
        used = sorted((token for token in tokens if any(token in text for text in texts)), key=len, reverse=True)
        self._characters = {text: chr(0xD800 + place) for place, text in enumerate(used)}
        self._pattern = re.compile("|".join(map(re.escape, used))) if used else None
        special = vocabulary.special if vocabulary is not None else frozenset()
        self.markers: dict[int, str] = {tokens[text]: char for text, char in self._characters.items()}
        """token id -> the machine's character"""
        self._texts = {char: text for text, char in self._characters.items()}
        self._visible = {char: "" if tokens[text] in special else text for char, text in self._texts.items()}
        self.states = {key: CompiledState(state, self.translate) for key, state in states.items()}
        self._behind_calls = {
            key: CompiledState(_behind_calls(state, states), self.translate)
            for key, state in states.items()
            if state.sink in ("content", "after")
        }

    def state(self, name: str, *, behind_call: bool) -> CompiledState:
        """``behind_call``: a call has started already."""
        return self._behind_calls.get(name, self.states[name]) if behind_call else self.states[name]

    def translate(self, text: str) -> str:
        """Text in which every marker token is spelled out -> the machine's input."""
        return self._pattern.sub(lambda match: self._characters[match[0]], text) if self._pattern is not None else text

    def shown(self, text: str, special: bool) -> str:
        """The machine's input -> text; ``special``: with special tokens."""
        if not self.markers or text.isascii():
            return text
        table = self._texts if special else self._visible
        return _SURROGATE.sub(lambda match: table.get(match[0], match[0]), text)


_SURROGATE = re.compile("[\ud800-\udfff]")
_TAG = re.compile(r"[<\[].{2,}", re.DOTALL)
"""Markers that are hardly anything else."""


class CompiledState:
    """A state with the patterns that find its markers.

    Raises:
        ValueError: a marker contains another: what is found would depend on how text is cut.
    """

    def __init__(self, state: State, translate: Callable[[str], str]) -> None:
        self.sink = state.sink
        self.then, self.scan, self.lead = state.then, state.scan, state.lead
        self.pattern = re.compile(state.pattern)
        marks = {translate(mark.text): mark for mark in state.on}
        marks = {text: mark for text, mark in marks.items() if len(text) == 1 or not mark.token_only}
        self.marks = marks
        if any(a != b and a in b for a in marks for b in marks):
            raise ValueError(f"a marker contains another: {sorted(marks)}")
        self.strip = any(mark.trim for mark in marks.values())
        """Whether line breaks around the text are dropped."""
        self.longest = max((len(text) + mark.trim for text, mark in marks.items()), default=0)
        self.find = _pattern(f"\n{{0,{mark.trim}}}({re.escape(text)})" for text, mark in marks.items())
        self.partial = _pattern(f"(?:{_beginnings(text, mark.trim)})\\Z" for text, mark in marks.items())
        firsts = {text[0] for text in marks} | ({"\n"} if any(mark.trim for mark in marks.values()) else set())
        self.first = re.compile("[" + "".join(map(re.escape, sorted(firsts))) + "]") if firsts else None


def _behind_calls(state: State, states: Mapping[str, State]) -> State:
    """A state of text that watches the other markers of its format too.

    Behind a call, a marker where no state expects it is left over from one that is missing or damaged. The beginning of a
    call begins one there too; the others are dropped.
    """
    marks = list(state.on)
    for each in states.values():
        for mark in each.on:
            if not _TAG.fullmatch(mark.text) or any(mark.text in other.text or other.text in mark.text for other in marks):
                continue
            begins = each.sink == "space" and states[mark.to].sink in ("name", "skip")
            marks.append(Mark(mark.text, mark.to if begins else state.sink))
    return dataclasses.replace(state, on=tuple(marks))


def _pattern(parts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(parts) or "(?!)")


def _beginnings(text: str, trim: int) -> str:
    """Pattern of the proper prefixes of a marker."""
    nested = ""
    for character in reversed(text[:-1]):
        nested = re.escape(character) + (f"(?:{nested})?" if nested else "")
    breaks = f"\n{{1,{trim}}}" + (f"(?:{nested})?" if nested else "") if trim else ""
    return "|".join(part for part in (breaks, nested) if part) or "(?!)"
