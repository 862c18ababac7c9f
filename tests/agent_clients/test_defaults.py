"""The first requests of agents are answered with no option set. The bodies follow the description of what the clients send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from support.server.fakes import FakeLLM
from support.server.grammars import folded_messages, folded_responses, named_events
from support.server.harness import Api, error, running
from support.server.scripted import ScriptedLLM

from headrace.errors import ConfigError
from headrace.server.settings import ServerSettings
from headrace.text.tokenizer import Tokenizer

CODEX = {"user-agent": "codex_cli_rs/0.147.0 (Debian 12; x86_64)", "session-id": "s", "thread-id": "t"}
CLAUDE = {"user-agent": "claude-cli/2.1.154 (external, cli)", "anthropic-beta": "context-management-2025-06-27"}
SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
CALL = '<tool_call>\n{"name": "%s", "arguments": {"cmd": "ls"}}\n</tool_call>'
CODEX_BODY: dict[str, Any] = {
    "model": "fake-model",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask before you write."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}], "colour": 1},
    ],
    "tools": [
        {"type": "function", "name": "shell", "parameters": SCHEMA, "strict": False, "hidden": True},
        {"type": "namespace", "name": "mcp__fs", "description": "Files.", "tools": [
            {"type": "function", "name": "exec", "parameters": SCHEMA, "defer_loading": True}]},
        {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": SCHEMA},
        {"type": "web_search", "external_web_access": False, "filters": {}},
        {"type": "image_generation"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "high", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "t",
    "service_tier": "priority",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "i"},
    "of_a_later_version": {},
}  # fmt: skip
CLAUDE_BODY: dict[str, Any] = {
    "model": "fake-model",
    "max_tokens": 32000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.154; cch=8f2a1;"},
        {"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "List the files.", "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "Today is Monday."},
    ],
    "tools": [
        {"name": "shell", "input_schema": SCHEMA, "strict": False, "eager_input_streaming": True, "hidden": True},
        {"name": "read", "input_schema": SCHEMA, "defer_loading": True, "input_examples": [{"cmd": "a"}]},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    ],
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 3}}]},
    "metadata": {"user_id": "user_1_session_2"},
    "stream": True,
    "of_a_later_version": {},
}


def test_the_first_requests_of_codex(made: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    api = Api(ScriptedLLM(made, [CALL % "mcp__fs__exec"]))
    with caplog.at_level("INFO", "headrace.server"):
        final = folded_responses(named_events(api.post("/v1/responses", CODEX_BODY, headers=CODEX)))
    (call,) = final["output"]
    assert (call["name"], call["namespace"], final["status"]) == ("exec", "mcp__fs", "completed")
    assert final["metadata"] == {"skipped_tools": "tool_search, web_search, image_generation"}
    (line,) = [record.getMessage() for record in caplog.records if "left out of a request" in record.getMessage()]
    for name in (
        "of_a_later_version",
        "service_tier",
        "input[].colour",
        "tools[].hidden",
        "reasoning.effort",
        "text.verbosity",
    ):
        assert repr(name) in line
    probe = {"model": "fake-model", "input": [], "max_output_tokens": 1, "store": False}
    assert api.post("/v1/responses", probe, headers=CODEX).status_code == 200


def test_the_first_requests_of_claude_code(made: Tokenizer) -> None:
    api = Api(ScriptedLLM(made, [CALL % "shell"]))
    final = folded_messages(named_events(api.post("/v1/messages", CLAUDE_BODY, headers=CLAUDE)))
    assert final["stop_reason"] == "tool_use" and final["content"][-1]["input"] == {"cmd": "ls"}
    counted = {name: CLAUDE_BODY[name] for name in ("model", "messages", "system", "tools", "thinking", "context_management")}
    found = api.post("/v1/messages/count_tokens", counted, headers=CLAUDE)
    usage = final["usage"]
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert found.json()["input_tokens"] == sum(usage[name] for name in names)


@pytest.mark.parametrize(("path", "body", "agent"), [("responses", CODEX_BODY, CODEX), ("messages", CLAUDE_BODY, CLAUDE)])
def test_extras_are_left_out_for_agents_alone(made: Tokenizer, path: str, body: dict[str, Any], agent: dict[str, str]) -> None:
    plain = Api(ScriptedLLM(made, ["x"]))
    strict = Api(ScriptedLLM(made, ["x"]), ServerSettings(agent_compat="strict"))
    assert plain.post(f"/v1/{path}", body).status_code == strict.post(f"/v1/{path}", body, headers=agent).status_code == 400
    typed = body | {"stream": "yes"}
    assert plain.post(f"/v1/{path}", typed, headers=agent).status_code == 400, "what is known must still be right"


def test_a_conversation_that_began_elsewhere_goes_on(made: Tokenizer) -> None:
    """With a provider, or with this server before it started again: its reasoning is sealed, and hosted tools were called."""
    user = {"role": "user", "content": "List the files."}
    items = [
        user,
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAABm"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "files"}},
        {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {}},
        {"type": "tool_search_output", "call_id": "c", "status": "completed", "execution": "client", "tools": []},
        {"role": "assistant", "content": "a.txt"},
        user,
    ]
    blocks = [
        {"type": "server_tool_use", "id": "t", "name": "web_search", "input": {"query": "files"}},
        {"type": "web_search_tool_result", "tool_use_id": "t", "content": []},
        {"type": "text", "text": "a.txt"},
    ]
    responses = {"input": items, "reasoning": {"summary": "none"}, "store": False}
    turns = [user, {"role": "assistant", "content": blocks}, user]
    messages = {"messages": turns, "max_tokens": 9, "thinking": {"type": "adaptive", "display": "omitted"}}
    messages["metadata"] = {"user_id": "u", "device": "d"}
    for path, body, agent in (("responses", responses, CODEX), ("messages", messages, CLAUDE)):
        api = Api(ScriptedLLM(made, ["x"]))
        answer = api.post(f"/v1/{path}", body, headers=agent)
        assert answer.status_code == 200, answer.text
        assert api.llm.seen[0].prompt.count("a.txt") == 1 and "ws_1" not in api.llm.seen[0].prompt
        assert api.post(f"/v1/{path}", body).status_code == 400


def test_reasoning_of_this_server_comes_back(made: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    """With its own seal alone."""
    with running(ScriptedLLM(made, ["<think>\nfirst a.txt</think>It is there."])) as server:

        def post(given: Any) -> Any:
            body = {"input": given, "include": ["reasoning.encrypted_content"], "store": False}
            return httpx.post(f"{server.url}/v1/responses", json=body, headers=CODEX).json()

        (reasoning, _) = post("Look.")["output"]
        del reasoning["content"]
        for seal, left_out in ((reasoning["encrypted_content"], 0), ("x" + reasoning["encrypted_content"], 1)):
            items = [{"role": "user", "content": "Look."}, reasoning | {"encrypted_content": seal}]
            with caplog.at_level("INFO", "headrace.server"):
                assert post(items)["status"] == "completed"
            assert caplog.text.count("input[].encrypted_content") == left_out


def test_a_call_that_was_cut_off_comes_back(made: Tokenizer) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "shell", "arguments": '{"cmd": "ls -l", "justif'}
    result = {"type": "function_call_output", "call_id": "c", "output": "failed to parse the arguments"}
    api = Api(ScriptedLLM(made, ["x"]))
    body = CODEX_BODY | {"input": [*CODEX_BODY["input"], call, result], "stream": False}
    answer = api.post("/v1/responses", body, headers=CODEX)
    assert answer.status_code == 200, answer.text
    assert '{"cmd": "ls -l"}' in api.llm.seen[0].prompt
    body["input"][-2] = call | {"arguments": "ls -l"}
    refused = error(api.post("/v1/responses", body, headers=CODEX), 400)
    assert refused["message"] == f"{refused['param']} is not a JSON object" == "input[2].arguments is not a JSON object"


@pytest.mark.parametrize(
    ("path", "body", "choice", "param"),
    [
        ("responses", CODEX_BODY, {"type": "web_search"}, "tool_choice.type"),
        ("responses", CODEX_BODY, {"type": "function", "name": "web_search"}, "tool_choice.name"),
        ("messages", CLAUDE_BODY, {"type": "tool", "name": "web_search"}, "tool_choice.name"),
        ("messages", CLAUDE_BODY | {"tools": CLAUDE_BODY["tools"][2:]}, {"type": "any"}, "tool_choice"),
    ],
)
def test_a_forced_tool_that_was_skipped(
    made: Tokenizer, path: str, body: dict[str, Any], choice: dict[str, Any], param: str
) -> None:
    answer = Api(ScriptedLLM(made, ["x"])).post(
        f"/v1/{path}", body | {"tool_choice": choice}, headers=CODEX if path == "responses" else CLAUDE
    )
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(param)


def test_the_nonce_of_the_billing_line_does_not_reach_the_prompt(made: Tokenizer) -> None:
    api = Api(ScriptedLLM(made, ["x"]))
    for nonce in ("8f2a1", "00c4e"):
        line = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.154; cch={nonce};"}
        body = CLAUDE_BODY | {"system": [line, CLAUDE_BODY["system"][1]], "stream": False}
        assert api.post("/v1/messages", body, headers=CLAUDE).status_code == 200
    first, second = (request.prompt_token_ids for request in api.llm.seen)
    assert first == second


def test_aliases() -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    assert "--alias-all-models" in error(Api(FakeLLM()).chat(model="claude-opus-5"), 404)["message"]
    any_name = ServerSettings(alias_all_models=True)
    pattern = ServerSettings(served_model_names=("qwen",), model_alias=("claude-*=qwen",))
    for settings in (any_name, pattern):
        api = Api(FakeLLM(), settings)
        for path, body in (("chat/completions", chat), ("messages", chat), ("responses", {"input": "Hi"})):
            assert api.post(f"/v1/{path}", body | {"model": "claude-opus-5"}).json()["model"] == "claude-opus-5"
        assert api.get("/v1/models/claude-opus-5").json()["id"] == "claude-opus-5"
        assert [card["id"] for card in api.get("/v1/models").json()["data"]] != ["claude-opus-5"]
    error(Api(FakeLLM(), pattern).chat(model="gpt-9"), 404)
    for alias in ("claude-*", "=qwen", "claude-*=other"):
        with pytest.raises(ConfigError, match="model_alias"):
            ServerSettings(served_model_names=("qwen",), model_alias=(alias,))


def test_codex_gets_its_form_of_the_model_with_instructions_only(tmp_path: Path) -> None:
    plain = Api(FakeLLM()).get("/v1/models?client_version=0.147.0").json()
    (card,) = plain["data"]
    assert "models" not in plain and card["context_window"] == card["max_model_len"] == card["max_output_tokens"] + 1
    path = tmp_path / "instructions.md"
    path.write_text("Be brief.", encoding="utf-8")
    api = Api(FakeLLM(), ServerSettings(codex_instructions=path))
    assert "models" not in api.get("/v1/models").json()
    (model,) = api.get("/v1/models?client_version=0.147.0").json()["models"]
    assert (model["slug"], model["base_instructions"], model["context_window"]) == ("fake-model", "Be brief.", 512)
    assert model.keys() >= {
        *("display_name", "supported_reasoning_levels", "shell_type", "visibility", "supported_in_api", "priority"),
        *("supports_reasoning_summaries", "support_verbosity", "truncation_policy", "supports_parallel_tool_calls"),
        "experimental_supported_tools",
    }
    with pytest.raises(ConfigError, match="there is no file") as refused:
        ServerSettings(codex_instructions=tmp_path / "gone")
    assert refused.value.param == "codex_instructions"
