"""Grammars of whole answers: whatever a model draws under one parses back into what was asked for."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from support.answer_formats import HERMES, INLINE, NAMED

from headrace.constrain.checker import ConstraintChecker
from headrace.constrain.compiler import compiled
from headrace.constrain.compose import AnswerPlan, CallRules, HeldTool, Opening, TextGrammar, held_tools, thought_of
from headrace.constrain.lark import spelled
from headrace.constrain.matcher import GrammarMatcher
from headrace.constrain.vocabulary import GrammarVocabulary
from headrace.errors import RequestError
from headrace.option_groups import StructuredOutputsConfig
from headrace.outputs import Message
from headrace.sampling_params import StructuredOutputsParams
from headrace.text.answers import types_of
from headrace.text.parse.engine import Parser
from headrace.text.parse.format import Choice, Machine, Vocabulary
from headrace.text.parse.formats import TOOL_FORMATS, hf, reasoning_format, tool_format
from headrace.text.vocab import TokenBytes

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: pip install 'headrace[dev]'")

EOS = 256
WORDS = [b'{"', b'": ', b'",', b", ", b'"}', b"}}", b"name", b"add", b"the ", b"\n\n", b"12", b"</", "é".encode()]
RESPONSE_TEMPLATES = {"hf-hermes": HERMES, "hf-named": NAMED, "hf-inline": INLINE}
FORMATS = [*(format.name for format in TOOL_FORMATS), *RESPONSE_TEMPLATES]
THINKS = {"mistral": "mistral", "openai": ""}
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}


class World:
    """One format over a vocabulary of bytes in which its markers are tokens, or are not."""

    def __init__(self, name: str, tokens: bool) -> None:
        tools = tool_format(name) or hf.load(RESPONSE_TEMPLATES[name]).tools
        assert tools is not None
        self.opening: Opening = "start" if tools.whole else "content"
        """Without reasoning, where that is possible."""
        self.choice = Choice(tools, reasoning_format(THINKS.get(name, "think")))
        states = self.choice.states(calls=True, reasoning=True)
        markers = sorted({mark.text for state in states.values() for mark in state.on if len(mark.text) > 2}) if tokens else []
        markers = [marker for marker in markers if "\n" not in marker and not marker.startswith("```") and marker != "call:"]
        self.pieces = [*(bytes([value]) for value in range(256)), b"<eos>", *WORDS, *(marker.encode() for marker in markers)]
        first = 257 + len(WORDS)
        self.vocabulary = Vocabulary({marker: first + place for place, marker in enumerate(markers)}, frozenset())
        self.machine = Machine(states, self.vocabulary, name, tools.ids)
        self.quiet = Machine(self.choice.states(calls=False, reasoning=True), self.vocabulary, name)
        """Without calls."""
        self.token_bytes = TokenBytes(self.pieces, frozenset({EOS}))
        self.vocab_size = len(self.pieces)
        self.config = StructuredOutputsConfig(disable_any_whitespace=True)
        self.grammars = GrammarVocabulary(self, self.vocab_size, self.machine.markers)
        self.factory = ConstraintChecker(self.config, self.grammars)
        self.compiled: dict[str, GrammarMatcher] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def matcher(self, answer: dict[str, Any] | None, rules: CallRules | None, opening: Opening = "content") -> GrammarMatcher:
        key = repr((answer, rules, opening))
        if key not in self.compiled:
            params = None if answer is None else StructuredOutputsParams(**answer)
            made = self.factory.constraint(params, AnswerPlan(self.choice, self.vocabulary, opening, rules))
            self.compiled[key] = compiled(made.grammar, self.grammars, self.config)
        return self.compiled[key].with_ends((EOS,))

    def draw(self, matcher: GrammarMatcher, seed: int, most: int = 4000) -> list[int]:
        """Random logits, which favour what is rare: marker tokens, ends of strings, and markers spelled out."""
        rng = random.Random(seed)
        marks = sorted({mark.text for state in self.machine.states.values() for mark in state.marks.values()})
        spelling = [ord(lead) for lead in (self.choice.tools.lead if self.choice.tools and seed % 2 else ())]
        mask = np.zeros(-(-self.vocab_size // 32), dtype=np.int32)
        drawn: list[int] = []
        while not matcher.ended:
            assert (error := matcher.fill(mask)) is None, error
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            assert allowed, self.text(drawn)
            favoured = [token for token in allowed if token >= EOS or chr(token) in '{"}],\n<']
            if not spelling and rng.random() < 0.1:
                mark = rng.choice(["", "\n"]) + rng.choice(marks)
                pieces = rng.choice([spelled(mark, self.vocabulary.tokens), [mark]])
                spelling = [token for piece in pieces for token in (piece.encode() if isinstance(piece, str) else [piece])]
            token = rng.choice(favoured if favoured and rng.random() < 0.5 else allowed)
            if spelling and (wanted := spelling.pop(0)) in allowed:
                token = wanted
            else:
                spelling = []
            if token == EOS:
                break
            assert matcher.advance([token]) is None
            drawn.append(token)
            assert len(drawn) < most, self.text(drawn)
        return drawn

    def text(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.pieces[token] for token in tokens)

    def parsed(self, tokens: Sequence[int], tools: Sequence[HeldTool] = (), tail: str = "", *, broken: bool = False) -> Message:
        """``broken``: content may look like a call at first."""
        types = {tool.name: _types(json.loads(tool.parameters or "{}")) for tool in tools}
        machine = self.machine if tools else self.quiet
        parser = Parser(machine, types, tail)
        text = b"".join(
            machine.markers[token].encode("utf-8", "surrogatepass") if token in machine.markers else self.pieces[token]
            for token in tokens
        ).decode("utf-8", "surrogatepass")
        message = Message()
        for character in text:
            message.add(parser.push(character))
        message.add(parser.finish())
        assert broken or parser.num_fallbacks == 0, ascii(text)  # surrogates cannot be reported
        return message


def _types(schema: dict[str, Any]) -> dict[str, frozenset[str]]:
    return {name: types_of(value, schema) for name, value in schema.get("properties", {}).items()}


@functools.lru_cache(maxsize=64)
def world(name: str, tokens: bool = True) -> World:
    return World(name, tokens)


def tail_of(opening: str, made: World) -> str:
    thought = thought_of(made.choice)
    return thought.open if opening == "reasoning" and thought is not None else ""


WORLDS = [
    pytest.param(name, tokens, marks=() if tokens == bool(place % 2) or name == "openai" else pytest.mark.slow)
    for place, name in enumerate(FORMATS)
    for tokens in (True, False)
    if tokens or name != "openai"
]
"""Harmony's vocabulary has its markers."""


def seeds(quick: int, all_of_them: int) -> pytest.MarkDecorator:
    """Answers are drawn with the first few seeds, and with all of them in a test that is slow."""
    return pytest.mark.parametrize("seeds", [quick, pytest.param(all_of_them, marks=pytest.mark.slow)], ids=["few", "all"])


@seeds(2, 8)
@pytest.mark.parametrize(("name", "tokens"), WORLDS)
def test_an_answer_behind_reasoning_is_valid_and_is_content(name: str, tokens: bool, seeds: int) -> None:
    made = world(name, tokens)
    for opening in ("start", "reasoning"):
        for seed in range(seeds):
            drawn = made.draw(made.matcher({"json": CITY}, None, opening), seed)
            message = made.parsed(drawn, tail=tail_of(opening, made))
            jsonschema.validate(json.loads(message.content or ""), CITY)


TOOLS = (
    HeldTool(
        "add",
        json.dumps(
            {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "minimum": 0},
                    "why": {"type": "string", "maxLength": 12},
                    "unit": {"enum": ["m", "km"]},
                    "parts": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
                },
                "required": ["a", "why"],
            }
        ),
        "tools[0].function.parameters",
    ),
    HeldTool("add.more", json.dumps(CITY), "tools[1].function.parameters", strict=True),
    HeldTool("now", '{"type": "object", "additionalProperties": false}', "tools[2].function.parameters"),
)


def check_calls(message: Message, tools: Sequence[HeldTool]) -> None:
    schemas = {tool.name: json.loads(tool.parameters or "{}") for tool in tools}
    for call in message.calls:
        jsonschema.validate(json.loads(call.arguments), {**schemas[call.name], "additionalProperties": False})


@pytest.mark.parametrize(("name", "tokens"), WORLDS)
def test_required_calls_are_of_the_tools_with_valid_arguments(name: str, tokens: bool) -> None:
    made, called = world(name, tokens), set()
    for seed in range(6):
        opening: Opening = "start" if seed == 0 and name != "llama3_json" else "content"
        drawn = made.draw(made.matcher(None, CallRules(TOOLS, required=True), opening), seed)
        message = made.parsed(drawn, TOOLS)
        check_calls(message, TOOLS)
        called |= {call.name for call in message.calls}
        assert message.calls and not (message.content or "").strip()
    assert len(called) > 1


@pytest.mark.parametrize(("name", "tokens"), WORLDS)
def test_one_call_and_the_end(name: str, tokens: bool) -> None:
    made = world(name, tokens)
    for seed in range(3):
        matcher = made.matcher(None, CallRules(TOOLS[:1], required=True, parallel=False))
        message = made.parsed(made.draw(matcher, seed), TOOLS)
        check_calls(message, TOOLS)
        assert [call.name for call in message.calls] == ["add"] and matcher.ended


@seeds(7, 24)
@pytest.mark.parametrize(("name", "tokens"), WORLDS)
def test_text_goes_on_with_valid_calls_or_ends(name: str, tokens: bool, seeds: int) -> None:
    made, kinds = world(name, tokens), set()
    for seed in range(seeds):
        message = made.parsed(made.draw(made.matcher(None, CallRules(TOOLS), made.opening), seed, most=20_000), TOOLS)
        check_calls(message, TOOLS)
        kinds.add(bool(message.calls))
    assert True in kinds


@seeds(3, 12)
@pytest.mark.parametrize(("name", "tokens"), WORLDS)
def test_an_answer_or_calls(name: str, tokens: bool, seeds: int) -> None:
    made = world(name, tokens)
    for seed in range(seeds):
        drawn = made.draw(made.matcher({"json": CITY}, CallRules(TOOLS), made.opening), seed)
        message = made.parsed(drawn, TOOLS, broken=name == "llama3_json")
        check_calls(message, TOOLS)
        if not message.calls:
            jsonschema.validate(json.loads(message.content or ""), CITY)


RAW = [*(format.name for format in TOOL_FORMATS if format.written[0].parameter), "hf-named", "hf-inline"]


@seeds(2, 8)
@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("name", RAW)
def test_raw_values_keep_to_their_schema(name: str, tokens: bool, seeds: int) -> None:
    properties = {
        "code": {"type": "string", "pattern": "^[a-z]{2}-[0-9]+/?$"},
        "unit": {"$ref": "#/$defs/unit"},
        "text": {"type": "string", "minLength": 2, "maxLength": 5},
        "note": {"type": ["string", "null"]} if name != "deepseek_v32" else {"type": "null"},
        "point": {"type": "object", "properties": {"x": {"$ref": "#/$defs/unit"}}, "required": ["x"]},
        "on": {"type": "boolean"},
        "size": {"type": "number", "minimum": 1, "maximum": 2},
        "names": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 3},
        "maybe": {
            "type": ["object", "boolean"],
            "properties": {"k": {"type": "null"}, "l": {"const": True}},
            "required": ["l"],
        },
        "tree": {"$ref": "#/$defs/tree"},
    }
    tree = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}
    definitions = {"unit": {"enum": ["a", "b\n<"]}, "tree": tree}
    schema = {"type": "object", "properties": properties, "required": [*properties], "$defs": definitions}
    tool = HeldTool("f", json.dumps(schema), "tools[0].function.parameters")
    made = world(name, tokens)
    for seed in range(seeds):
        drawn = made.draw(made.matcher(None, CallRules((tool,), required=True, parallel=False)), seed)
        (call,) = made.parsed(drawn, [tool]).calls
        jsonschema.validate(json.loads(call.arguments), schema | {"additionalProperties": False})


PATCH = r"""
start: "*** Begin" LF hunk{1,3} end   // codex's, in short
hunk: "*** Add: " FILE LF add{0,3} -> added
    | "*** Delete: " FILE LF
FILE: /(.{1,8})/
add: ("+" | "-") /(.{0,8})/ LF
end: "*** End" LF?
%import common.LF
"""


@seeds(1, 6)
@pytest.mark.parametrize(("name", "tokens"), WORLDS)
def test_the_text_of_a_custom_tool_is_of_its_grammar(name: str, tokens: bool, seeds: int) -> None:
    made = world(name, tokens)
    for syntax, definition in (("lark", PATCH), ("regex", r'a+|x[\s"\\b]{2,5}x')):
        grammar = TextGrammar(syntax, definition)
        tools = held_tools([{"function": {"name": "patch"}}], grammars={"patch": grammar})
        given = {"grammar" if syntax == "lark" else "regex": definition}
        for seed in range(seeds):
            matcher = made.matcher(None, CallRules(tools, required=True, parallel=False))
            drawn = made.draw(matcher, seed, most=20_000)
            (call,) = made.parsed(drawn, [msgspec.structs.replace(tools[0], parameters=TEXT)], broken=True).calls
            text = json.loads(call.arguments)["input"]
            accepts = made.matcher(given, None)
            assert accepts.advance([*text.encode()]) is None and accepts.accepting, text


TEXT = '{"properties": {"input": {"type": "string"}}}'


@pytest.mark.parametrize("part", ["%ignore /x/", "/a/i", "/[[:alpha:]]/", '%json {"type": "null"}', "~/a/", "/a(?=b)/"])
def test_grammars_of_texts_that_cannot_stand_in_json_are_refused(part: str) -> None:
    definition = f'start: "a"\n{part}' if part.startswith("%ig") else f"start: {part}"
    tools = held_tools([{"function": {"name": "patch"}}], grammars={"patch": TextGrammar("lark", definition)})
    with pytest.raises(RequestError) as found:
        world("hermes").matcher(None, CallRules(tools, required=True))
    assert found.value.param == "tools[0].format.definition"


@pytest.mark.parametrize(
    ("name", "call", "accepted"),
    [
        ("pythonic", '[f(on=True, tags=["a"], at={"x": None})]', True),
        ("pythonic", '[f(on=true, tags=["a"], at={"x": null})]', False),
        ("pythonic", "[f(tags=[])]", True),
        ("pythonic", "[f(on=False, )]", False),
        ("gemma4", '<|tool_call>call:f{on:true,tags:[<|"|>a<|"|>],at:{x:null}}<tool_call|>', True),
        ("gemma4", '<|tool_call>call:f{on:true,tags:["a"],at:{"x":null}}<tool_call|>', False),
        ("hf-named", "<call>call:f{tags:[<q>a<q>,<q>b<q>]}</call>", True),
        ("jamba", '<tool_calls>[\n    {"name": "f", "arguments": {"tags":[]}}\n]</tool_calls>', True),
        ("hf-inline", "<tool_call>\n<function=f>\n<parameter=tags>\n[]\n</parameter>\n</function>\n</tool_call>", False),
        ("hf-inline", "<tool_call>\n<function=f><parameter=tags>\n[]\n</parameter></function>\n</tool_call>", True),
    ],
)
def test_calls_are_written_as_the_format_writes_them(name: str, call: str, accepted: bool) -> None:
    at = {"type": "object", "properties": {"x": {"type": "null"}}, "required": ["x"]}
    properties = {"on": {"type": "boolean"}, "tags": {"type": "array", "items": {"type": "string"}}, "at": at}
    tool = HeldTool("f", json.dumps({"properties": properties}), "tools[0].function.parameters")
    made = world(name, tokens=False)
    matcher = made.matcher(None, CallRules((tool,), required=True))
    assert (matcher.advance([*call.encode()]) is None and matcher.accepting) is accepted


def test_names_that_a_format_cannot_write_are_refused() -> None:
    for name, key in (("1f", "a"), ("f", "a b")):
        tool = HeldTool(name, json.dumps({"properties": {key: {}}}), "tools[0].function.parameters")
        with pytest.raises(RequestError, match="pythonic") as found:
            world("pythonic").matcher(None, CallRules((tool,), required=True))
        assert found.value.param == tool.param


@pytest.mark.parametrize("keywords", [{"format": "date"}, {"type": ["string", "integer"], "minimum": 3}])
def test_raw_values_that_cannot_be_held_are_refused(keywords: dict[str, Any]) -> None:
    schema = {"properties": {"a": {"type": "string"} | keywords}}
    tool = HeldTool("f", json.dumps(schema), "tools[0].function.parameters")
    with pytest.raises(RequestError, match=r"#/properties/a.*qwen3_coder"):
        world("qwen3_coder").matcher(None, CallRules((tool,), required=True))


def test_a_schema_that_cannot_be_held_is_named_with_its_place() -> None:
    tool = HeldTool("f", json.dumps({"properties": {"a": {"not": {}}}}), "tools[3].function.parameters")
    with pytest.raises(RequestError, match="#/properties/a/not") as found:
        world("hermes").matcher(None, CallRules((tool,), required=True))
    assert found.value.param == "tools[3].function.parameters"


@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("answer", [None, {"json": CITY}])
def test_a_thinking_budget_is_exact_to_the_token(budget: int, answer: dict[str, Any] | None) -> None:
    made = world("hermes")
    opening, closing = (made.vocabulary.tokens[text] for text in ("<think>", "</think>"))
    params = None if answer is None else StructuredOutputsParams(**answer)
    constraint = made.factory.constraint(params, AnswerPlan(made.choice, made.vocabulary, "reasoning", budget=budget))
    matcher = compiled(constraint.grammar, made.grammars, made.config).with_ends((EOS,))
    mask = np.zeros(-(-made.vocab_size // 32), dtype=np.int32)

    def allowed() -> set[int]:
        assert matcher.fill(mask) is None
        return {*np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()}

    for _ in range(budget):
        assert {closing, ord("a")} < allowed()
        assert matcher.advance([ord("a")]) is None
    assert allowed() == {closing}
    assert matcher.advance([closing]) is None
    if answer is None:
        assert allowed() == {*range(made.vocab_size)} - {opening}
    else:
        assert made.parsed([closing, *made.draw(matcher, 1)], tail="<think>").content
