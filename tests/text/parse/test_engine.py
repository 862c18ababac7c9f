"""Properties of every format: cutting, round trips, truncation, mutation, fuzz."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.answer_formats import (
    RAW,
    TEMPLATES,
    UNMARKED,
    choice,
    environment,
    events,
    fold,
    machine,
    marker_texts,
    message,
    plain,
    types,
    written,
)

from headrace.outputs import Call, Event, Message
from headrace.text.chat import normalize
from headrace.text.parse.engine import Parser
from headrace.text.parse.format import TEXT_SINKS, Machine, Mark, State

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}}},
                "properties": {
                    "city": {"type": "string"},
                    "count": {"type": "integer"},
                    "ratio": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                    "flag": {"type": ["boolean", "null"]},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "at": {"$ref": "#/$defs/point"},
                },
            },
        },
    }
    for name in ("get_weather", "mcp.search-docs")
]
TYPES = types(TOOLS)
NAMES = sorted(TEMPLATES)
TEXT = st.text(
    st.one_of(st.sampled_from(" {}[]\",:;=()'\n<>/|&\\éß京😀"), st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"])),
    max_size=12,
)
PROSE = st.text(st.sampled_from("abc xyz.,é京\n"), max_size=20).map(str.strip)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "city": TEXT,
        "count": st.integers(-(10**6), 10**6),
        "ratio": st.none() | st.sampled_from([0.5, -1.25, 3.0]),
        "flag": st.none() | st.booleans(),
        "tags": st.lists(TEXT, max_size=2),
        "at": st.fixed_dictionaries({}, optional={"x": st.sampled_from([1, 2.5])}),
    },
)
CALLS = st.lists(
    st.builds(
        lambda name, arguments: Call("", name, json.dumps(arguments), True),
        st.sampled_from([tool["function"]["name"] for tool in TOOLS]),
        ARGUMENTS,
    ),
    max_size=3,
)
MESSAGES = st.builds(lambda reasoning, content, calls: Message(reasoning, content, calls), PROSE, PROSE, CALLS)


def cuts(text: str, seed: int) -> list[str]:
    """The text in random pieces."""
    chance, pieces, place = random.Random(seed), [], 0
    while place < len(text):
        size = chance.choice((1, 1, 2, 3, 5, 8, 30))
        pieces.append(text[place : place + size])
        place += size
    return pieces


def readable(name: str, wanted: Message) -> bool:
    """Whether the format can say this: raw values have no escape for their own markers or for the line breaks around them."""
    if name == "ernie45" and not wanted.content:
        return True
    if name == "pythonic" or not wanted.calls:
        return True
    if name not in RAW and name != "gemma4":
        return True
    values = [value for call in wanted.calls for value in json.loads(call.arguments).values()]
    texts = [text for value in values for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
    if any(marker in text for text in texts for marker in marker_texts(name)):
        return False
    return not any(text.startswith("\n") or text.endswith("\n") for text in texts)


@pytest.mark.parametrize("tokens", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize("name", NAMES)
def test_round_trip_and_any_cutting(name: str, tokens: bool) -> None:
    """A message that a template writes is read back, and every cutting of it gives the same answer."""
    reader = machine(name, tokens)

    @settings(max_examples=25, deadline=None, derandomize=True, database=None)
    @given(wanted=MESSAGES, seed=st.integers(0, 999))
    def check(wanted: Message, seed: int) -> None:
        text = reader.translate(written(name, wanted))
        whole = message(reader, [text], TYPES)
        assert message(reader, list(text), TYPES) == whole
        assert message(reader, cuts(text, seed), TYPES) == whole
        if readable(name, wanted):
            assert plain(whole) == plain(wanted), text

    check()


@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_an_answer_sent_back_is_a_prefix_of_the_next_prompt(name: str, calls: int) -> None:
    """A client sends back the answer that was read, and it is rendered again: the prefix cache finds all of it."""
    arguments = ['{"city": "Köln", "count": 3, "tags": ["a", "b"]}', '{"flag": true}']
    made = [Call(f"call_{place}", TOOLS[0]["function"]["name"], arguments[place], True) for place in range(calls)]
    content = "" if name == "pythonic" and calls else "Let me see."
    answer = written(name, Message("why", content, made))
    found = message(machine(name), list(answer), TYPES)
    sent = {
        "role": "assistant",
        "content": found.content or None,
        "reasoning_content": found.reasoning,
        "tool_calls": [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in found.calls
        ],
    }
    results = [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in found.calls]
    user = {"role": "user", "content": "How is it?"}
    after = [{name: value for name, value in turn.items() if value not in (None, [])} for turn in (user, sent, *results)]
    history = normalize(after, strict=True)
    for turn in history:
        turn["tool_calls"] = [call["function"] for call in turn.get("tool_calls") or []]
    template = environment().from_string(TEMPLATES[name])
    prompt = template.render(messages=[user], add_generation_prompt=True)
    assert template.render(messages=history, add_generation_prompt=True).startswith(prompt + answer)


@pytest.mark.parametrize("name", NAMES)
def test_any_cutting_of_damaged_text(name: str) -> None:
    """Markers damaged, doubled, nested, cut off: every cutting gives the same, and no visible text is lost."""
    reader = machine(name)
    for seed in range(60):
        text = damaged(name, seed)
        whole = message(reader, [text], TYPES)
        assert message(reader, list(text), TYPES) == whole, text
        assert message(reader, cuts(text, seed), TYPES) == whole, text
        assert not lost(name, text, whole), text


def example(name: str, seed: int) -> str:
    chance = random.Random(seed)
    calls = [
        Call("", "get_weather", json.dumps({"city": f"word{chance.randrange(99)}", "count": chance.randrange(99)}), True)
        for _ in range(chance.randrange(3))
    ]
    return written(name, Message(chance.choice(("", "thinking hard")), chance.choice(("", "an answer")), calls))


def damaged(name: str, seed: int) -> str:
    chance, text = random.Random(seed), example(name, seed)
    markers = marker_texts(name)
    for _ in range(chance.randrange(1, 4)):
        place = chance.randrange(len(text) + 1)
        match chance.randrange(5):
            case 0:
                text = text[:place] + chance.choice(markers) + text[place:]
            case 1:
                marker = chance.choice(markers)
                text = text.replace(marker, marker[: chance.randrange(len(marker))], 1)
            case 2:
                text = text[:place]
            case 3:
                text = text[:place] + text[place + chance.randrange(4) :]
            case _:
                text = text[:place] + chance.choice(('"', "}", "{", "<", "word", ">", "\n")) + text[place:]
    return text


def lost(name: str, text: str, found: Message) -> list[str]:
    """Words of the text that the answer does not have."""
    shown = found.reasoning + found.content + "".join(call.name + call.arguments for call in found.calls)
    return [word for word in ("hard", "answer", *[f"word{n}" for n in range(99)]) if text.count(word) > shown.count(word)]


@pytest.mark.parametrize("name", NAMES)
def test_truncation(name: str) -> None:
    """An answer cut off anywhere is a beginning of the whole answer, and no call is complete early."""
    wanted = Message("why", "text", [Call("", "get_weather", '{"city": "Köln", "tags": ["a", "b"]}', True)])
    for tokens in (False, True):
        reader = machine(name, tokens)
        text = reader.translate(written(name, wanted))
        full = message(reader, [text], TYPES)
        for end in range(len(text)):
            parser = Parser(reader, TYPES, ids=random.Random(0))
            found = fold(parser.push(text[:end]))
            assert full.reasoning.startswith(found.reasoning)
            assert full.content.startswith(found.content)
            for call, whole in zip(found.calls, full.calls, strict=False):
                assert whole.arguments.startswith(call.arguments)
                assert call.ended == (call.arguments == whole.arguments)
            parser.finish()


@pytest.mark.parametrize("name", sorted(UNMARKED))
def test_calls_without_a_marker(name: str) -> None:
    reader = machine(name)
    whole = message(reader, [UNMARKED[name]])
    assert message(reader, list(UNMARKED[name])) == whole
    assert [(call.name, call.ended) for call in whole.calls] == [("f", True), ("g", True)]
    assert whole.content == ""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_json", '{"answer": 42}'),
        ("llama3_json", "{not json"),
        ("llama3_json", " {'name': 1}"),
        ("pythonic", "[1] says so"),
        ("pythonic", "[link](http://example.org)"),
        ("pythonic", "[f(x) for x in y]"),
        ("hermes", "a <tool_call is not a marker, <tool_cal"),
        ("hermes", "<tool_call>\nnot json\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\nprose</tool_call>"),
        ("mistral", "[TOOL_CALLS]no call at all"),
    ],
)
def test_what_is_no_call_stays_content(name: str, text: str) -> None:
    found = message(machine(name), list(text))
    assert (found.content, found.calls) == (text, [])


def held(parser: Parser) -> str:
    return parser._buffer


@pytest.mark.parametrize("name", NAMES)
def test_only_the_beginning_of_a_marker_is_held_back(name: str) -> None:
    reader = machine(name)
    for seed in range(30):
        parser = Parser(reader, TYPES)
        for piece in cuts(damaged(name, seed), seed):
            parser.push(piece)
            rest = held(parser)
            assert not rest or any(
                (("\n" * mark.trim) + marker)[skip:].startswith(rest)
                for marker, mark in parser._state.marks.items()
                for skip in range(mark.trim + 1)
            )


def test_a_marker_that_contains_another_is_refused() -> None:
    states = {"start": State("start", (Mark("<a>", "start"), Mark("<a>b", "start")))}
    with pytest.raises(ValueError, match="contains another"):
        Machine(states, None, "broken")


def test_a_spelled_marker_is_text_where_the_vocabulary_has_the_token() -> None:
    reader = machine("hermes", tokens=True)
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert message(reader, list(text)) == Message(content=text)
    assert [call.name for call in message(reader, list(reader.translate(text))).calls] == ["f"]
    # Within a call, too.
    call = (
        reader.translate("<tool_call>") + '{"name": "f", "arguments": {"a": "</tool_call>"}}' + reader.translate("</tool_call>")
    )
    assert message(reader, list(call)).calls[0].arguments == '{"a": "</tool_call>"}'


def test_a_call_ends_reasoning_where_its_marker_is_a_token() -> None:
    text = '<think>\nhm<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    spelled, tokens = machine("hermes"), machine("hermes", tokens=True)
    assert message(spelled, [text]).calls == []
    found = message(tokens, [tokens.translate(text)])
    assert (found.reasoning, [call.name for call in found.calls]) == ("hm", ["f"])


@pytest.mark.parametrize(
    ("tail", "text", "reasoning", "content"),
    [
        ("", "<think>\na\n</think>\n\nb", "a", "b"),
        ("<think>\n", "a\n</think>\n\nb", "a", "b"),
        ("<think>\n", "\na", "a", ""),
        ("<think>\n\n</think>\n\n", "b", "", "b"),
        ("</think>", "b", "", "b"),
        ("<think>first", " second</think>b", " second", "b"),
        ("an answer that", " goes on", "", " goes on"),
        ("", "</think>b", "", "b"),
        ("", "<think></think>b", "", "b"),
        ("", "<think><think>a</think>b", "<think>a", "b"),
        ("", "a <think> b", "", "a <think> b"),
        ("", "<think>a</think><think>b</think>c", "ab", "c"),
        ("", "<think>unclosed", "unclosed", ""),
        ("", " \n b", "", " \n b"),
    ],
)
def test_reasoning_begins_where_the_prompt_ends(tail: str, text: str, reasoning: str, content: str) -> None:
    reader = machine("hermes")
    for pieces in ([text], list(text)):
        found = message(reader, pieces, tail=tail)
        assert (found.reasoning, found.content) == (reasoning, content)


def test_a_call_that_the_prompt_opened_is_told() -> None:
    reader = machine("hermes")
    tail = 'done <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "g", "arguments": {"b": '
    found = message(reader, ["2}}</tool_call>"], tail=tail)
    assert found.content == ""
    assert [(call.name, call.arguments, call.ended) for call in found.calls] == [("g", '{"b": 2}', True)]


def test_calls_are_content_where_they_are_not_looked_for() -> None:
    text = '<think>a</think><tool_call>{"name": "f", "arguments": {}}</tool_call>'
    found = Machine(choice("hermes").states(calls=False, reasoning=True), None, "hermes")
    assert message(found, list(text)) == Message("a", '<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    raw = Machine(choice("hermes").states(calls=False, reasoning=False), None, "hermes")
    assert message(raw, list(text)) == Message(content=text)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "arguments": ""}', "{}"),
        ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": 1.0, "b":  "\\u00e9"}}', '{"a": 1.0, "b":  "\\u00e9"}'),
        ('{"name": "f", "arguments": {"a": "two\nlines"}}', '{"a": "two\\nlines"}'),
        ('{"id": 3, "name": "f", "arguments": {}, "type": "function"}', "{}"),
        ('{"name": "f", "arguments": {"a": 1}', '{"a": 1}'),
    ],
)
def test_arguments_of_json(text: str, arguments: str) -> None:
    """They pass as they are; a double-encoded object is decoded once; none is ``{}``."""
    for end in ("\n</tool_call>", "</tool_call>"):
        found = message(machine("hermes"), list("<tool_call>" + text + end))
        assert [(call.name, call.arguments, call.ended) for call in found.calls] == [("f", arguments, True)]
        assert found.content == ""


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": 1,}', "{a: 1}", '{"a": [1}', '{"a" 1}', "{" * 200])
def test_arguments_that_are_no_json_do_not_end_the_call(text: str) -> None:
    found = message(machine("mistral"), list("[TOOL_CALLS]f[ARGS]" + text))
    assert not any(call.ended for call in found.calls)
    assert "".join(call.arguments for call in found.calls) + found.content.removeprefix("[TOOL_CALLS]f[ARGS]") == text


@pytest.mark.parametrize(
    ("raw", "schema", "value"),
    [
        ("12", {"type": "string"}, "12"),
        ("12", {"type": "integer"}, 12),
        ("12.0", {"type": "integer"}, 12),
        ("12", {"type": "number"}, 12),
        ("True", {"type": "boolean"}, True),
        ("None", {"type": ["string", "null"]}, None),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("word", {"type": "integer"}, "word"),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ("{'a': True}", {"type": "object"}, {"a": True}),
        ('{"a": 1}', {"type": "string"}, '{"a": 1}'),
        ("b", {"enum": ["a", "b"]}, "b"),
        ("12", {}, 12),
        ("word", {}, "word"),
        ("1e999", {"type": "integer"}, "1e999"),
        ("", {"type": "integer"}, ""),
    ],
)
def test_raw_values_are_cast_by_the_schema(raw: str, schema: dict[str, Any], value: Any) -> None:
    tool = {"function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{raw}\n</parameter>\n</function>\n</tool_call>"
    found = message(machine("qwen3_coder"), list(text), types([tool]))
    assert json.loads(found.calls[0].arguments) == {"a": value}


def test_strings_of_raw_values_stream() -> None:
    parser = Parser(machine("qwen3_coder"), {"f": {"a": frozenset({"string"})}})
    parser.push("<tool_call><function=f><parameter=a>\nsome")
    assert parser.push(" text") == [Event("arguments", " text")]
    assert parser.push('"') == [Event("arguments", '\\"')]


def test_the_models_own_ids_are_kept_and_mistrals_have_their_length() -> None:
    kimi = message(machine("kimi_k2"), [written("kimi_k2", Message(calls=[Call("", "f", "{}"), Call("", "g", "{}")]))])
    assert [call.id for call in kimi.calls] == ["functions.f:0", "functions.g:1"]
    (mistral,) = message(machine("mistral"), ["[TOOL_CALLS]f[ARGS]{}"]).calls
    assert len(mistral.id) == 9 and mistral.id.isalnum()
    (other,) = message(machine("hermes"), ['<tool_call>{"name": "f"}</tool_call>']).calls
    assert other.id.startswith("call_") and len(other.id) == 29


def test_tokens_of_reasoning_are_counted_with_their_markers() -> None:
    parser = Parser(machine("hermes"))
    pieces = ["<think>", "\n", "a", " b", "</think>", "\n\n", "c"]
    found = fold([event for piece in pieces for event in parser.push(piece)] + parser.finish())
    assert (found.reasoning, found.content, found.reasoning_tokens) == ("a b", "c", 5)


def test_what_breaks_a_format_is_counted() -> None:
    parser = Parser(machine("hermes"))
    parser.push("<tool_call>no")
    assert parser.num_fallbacks == 1


def random_texts(name: str, count: int) -> Iterator[str]:
    chance = random.Random(name)
    atoms = [
        *marker_texts(name),
        *"{}[]()\"'\\:,=;\n <>|\0é😀",
        "name",
        "arguments",
        '{"name": "f", ',
        '"arguments": {',
        "f(a=1",
        "0",
    ]
    for _ in range(count):
        yield "".join(chance.choices(atoms, k=chance.randrange(1, 30)))


def fuzz(name: str, count: int) -> None:
    readers = [machine(name), machine(name, True)]
    for number, text in enumerate(random_texts(name, count)):
        reader = readers[number % 2]
        text = reader.translate(text)
        whole = message(reader, [text], TYPES)
        assert message(reader, cuts(text, number), TYPES) == whole, text
        for call in whole.calls:
            assert not call.ended or isinstance(json.loads(call.arguments), dict)
        json.dumps(whole.content + whole.reasoning, ensure_ascii=False).encode()


@pytest.mark.parametrize("name", NAMES)
def test_fuzz(name: str) -> None:
    """No text makes the parser fail, depend on how it is cut, or end a call whose arguments are not an object."""
    fuzz(name, 500)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_fuzz_longer(name: str) -> None:
    fuzz(name, 5_000)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "openai", "gemma4"])
def test_cost_of_a_token(name: str) -> None:
    """Processor time a token: about 5 microseconds, far below a step, also in long texts."""
    answer = Message(
        "why not " * 1600, "because it is " * 1600, [Call("", "get_weather", json.dumps({"city": "x y " * 1600}), True)]
    )
    text = written(name, answer)
    pieces = [text[place : place + 4] for place in range(0, len(text), 4)]
    parser = Parser(machine(name), TYPES)
    start = time.thread_time()
    for piece in pieces:
        parser.push(piece)
    assert (time.thread_time() - start) / len(pieces) < 100e-6


def test_states_of_text_have_what_they_need() -> None:
    for name in NAMES:
        for key, state in machine(name).states.items():
            assert state.sink in TEXT_SINKS or state.marks or state.scan, (name, key)
            targets = {mark.to for mark in state.marks.values()} | {state.then} | set(state.lead.values())
            assert targets - {"", "route"} <= machine(name).states.keys(), (name, key)


def test_events_of_calls_are_not_interleaved() -> None:
    text = written("hermes", Message("a", "b", [Call("", "f", '{"x": 1}'), Call("", "g", '{"y": 2}')]))
    kinds = [(event.kind, event.index) for event in events(machine("hermes"), list(text)) if event.text or event.name]
    assert [kind for place, kind in enumerate(kinds) if kind not in kinds[:place]] == [
        ("reasoning", 0),
        ("content", 0),
        ("call_started", 0),
        ("arguments", 0),
        ("call_started", 1),
        ("arguments", 1),
    ]


def test_a_long_prompt_of_markers_takes_linear_time() -> None:
    """A prefilled answer goes through the machine in the engine's loop: 40,000 broken calls take half a second."""
    start = time.process_time()
    Parser(machine("hermes", tokens=True), tail="x <tool_call>{}</tool_call>" * 40_000)
    assert time.process_time() - start < 3
