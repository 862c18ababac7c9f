"""Tool loops on the embedded model, whose template shows no tools. It is too small to call by itself: a grammar makes it."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, Literal

import anthropic
import httpx
import openai
import pytest
from support.server.running import Server

pytestmark = pytest.mark.slow
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


def test_auto_is_free_and_the_start_up_report_says_what_is_used(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-")
    model = client.models.list().data[0].id
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    hello: Any = [{"role": "user", "content": "Hello!"}]
    auto = client.chat.completions.create(model=model, messages=hello, tools=tools, max_tokens=20, temperature=0.0)
    bare = client.chat.completions.create(model=model, messages=hello, max_tokens=20, temperature=0.0)
    assert auto.usage and bare.usage and auto.usage.prompt_tokens > bare.usage.prompt_tokens + 100
    assert auto.choices[0].message.content or auto.choices[0].message.tool_calls
    assert re.search(r"tool calls\W+generic\W.*no known markers in the chat template", server.log.read_text())


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


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_anthropics_client(server: Server, stream: bool) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: pip install 'headrace[dev]'")
    client = anthropic.Anthropic(base_url=server.url, api_key="-")
    schemas = {"weather": WEATHER, "send": SEND}
    tools: list[Any] = [{"name": name, "strict": True, "input_schema": schema} for name, schema in schemas.items()]
    messages: list[Any] = [{"role": "user", "content": "Send me the weather in Paris."}]
    choices: list[Any] = [{"type": "any"}, {"type": "tool", "name": "send"}, {"type": "none"}]
    called: list[str] = []
    for choice in choices:
        if choice["type"] != "none":
            choice["disable_parallel_tool_use"] = True
        asked: dict[str, Any] = {"messages": messages, "tools": tools, "tool_choice": choice, "max_tokens": 100}
        asked["model"] = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
        if stream:
            with client.messages.stream(**asked, extra_body={"seed": 1}) as parts:
                answer = parts.get_final_message()
        else:
            answer = client.messages.create(**asked, extra_body={"seed": 1})
        messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]})
        calls = [block for block in answer.content if block.type == "tool_use"]
        for call in calls:
            called.append(call.name)
            jsonschema.validate(call.input, schemas[call.name])
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"} for call in calls]
        assert answer.stop_reason == "tool_use" if calls else choice["type"] == "none"
        messages.append({"role": "user", "content": results})
    assert len(called) == 2 and called[1] == "send"


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_an_agent_framework(server: Server, api: str, stream: bool) -> None:
    """The loop has two rounds: the first must call a tool, and the second has its result and no tool."""
    agents = pytest.importorskip("agents", reason="openai-agents is not installed: pip install openai-agents")
    agents.set_tracing_disabled(True)
    asked: list[tuple[str, int]] = []

    def weather(city: Literal["Paris", "Rome"], days: int) -> str:
        """The weather of some days."""
        asked.append((city, days))
        return "sunny"

    async def run() -> Any:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-")
        made = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
        model = made(model=(await client.models.list()).data[0].id, openai_client=client)
        settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=60, temperature=0.0)
        tool = agents.function_tool(weather, is_enabled=lambda *_: not asked)
        agent = agents.Agent(name="a", model=model, tools=[tool], model_settings=settings)
        if not stream:
            return await agents.Runner.run(agent, "What is the weather in Paris?", max_turns=3)
        result = agents.Runner.run_streamed(agent, "What is the weather in Paris?", max_turns=3)
        async for _ in result.stream_events():
            pass
        return result

    result = asyncio.run(run())
    assert len(asked) == 1 and asked[0][0] in ("Paris", "Rome")
    assert len(result.raw_responses) == 2 and isinstance(result.final_output, str) and result.final_output


def test_the_snapshot_of_a_stream_of_responses_is_the_final_object(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-")
    tools: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
    asked: dict[str, Any] = {"model": client.models.list().data[0].id, "input": "Send me the weather.", "tools": tools}
    asked["parallel_tool_calls"] = False
    with client.responses.stream(**asked, tool_choice="required", max_output_tokens=100) as parts:
        seen = list(parts)
        final = parts.get_final_response()
    assert seen[-1].type == "response.completed"
    (call, *_) = final.output
    assert call.type == "function_call" and json.loads(call.arguments)
    kept = client.responses.retrieve(final.id)
    assert [item.to_dict() for item in kept.output] == [
        {key: value for key, value in item.to_dict().items() if key != "parsed_arguments"} for item in final.output
    ]
