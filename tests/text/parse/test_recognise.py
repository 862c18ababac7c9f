"""Formats are recognised by chat template, vocabulary and the checkpoint's response_template."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import vocabularies
from support.answer_formats import HERMES, INLINE, NAMED, TEMPLATES, environment, machine, message
from transformers.utils.chat_parsing import parse_response

from headrace.engine.parsed_text import Parsing
from headrace.errors import ConfigError
from headrace.text.answers import AnswerFormats, types_of
from headrace.text.parse.format import Machine, Vocabulary
from headrace.text.parse.formats import REASONING_FORMATS, TOOL_FORMATS, reasoning_format, tool_format
from headrace.text.parse.recognise import recognise, vocabulary_of
from headrace.text.tokenizer import Tokenizer

NOTHING = Vocabulary({})


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_templates_are_recognised(name: str) -> None:
    found = recognise(TEMPLATES[name], NOTHING)
    assert found.choice.tools is not None and found.choice.tools.name == name
    assert "in the chat template" in found.tools_by
    if not found.choice.tools.whole:
        assert found.choice.reasoning is not None


def test_names_are_known_and_unique() -> None:
    for formats in (TOOL_FORMATS, REASONING_FORMATS):
        names = [name for format in formats for name in (format.name, *format.aliases)]
        assert len(names) == len(set(names))
    assert all(tool_format(name) is format for format in TOOL_FORMATS for name in (format.name, *format.aliases))
    assert all(reasoning_format(name) is format for format in REASONING_FORMATS for name in (format.name, *format.aliases))


def test_options_override() -> None:
    found = recognise(TEMPLATES["hermes"], NOTHING, tools="mistral", reasoning="none")
    assert found.choice.tools is tool_format("mistral") and found.choice.reasoning is None
    assert found.tools_by == "--tool-call-parser mistral"
    assert recognise(TEMPLATES["hermes"], NOTHING, tools="none").choice.tools is None
    assert recognise(None, NOTHING, tools="none", reasoning="openai").choice.tools is tool_format("openai")


@pytest.mark.parametrize(("option", "value"), [("tools", "hermez"), ("tools", "hf"), ("reasoning", "hf"), ("reasoning", "x")])
def test_unknown_names_are_refused(option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=value) as caught:
        recognise("", NOTHING, **{option: value})
    assert caught.value.param == {"tools": "tool_call_parser", "reasoning": "reasoning_parser"}[option]


def test_calls_of_models_without_known_markers_are_generic() -> None:
    for template in ("{{ messages[0].content }}", "{{ tools }}<my_call>"):
        found = recognise(template, NOTHING)
        assert found.choice.tools is tool_format("generic") and found.choice.reasoning is None
        assert found.tools_by == "no known markers in the chat template, and the checkpoint has no response_template"
    assert recognise(TEMPLATES["hermes"], NOTHING, tools="generic").choice.tools is tool_format("generic")
    assert recognise(None, NOTHING).choice.tools is None
    held = recognise("{{ messages[0].content }}", NOTHING, reasoning="openai")
    assert held.choice.tools is tool_format("openai") and held.tools_by == "--reasoning-parser openai"


def test_reasoning_is_recognised_by_the_vocabulary() -> None:
    found = recognise("{{ messages[0].content }}", Vocabulary({"<think>": 7, "</think>": 8}))
    assert found.choice.reasoning is reasoning_format("deepseek_r1")
    assert found.reasoning_by == "<think> in the vocabulary"


def tokenizer(name: str) -> Tokenizer:
    hf = vocabularies.byte_level()
    hf.chat_template = TEMPLATES[name].replace("| json", "| tojson").replace("| repr", "").replace("| raw", "")
    hf.add_tokens(["<tool_call>", "</tool_call>", "word", "  ", "<|im_start|>"])
    hf.add_special_tokens({"additional_special_tokens": ["<|channel|>", "<|message|>"]})
    return Tokenizer(hf)


def test_the_vocabulary_has_added_tokens_that_look_like_markers() -> None:
    made = tokenizer("hermes")
    assert {"<tool_call>", "<|channel|>"} <= vocabulary_of(made).tokens.keys()
    assert not {"word", "  "} & vocabulary_of(made).tokens.keys()
    machine = Parsing(made).machine("hermes", "deepseek_r1", True, True)
    assert made.encode("<tool_call>", add_special_tokens=False)[0] in machine.markers


@pytest.mark.parametrize(("name", "header"), [("hermes", "<|im_start|>assistant\n"), ("openai", "<|start|>assistant")])
def test_the_header_of_an_answer(name: str, header: str) -> None:
    assert AnswerFormats(tokenizer(name)).header == header


def test_the_header_ends_before_markers() -> None:
    made = tokenizer("hermes")
    opened = TEMPLATES["hermes"].replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    made.hf.chat_template = opened.replace("| json", "| tojson")
    formats = AnswerFormats(made)
    assert formats.header == "<|im_start|>assistant\n"
    options = formats.options(made.render_chat([{"role": "user", "content": "x"}]), [], calls=False)
    assert options is not None and options.tail == "<think>\n" and not options.calls


def test_templates_of_tests_are_jinja() -> None:
    for template in TEMPLATES.values():
        environment().from_string(template)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (HERMES, '<think>why</think>text<tool_call>{"name": "f", "arguments": {"a": [1, "x"]}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>'),
        (HERMES, "only text"),
        (NAMED, 'so <call>call:f{a:<q>it "is"<q>,n:1,l:[true,<q>z<q>]}</call>'),
        (INLINE, "<tool_call>\n<function=f>\n<parameter=a>\nsome\n</parameter>\n</function>\n</tool_call>"),
    ],
)
def test_response_templates_are_read_as_transformers_reads_them(template: dict[str, Any], text: str) -> None:
    wanted = parse_response(text, template, prefix="")
    choice = recognise("", NOTHING, response_template=template).choice
    found = message(Machine(choice.states(calls=True, reasoning=True), None, "hf"), list(text))
    assert found.content.strip() == wanted.get("content", "")
    assert found.reasoning == wanted.get("thinking", "")
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in wanted.get("tool_calls", [])]
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == calls


@pytest.mark.parametrize(
    "template",
    [
        {},
        {"fields": {"tool_calls": {"open": "<a>", "content": "kv-lines"}}},
        {"fields": {"extra": {"open": "<a>"}}},
        {"fields": {"thinking": {"open_pattern": "(a|b)+", "close": "</a>"}}},
        {"fields": {"thinking": {"open": "<a>"}}},
        {"fields": []},
    ],
)
def test_a_response_template_that_no_format_says_is_left_with_the_reason(template: dict[str, Any]) -> None:
    found = recognise("", NOTHING, response_template=template)
    assert found.choice.tools is None
    assert "response_template" in found.tools_by


def test_a_turn_without_a_header_has_no_tail() -> None:
    """Some templates write no header after a tool's result: the last header is then an older turn's."""
    formats = AnswerFormats(tokenizer("hermes"))
    turn = "<|im_start|>assistant\n"
    for prompt, tail in ((f"x{turn}<think>", "<think>"), (f"x{turn}a<|end|>result: <think>", ""), ("no header", "")):
        options = formats.options(prompt, [])
        assert options is not None and options.tail == tail


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lfm2", '<|tool_call_start|>[{"name": "f", "arguments": {"a": 1}, "id": "x"}]<|tool_call_end|>'),
        ("phi4_mini_json", '<|tool_call|>{"name": "f", "arguments": {"a": 1}}<|/tool_call|>'),
        ("nemotron_json", '<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>'),
    ],
)
def test_variants_of_a_family(name: str, text: str) -> None:
    found = message(machine(name), list(text))
    assert [(call.name, call.arguments) for call in found.calls] == [("f", '{"a": 1}')] and not found.content
    recognised = recognise(text + " in a template", NOTHING).choice.tools
    assert recognised is not None and recognised.name == name


def test_types_of_long_chains_and_wide_unions() -> None:
    defs = {f"d{place}": {"$ref": f"#/$defs/d{place + 1}"} for place in range(5000)} | {"d5000": {"type": "integer"}}
    schema = {"$defs": defs}
    assert types_of({"$ref": "#/$defs/d0"}, schema) == {"integer"}
    assert types_of({"$ref": "#/$defs/d0"}, schema, 100) == frozenset()
    nested: dict[str, Any] = {"type": "null"}
    for _ in range(5000):
        nested = {"anyOf": [nested, {"type": "string"}]}
    assert types_of(nested) == {"null", "string"}
    assert types_of(nested, most=100) == types_of({"enum": [*range(200)]}, most=100) == frozenset()


def test_types_of_a_schema_that_refers_to_itself() -> None:
    loop = {"$ref": "#/$defs/a"}
    schema = {"$defs": {"a": {"anyOf": [*[loop] * 20, {"type": "string"}]}}, "properties": {"x": {"anyOf": [loop] * 20}}}
    assert types_of(schema["properties"]["x"], schema) == {"string"}
    assert types_of(loop, {"$defs": 3}) == types_of({"$ref": "#/nowhere"}, schema) == types_of(True) == frozenset()
