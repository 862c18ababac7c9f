"""Answers with one fault, in every format: cut off, a marker left out, a closing brace too many."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from support.answer_formats import WRITTEN, events, fold, machine, marker_texts, message, types, written

from headrace.outputs import Call, Event, Message
from headrace.text.parse.format import Machine

TYPES = types([
    {"function": {"name": name, "parameters": {"properties": {"city": {"type": "string"}, "at": {"type": "object"}}}}}
    for name in ("f", "mcp.g-h")
])  # fmt: skip
CALLS = [
    Call("", "f", '{"city": "word1", "at": {"x": 1}}', True),
    Call("", "mcp.g-h", '{"at": {"y": {"z": 2}}, "city": "word2"}', True),
    Call("", "f", '{"city": "word3"}', True),
]
NAMES = sorted(WRITTEN)
PIECES = re.compile(r"(?s).{1,3}")


def answers(name: str) -> Iterator[tuple[str, str]]:
    """Texts and their content: with and without reasoning and content, calls, and text behind calls."""
    for count, content, suffix in [(0, "an answer", ""), (1, "", "\nmore words"), (3, "an answer", "")]:
        text = written(name, Message("thinking" if content else "", content, CALLS[:count]))
        yield text + suffix, content


def faults(name: str, text: str) -> Iterator[tuple[int, str]]:
    """The place of a fault, and the text with it."""
    for found in re.finditer("|".join(map(re.escape, sorted(tags(name), key=len, reverse=True))), text):
        yield found.start(), text[: found.start()] + text[found.end() :]
    for found in re.finditer("}", text):
        yield found.start(), text[: found.end()] + "}" + text[found.end() :]


def tags(name: str) -> list[str]:
    return [text for text in marker_texts(name) if text[0] in "<[" and len(text) > 1]


def behind_first_call(found: list[Event]) -> str:
    """The content behind the start of the first call."""
    first = next((place for place, event in enumerate(found) if event.kind == "call_started"), len(found))
    return fold(found[first:]).content


def whole_calls(reader: Machine, text: str) -> list[Call]:
    return [call for call in message(reader, [text], TYPES).calls if call.ended]


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_is_cut_off(name: str, tokens: bool) -> None:
    """Nothing of a call that is cut off becomes content, beside whole calls; without a call, every character is there."""
    reader = machine(name, tokens)
    for text, content in answers(name):
        text = reader.translate(text)
        full = whole_calls(reader, text)
        for end in range(len(text) + 1):
            found = message(reader, [text[:end]], TYPES)
            if end % 3 == 0:
                assert message(reader, PIECES.findall(text[:end]), TYPES) == found, text[:end]
            calls = [call for call in found.calls if call.ended]
            assert [(call.name, call.arguments) for call in calls] == [
                (call.name, call.arguments) for call in full[: len(calls)]
            ]
            if found.calls:
                assert (content + "more words").startswith(found.content) and found.content.startswith(content), text[:end]
            elif not set(text[:end]) & reader._texts.keys() and not any(tag in text[:end] for tag in tags(name)):
                assert found.content + found.reasoning == text[:end]


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_an_answer_with_a_fault(name: str, tokens: bool) -> None:
    """Whole calls in front of the fault are kept, text is kept, and no marker shows behind a call."""
    reader = machine(name, tokens)
    for text, content in answers(name):
        for place, faulty in faults(name, text):
            given, before = reader.translate(faulty), whole_calls(reader, reader.translate(text[:place]))
            found = events(reader, [given], TYPES)
            whole = message(reader, [given], TYPES)
            assert message(reader, PIECES.findall(given), TYPES) == whole, faulty
            kept = [(call.name, call.arguments) for call in whole.calls if call.ended]
            assert kept[: len(before)] == [(call.name, call.arguments) for call in before], faulty
            assert content in whole.content + whole.reasoning, faulty
            if text.endswith("more words"):
                assert "more words" in whole.content + whole.reasoning + "".join(call.arguments for call in whole.calls)
            shown = behind_first_call(found)
            assert not any(tag in shown for tag in tags(name)), (faulty, shown)
            for call in whole.calls:
                assert not call.ended or isinstance(json.loads(call.arguments), dict)
