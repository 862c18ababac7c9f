"""Tools of a model whose chat template has no known markers, over all three APIs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.server import scripted
from support.server.grammars import folded_messages, folded_responses, named_events
from support.server.harness import Api, error, events
from support.server.scripted import ScriptedLLM

from headrace.server.settings import ServerSettings
from headrace.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "1\\n</"}}\n</tool_call>'
ARGUMENTS = {"a": "1\n</"}
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return scripted.tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)


def api(made: Tokenizer, *texts: str, **options: Any) -> Api:
    return Api(ScriptedLLM(made, texts, **options))


def test_calls_in_chat(made: Tokenizer) -> None:
    server = api(made, f"Two:\n{CALL}\n{CALL}", reasoning="none")
    choice = server.chat(tools=[TOOL]).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Two:")
    assert [json.loads(call["function"]["arguments"]) for call in choice["message"]["tool_calls"]] == [ARGUMENTS] * 2
    pieces = [
        call["function"]["arguments"]
        for chunk in events(server.chat(tools=[TOOL], stream=True))
        for call in chunk["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert len(pieces) > 4 and json.loads("".join(pieces[: len(pieces) // 2])) == ARGUMENTS
    assert "[system]You can call functions." in server.llm.seen[-1].prompt
    cut = server.chat(tools=[TOOL], max_tokens=30).json()["choices"][0]
    assert cut["finish_reason"] == "length"
    plain = server.chat().json()["choices"][0]["message"]
    assert "<tool_call>" in plain["content"] and server.llm.seen[-1].prompt == "[user]Hi[assistant]"


def test_calls_in_responses_say_that_they_are_generic(made: Tokenizer) -> None:
    server = api(made, CALL, "sunny")
    asked: dict[str, Any] = {"input": "Hi", "tools": [{"type": "function", **TOOL["function"]}], "metadata": {"x": "y"}}
    final = folded_responses(named_events(server.post("/v1/responses", asked | {"stream": True})))
    (call,) = final["output"]
    assert json.loads(call["arguments"]) == ARGUMENTS
    assert final["metadata"] == {"x": "y", "tool_call_format": "generic"}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
    history = [{"role": "user", "content": "Hi"}, call, result]
    assert server.post("/v1/responses", {"input": history, "tools": asked["tools"]}).json()["output"][0]["type"] == "message"
    assert server.llm.seen[-1].prompt.endswith(f"[assistant]{CALL}[user]<tool_response>\n3\n</tool_response>[assistant]")
    for tools in ([], [{"type": "web_search"}]):
        assert "tool_call_format" not in server.post("/v1/responses", {"input": "Hi", "tools": tools}).json()["metadata"]


def test_calls_in_messages(made: Tokenizer) -> None:
    server = api(made, CALL, "sunny")
    asked: dict[str, Any] = {"messages": HI, "max_tokens": 99, "tools": [{"name": "add", "input_schema": PARAMETERS}]}
    first = folded_messages(named_events(server.post("/v1/messages", asked | {"stream": True})))
    (use,) = first["content"]
    assert (first["stop_reason"], use["input"]) == ("tool_use", ARGUMENTS)
    turns = [
        *HI,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"], "content": "3"}]},
    ]
    counted = server.post("/v1/messages/count_tokens", {"messages": turns, "tools": asked["tools"]}).json()["input_tokens"]
    second = server.post("/v1/messages", asked | {"messages": turns}).json()
    assert second["content"] == [{"type": "text", "text": "sunny"}]
    usage = second["usage"]
    assert usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"] == counted
    first_prompt, second_prompt = (request.prompt for request in server.llm.seen[-2:])
    assert second_prompt.startswith(f"{first_prompt}{CALL}[user]<tool_response>"), "the cache has all of the first turn"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_grammar_holds_required_and_named_calls(made: Tokenizer, choice: Any) -> None:
    server = api(made, CALL)
    assert server.chat(tools=[TOOL], tool_choice=choice).status_code == 200
    assert server.llm.seen[-1].constraint is not None
    assert server.chat(tools=[TOOL]).status_code == 200
    assert server.llm.seen[-1].constraint is None, "auto is free"


def test_it_may_be_named_or_turned_off(made: Tokenizer) -> None:
    off = api(made, CALL, tools="none")
    assert "--tool-call-parser" in error(off.chat(tools=[TOOL]))["message"]
    silent = api(made, CALL, tools="hermes")
    assert "--tool-call-parser generic" in error(silent.chat(tools=[TOOL]))["message"]
    named = api(scripted.with_template(made, scripted.TEMPLATE), CALL, tools="generic")
    assert named.chat(tools=[TOOL]).json()["choices"][0]["finish_reason"] == "tool_calls"
    assert "You can call functions." in named.llm.seen[-1].prompt
    held = Api(ScriptedLLM(made, [CALL]), ServerSettings(enable_auto_tool_choice=False))
    assert "--no-enable-auto-tool-choice" in error(held.chat(tools=[TOOL]))["message"]
