"""The loops of agent libraries, against a server with no option set."""

from __future__ import annotations

import asyncio
from types import ModuleType
from typing import Any

import pytest
from support.server.harness import Running, running
from support.server.scripted import ScriptedLLM

from headrace.text.tokenizer import Tokenizer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def agents() -> ModuleType:
    """OpenAI's library. Its import takes seconds, which no process should spend that only collects these tests."""
    import agents

    agents.set_tracing_disabled(True)
    return agents


async def run(
    agents: ModuleType, server: Running, api: str, stream: bool, **settings: Any
) -> tuple[list[tuple[int, int]], Any]:
    """The calls of the tool, and the result."""
    asked: list[tuple[int, int]] = []

    def add(a: int, b: int) -> str:
        """Adds."""
        asked.append((a, b))
        return str(a + b)

    kind = agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
    async with server.async_openai() as client:
        model = kind(model="fake-model", openai_client=client)
        made = agents.ModelSettings(**settings)
        agent = agents.Agent(name="a", model=model, tools=[agents.function_tool(add)], model_settings=made)
        if not stream:
            return asked, await agents.Runner.run(agent, "1 + 2?")
        result = agents.Runner.run_streamed(agent, "1 + 2?")
        async for _ in result.stream_events():
            pass
        return asked, result


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_loop_of_openai_agents(agents: ModuleType, made: Tokenizer, api: str, stream: bool) -> None:
    with running(ScriptedLLM(made, [CALL, "It is 3."])) as server:
        asked, result = asyncio.run(run(agents, server, api, stream))
    assert asked == [(1, 2)] and result.final_output == "It is 3."


@pytest.mark.parametrize("stream", [False, True])
def test_openai_agents_says_what_cut_an_answer_off(agents: ModuleType, made: Tokenizer, stream: bool) -> None:
    """The library takes no part of an answer in Responses, and its error has the reason that the server gives."""
    with running(ScriptedLLM(made, ["It is 3."])) as server:
        with pytest.raises(agents.ModelBehaviorError, match="max_output_tokens"):
            asyncio.run(run(agents, server, "responses", stream, max_tokens=3))
        _, result = asyncio.run(run(agents, server, "chat", stream, max_tokens=3))
    assert result.final_output == "It "
