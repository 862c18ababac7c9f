"""Tools, calls and results as text, for chat templates that know none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import vocabularies

from headrace.engine.parsed_text import Parsing
from headrace.errors import RequestError
from headrace.outputs import Message
from headrace.text.answers import AnswerFormats
from headrace.text.parse.engine import Parser
from headrace.text.spelled_tools import spelled_calls, told
from headrace.text.templates import TemplateRenderer
from headrace.text.tokenizer import Tokenizer

PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
RAISES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
TOOL = {"type": "function", "function": {"name": "add", "description": "Ü", "parameters": {"type": "object"}}}
HELLO = {"role": "user", "content": "hello"}
SHOWN = '<tools>\n{"name": "add", "description": "Ü", "parameters": {"type": "object"}}\n</tools>'
ARGUMENTS = '{"a":  "</tool_call>\\"<tool_call>", "b": {}}'
CALLS = [
    {"id": "x", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}},
    {"id": "y", "type": "function", "function": {"name": "now", "arguments": ""}},
]
HISTORY = [
    HELLO,
    {"role": "assistant", "content": "So:", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "x", "content": "3"},
    {"role": "tool", "tool_call_id": "y", "content": "4"},
    {"role": "user", "content": "and?"},
    {"role": "user", "content": "well?"},
]
WRITTEN = (
    f'So:\n<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def renderer() -> TemplateRenderer:
    return TemplateRenderer()


def tokenizer(renderer: TemplateRenderer, template: str) -> Tokenizer:
    made = Tokenizer(vocabularies.byte_level(), renderer=renderer)
    made.hf.chat_template = template
    return made


def spelled(made: Tokenizer, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    return made.render_chat(messages, tools=tools, strict=True, spell_tools=True)


def test_tools_are_in_the_system_message(renderer: TemplateRenderer) -> None:
    made = tokenizer(renderer, PLAIN)
    prompt = spelled(made, [HELLO], [TOOL])
    assert prompt.startswith("[system]You can call functions.") and SHOWN in prompt
    assert prompt.endswith("answer in words.[user]hello[assistant]")
    told = spelled(made, [{"role": "system", "content": "Be brief."}, HELLO], [TOOL])
    assert told == prompt.replace("[system]", "[system]Be brief.\n\n")
    late = [HELLO, {"role": "system", "content": "late"}]
    assert spelled(made, late, [TOOL]) == prompt.replace("[assistant]", "[system]late[assistant]")
    assert spelled(made, [HELLO]) == "[user]hello[assistant]", "nothing is written without tools"


@pytest.mark.parametrize("template", [RAISES, NO_SYSTEM])
def test_templates_without_a_system_message_have_tools_in_the_users(renderer: TemplateRenderer, template: str) -> None:
    prompt = spelled(tokenizer(renderer, template), [HELLO, {"role": "assistant", "content": "a"}, HELLO], [TOOL])
    assert prompt.startswith("[user]You can call functions.") and SHOWN in prompt
    assert "answer in words.\n\nhello[assistant]a[user]hello" in prompt


def test_an_error_of_the_template_stays_one(renderer: TemplateRenderer) -> None:
    with pytest.raises(RequestError, match="no system"):
        spelled(tokenizer(renderer, RAISES), [{"role": "system", "content": "a"}, HELLO], [TOOL])


def test_calls_and_results_are_text(renderer: TemplateRenderer) -> None:
    prompt = spelled(tokenizer(renderer, PLAIN), HISTORY)
    results = "<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>\nand?\nwell?"
    assert prompt == f"[user]hello[assistant]{WRITTEN}[user]{results}[assistant]"


def test_contents_of_parts_stay_parts() -> None:
    picture = {"type": "image"}
    result = {"role": "tool", "content": [{"type": "text", "text": "see"}, picture]}
    (message,) = spelled_calls([result])
    assert message["content"] == [
        {"type": "text", "text": "<tool_response>\nsee"},
        picture,
        {"type": "text", "text": "</tool_response>"},
    ]
    (user,) = told([{"role": "user", "content": [picture]}], "user", "Call!")
    assert user["content"] == [{"type": "text", "text": "Call!"}, picture]


@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_what_is_written_is_read_back(renderer: TemplateRenderer, cut: int) -> None:
    made = tokenizer(renderer, PLAIN)
    formats = AnswerFormats(made)
    assert formats.spells_tools and formats.decisions()[0][:2] == ("tool calls", "generic")
    options = formats.options("[user]hello[assistant]", [TOOL])
    assert options is not None and options.tools == "generic"
    parser = Parser(Parsing(made).machine(options.tools, options.reasoning, True, True))
    message = Message()
    for at in range(0, len(WRITTEN), cut):
        message.add(parser.push(WRITTEN[at : at + cut]))
    message.add(parser.finish())
    assert message.content == "So:" and parser.num_fallbacks == 0
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == [("add", json.loads(ARGUMENTS)), ("now", {})]
