"""Chat templates: where they come from, what they are given, and whose fault it is when they fail."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import vocabularies

from headrace.errors import ConfigError, RequestError
from headrace.host.jobs import ProcessLimits
from headrace.text.chat import normalize, parsed_template, read_template
from headrace.text.templates import TemplateRenderer
from headrace.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "<|user|>{{ message['role'] }}: {{ message['content'] }}{% if message.tool_calls %}"
    "{{ message.tool_calls[0].function.arguments | tojson }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if tools %}tools: {{ tools | tojson }}{{ '\n' }}{% endif %}"
    "{% if mood is defined %}mood: {{ mood }}{{ '\n' }}{% endif %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def renderer() -> TemplateRenderer:
    """Its process takes a second to start."""
    return TemplateRenderer(ProcessLimits(seconds=0.5, memory=2**27))


@pytest.fixture
def tokenizer(renderer: TemplateRenderer) -> Iterator[Tokenizer]:
    tokenizer = Tokenizer(vocabularies.byte_level(), renderer=renderer)
    tokenizer.hf.chat_template = TEMPLATE
    yield tokenizer


def refused(tokenizer: Tokenizer, param: str, messages: Any, /, **options: Any) -> str:
    with pytest.raises(RequestError) as error:
        tokenizer.render_chat(messages, **options)
    assert error.value.param == param
    return error.value.message


def test_rendering(tokenizer: Tokenizer) -> None:
    assert tokenizer.render_chat(HELLO) == "<|user|>user: hello\nassistant: "
    assert tokenizer.render_chat(HELLO, add_generation_prompt=False) == "<|user|>user: hello\n"
    assert "tools: [{" in tokenizer.render_chat(HELLO, tools=[{"type": "function", "function": {"name": "f"}}])
    assert "mood: grim" in tokenizer.render_chat(HELLO, chat_template_kwargs={"mood": "grim"})


def test_a_template_in_place_of_the_models(tokenizer: Tokenizer) -> None:
    assert tokenizer.render_chat(HELLO, template="{% for m in messages %}<{{ m.content }}>{% endfor %}").startswith("<")
    for template, why in (("{% for %}", "not valid Jinja: line 1"), ("{{ messages[9].nothing.more }}", "cannot render")):
        with pytest.raises(RequestError, match=why):
            tokenizer.render_chat(HELLO, template=template)
    assert "mood" not in tokenizer.render_chat(HELLO)


def test_encoding_adds_no_special_tokens_of_its_own(tokenizer: Tokenizer) -> None:
    tokenizer.hf.add_special_tokens({"bos_token": "<|user|>"})
    tokenizer.hf.add_bos_token = True
    ids = tokenizer.encode_chat(HELLO)
    assert ids == tokenizer.encode("<|user|>user: hello\nassistant: ", add_special_tokens=False)
    assert ids.count(1) == 1


def test_the_final_message_can_be_continued(tokenizer: Tokenizer) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Well, I"}]
    text = tokenizer.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("assistant: Well, I")
    refused(tokenizer, "continue_final_message", messages, continue_final_message=True)
    empty = [*HELLO, {"role": "assistant", "content": None}]
    refused(tokenizer, "continue_final_message", empty, continue_final_message=True, add_generation_prompt=False)


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_only_a_message_of_the_assistant_is_continued(tokenizer: Tokenizer, role: str) -> None:
    messages = [{"role": "assistant", "content": "Well"}, {"role": role, "content": "Hello"}]
    why = refused(tokenizer, "continue_final_message", messages, continue_final_message=True, add_generation_prompt=None)
    assert repr(role) in why


def test_text_parts_become_one_string(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "user: one\ntwo\n" in tokenizer.render_chat([{"role": "user", "content": parts}])


def test_other_parts_are_refused_by_name(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    message = refused(tokenizer, "messages[1].content[1].type", [*HELLO, {"role": "user", "content": parts}])
    assert "messages[1].content[1]" in message
    assert "image_url" in message


def test_tool_calls_carry_objects_and_need_no_content(tokenizer: Tokenizer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    assert '{"x": 1}' in tokenizer.render_chat(messages)
    assert call["function"]["arguments"] == '{"x": 1}', "the caller's message was changed"
    broken = {**call, "function": {"name": "f", "arguments": "{"}}
    path = "messages[0].tool_calls[0]"
    assert "not JSON" in refused(tokenizer, f"{path}.function.arguments", [{"role": "assistant", "tool_calls": [broken]}])
    refused(tokenizer, path, [{"role": "assistant", "tool_calls": ["f"]}])


def test_templates_may_take_arguments_as_text(tokenizer: Tokenizer) -> None:
    """DeepSeek's and others concatenate them: they get the text that the client sent, to the byte."""
    hf = copy.copy(tokenizer.hf)
    hf.chat_template = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}"
    hf.chat_template += "{{ '<' + a + '>' }}{% endfor %}{% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x":  1}'}}
    rendered = Tokenizer(hf).render_chat([*HELLO, {"role": "assistant", "tool_calls": [call]}])
    assert rendered == '<{"x":  1}>'


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ([{"content": "no role"}], "messages[0].role"),
        (["text"], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": 7}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
    ],
)
def test_malformed_messages(tokenizer: Tokenizer, messages: Any, param: str) -> None:
    refused(tokenizer, param, messages)


def test_a_template_that_refuses_says_why(tokenizer: Tokenizer) -> None:
    assert "unknown role wizard" in refused(tokenizer, "messages", [{"role": "wizard", "content": "x"}])
    tokenizer.hf.chat_template = "{{ messages[0].nothing.more }}"
    refused(tokenizer, "messages", HELLO)


def test_no_template(tokenizer: Tokenizer) -> None:
    tokenizer.hf.chat_template = None
    assert not tokenizer.has_chat_template
    assert "no chat template" in refused(tokenizer, "messages", HELLO)


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "documents", "self"])
def test_template_variables_cannot_be_the_renderers(tokenizer: Tokenizer, name: str) -> None:
    assert name in refused(tokenizer, f"chat_template_kwargs.{name}", HELLO, chat_template_kwargs={name: "x"})


def test_templates_run_in_a_sandbox(tokenizer: Tokenizer) -> None:
    for attack in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% for i in range(10**9) %}{% endfor %}"):
        tokenizer.hf.chat_template = attack
        refused(tokenizer, "messages", HELLO)


LOOP = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (LOOP, "max_template_seconds"),
        ("{% autoescape 10 ** (10 ** 9) %}{% endautoescape %}", "max_template_seconds"),
        (DOUBLED, "max_template_memory"),
        ("{{ 'x' * 10 ** 10 }}", "max_template_memory"),
        ("{{ '%10000000000d' % 1 }}", "max_template_memory"),
        ("{{ 'x' * 20000000 }}", "max_template_memory"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "recursion"),
        ("{{ messages | no_such_filter }}", "no_such_filter"),
    ],
)
def test_no_template_takes_all_the_time_or_memory(tokenizer: Tokenizer, template: str, why: str) -> None:
    """The template is refused at a request, or while it is compiled; the next request is served."""
    parsed_template(template)
    tokenizer.hf.chat_template = template
    assert why in refused(tokenizer, "messages", HELLO)
    tokenizer.hf.chat_template = TEMPLATE
    assert tokenizer.render_chat(HELLO) == "<|user|>user: hello\nassistant: "


def test_a_renderer_that_is_dropped_leaves_no_process() -> None:
    gc.collect()  # renderers of other tests
    renderer = TemplateRenderer()
    tokenizer = Tokenizer(vocabularies.byte_level(), renderer=renderer)
    tokenizer.hf.chat_template = TEMPLATE
    tokenizer.render_chat(HELLO)
    (process,) = [child for child in psutil.Process().children() if "headrace.text.template_worker" in child.cmdline()][-1:]
    process.kill()
    process.wait()
    assert tokenizer.render_chat(HELLO)
    before = {child.pid for child in psutil.Process().children()}
    del renderer, tokenizer
    gc.collect()
    assert len(before - {child.pid for child in psutil.Process().children()}) == 1


def test_values_that_are_no_json(tokenizer: Tokenizer) -> None:
    tokenizer.hf.chat_template = "{{ x }}"
    assert tokenizer.render_chat(HELLO, chat_template_kwargs={"x": object()}) == "<object>"
    refused(tokenizer, "messages", HELLO, chat_template_kwargs={"x": "\ud800"})
    refused(tokenizer, "messages", HELLO, chat_template_kwargs={"x": 2**70})


def test_operators_templates(tmp_path: Path) -> None:
    assert read_template("{{ messages }}") == "{{ messages }}"
    file = tmp_path / "template.jinja"
    file.write_text("{{ 1 }}")
    assert read_template(str(file)) == "{{ 1 }}"
    large = tmp_path / "large.jinja"
    large.write_bytes(b"x" * ((1 << 20) + 1))
    binary = tmp_path / "binary.jinja"
    binary.write_bytes(b"\xff\xfe\x00")
    for refusal in (tmp_path / "missing.jinja", large, binary, tmp_path):
        with pytest.raises(ConfigError) as error:
            read_template(str(refusal))
        assert error.value.param == "chat_template"


def test_templates_that_are_not_jinja_are_the_operators_fault() -> None:
    parsed_template(TEMPLATE)
    parsed_template("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}")
    parsed_template("{{ raise_exception('never pleased') }}")
    for broken in ("{% for %}", "{{ x | }}", "{% if %}", "{{" + "(" * 100_000, "x" * 2**21):
        with pytest.raises(ConfigError, match=r"not valid Jinja|more than"):
            parsed_template(broken)


def test_prepared_messages_are_copies() -> None:
    messages = [{"role": "assistant", "content": None}]
    assert normalize(messages) == [{"role": "assistant", "content": ""}]
    assert messages[0]["content"] is None


def test_embedded_template(embedded: Tokenizer) -> None:
    text = embedded.render_chat(HELLO)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")


def test_qwen3_template_takes_tools_and_its_own_switch(qwen3: Tokenizer) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    assert '"name": "weather"' in qwen3.render_chat(HELLO, tools=[tool])
    assert "<think>" in qwen3.render_chat(HELLO, chat_template_kwargs={"enable_thinking": False})
    assert "<think>" not in qwen3.render_chat(HELLO, chat_template_kwargs={"enable_thinking": True})


def test_renders_what_transformers_renders(tokenizer: Tokenizer) -> None:
    hf: Any = tokenizer.hf
    hf.add_special_tokens({"bos_token": "<|user|>"})
    template = (
        "{{ bos_token }}{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{{ m.reasoning_content }}"
        "{% if m.name is defined %}{{ m.name }}{% endif %}: {{ m['content'] }};{% endfor %}{% break_here %}"
    ).replace("{% break_here %}", "{% for i in [1, 2] %}{% break %}{% endfor %}")
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [{"role": "user", "content": "x", "name": None, "reasoning": "why"}, {"role": "assistant", "content": "y"}]
    for templates in (template, {"default": template, "tool_use": "{{ tools | tojson }}" + template}):
        hf.chat_template = templates
        for asked in (None, tools):
            theirs = hf.apply_chat_template(messages, tools=asked, tokenize=False, add_generation_prompt=True, mood="grim")
            assert tokenizer.render_chat(messages, tools=asked, chat_template_kwargs={"mood": "grim"}) == theirs
    hf.chat_template = {"other": template}
    assert "other" in refused(tokenizer, "messages", HELLO)
