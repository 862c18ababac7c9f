"""Requests of Codex and Claude Code are answered with no option set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.server.grammars import folded_messages, folded_responses, named_events
from support.server.harness import Api
from support.server.scripted import ScriptedLLM

from agent_clients.recordings import RECORDINGS, recorded, second
from headrace.text.tokenizer import Tokenizer


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def answered(api: Api, recording: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    events = named_events(api.post(recording["path"], body, headers=recording["headers"]))
    return folded_responses(events) if "input" in body else folded_messages(events)


@RECORDINGS
def test_a_session(made: Tokenizer, recording: str) -> None:
    """The session has two requests; nearly the whole prompt of the first begins that of the second."""
    found = recorded(recording)
    codex = "input" in found["first"]
    text = call("exec_command", '{"cmd": "ls"}') if codex else call("Bash", '{"command": "ls"}')
    api = Api(ScriptedLLM(made, [text, "</think>Done."], max_model_len=50_000))
    answer = answered(api, found, found["first"])
    if codex:
        assert answer["output"][0].items() >= {"name": "exec_command", "arguments": '{"cmd": "ls"}'}.items()
    else:
        assert answer["stop_reason"] == "tool_use" and answer["content"][0]["input"] == {"command": "ls"}
    for body in (found["first"] | found["then"], second(found, answer)):
        parts = answered(api, found, body)["output" if codex else "content"]
        assert (parts[-1]["content"][0] if codex else parts[-1])["text"].endswith("Done.")
    first, *others = (request.prompt or "" for request in api.llm.seen)
    for prompt in others:
        assert prompt.startswith(first[: int(0.99 * len(first))]) and len(prompt) > len(first)
        assert "a.txt" in prompt


def test_a_tool_of_a_namespace_and_parallel_calls(made: Tokenizer) -> None:
    found = recorded("codex-0.169")
    text = call("multi_agent_v1__close_agent", '{"target": "a"}') + "\n" + call("get_goal", "{}")
    answer = answered(Api(ScriptedLLM(made, [text], max_model_len=50_000)), found, found["first"])
    close, goal = answer["output"]
    assert (close["name"], close["namespace"]) == ("close_agent", "multi_agent_v1")
    assert goal["name"] == "get_goal" and "namespace" not in goal
    assert answer["metadata"] == {"skipped_tools": "web_search"}


def test_recordings_have_no_texts_of_others() -> None:
    """The prompts of agents are not ours to keep."""
    for path in Path(__file__).with_name("recorded").glob("*.json"):
        assert path.stat().st_size < 16_000 and max(map(len, path.read_text(encoding="utf-8").splitlines())) < 300
