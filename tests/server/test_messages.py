"""Anthropic's Messages over HTTP, streaming and not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import pytest
from support.server import scripted
from support.server.fakes import FakeLLM
from support.server.grammars import folded_messages, named_events
from support.server.harness import Api, running
from support.server.scripted import ScriptedLLM, Scripts

from headrace.config import EngineArgs
from headrace.server import sse
from headrace.server.settings import ServerSettings
from headrace.text.tokenizer import Tokenizer

TOOL: dict[str, Any] = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
OTHER = {"name": "now", "input_schema": {"type": "object"}}
UNHELD = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
BOTH = f'<think>\nsums, ü\n</think>\n\nLet me see.\n{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
HI = [{"role": "user", "content": "Hi"}]


def answered(make: Scripts, *texts: str, settings: ServerSettings | None = None, **fields: Any) -> dict[str, Any]:
    """The message, which is the same streamed and not; ids apart, which are another request's."""
    body = {"messages": HI, "max_tokens": 1000, **fields}
    whole = make(*texts, settings=settings).post("/v1/messages", body)
    assert whole.status_code == 200, whole.text
    streamed = folded_messages(named_events(make(*texts, settings=settings).post("/v1/messages", body | {"stream": True})))
    signatures = {block.pop("signature") for block in streamed["content"] if block["type"] == "thinking"}
    assert "" not in signatures
    message: dict[str, Any] = whole.json()
    for one in (message, streamed):
        assert one.pop("id").startswith("msg_")
        for block in one["content"]:
            block.pop("id", None)
            block.pop("signature", None)
    assert message == streamed
    return message


def refused(response: Any, status: int = 400) -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error", "request_id"} and set(body["error"]) - {"details"} == {"type", "message"}
    assert body["request_id"] == response.headers["x-request-id"]
    message: str = body["error"]["message"]
    return message


def test_reasoning_text_and_calls(scripts: Scripts) -> None:
    message = answered(scripts, BOTH, tools=[TOOL, OTHER])
    assert message["content"] == [
        {"type": "thinking", "thinking": "sums, ü"},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "name": "add", "input": {"a": 1, "b": 2}},
        {"type": "tool_use", "name": "now", "input": {}},
    ]
    assert (message["stop_reason"], message["stop_sequence"], message["role"]) == ("tool_use", None, "assistant")
    one = answered(scripts, BOTH, tools=[TOOL, OTHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["type"] for block in one["content"]] == ["thinking", "text", "tool_use"]


def test_stop_reasons(scripts: Scripts) -> None:
    assert answered(scripts, "one two")["stop_reason"] == "end_turn"
    stopped = answered(scripts, "one two", stop_sequences=["two"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "two")
    assert answered(scripts, "one two", max_tokens=3)["stop_reason"] == "max_tokens"
    cut = answered(scripts, CALL, tools=[TOOL], max_tokens=40)
    assert cut["stop_reason"] == "max_tokens" and cut["content"][0]["type"] == "tool_use"
    assert answered(scripts, "x" * 5000, max_tokens=10**6)["stop_reason"] == "model_context_window_exceeded"


def test_usage_is_cumulative_and_leaves_out_what_was_cached() -> None:
    body = {"messages": HI, "max_tokens": 20, "stream": True}
    events = named_events(Api(FakeLLM()).post("/v1/messages", body))
    start, end = events[0]["message"]["usage"], events[-2]["usage"]
    whole = Api(FakeLLM()).post("/v1/messages", body | {"stream": False}).json()["usage"]
    assert end == whole and start == whole | {"output_tokens": 1}
    counted = Api(FakeLLM()).post("/v1/messages/count_tokens", {"messages": HI}).json()
    assert whole["output_tokens"] == 20 and whole["cache_read_input_tokens"] == 16
    assert counted == {"input_tokens": prompt_tokens(whole)}


def prompt_tokens(usage: dict[str, int]) -> int:
    return sum(usage[name] for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"))


@pytest.mark.parametrize(("caching", "length", "stored"), [(True, 32, 16), (True, 33, 0), (False, 32, 0)])
def test_what_the_cache_keeps_of_a_prompt(caching: bool, length: int, stored: int) -> None:
    """The server has blocks of 16 tokens, and finds all of the prompt but for its last token."""
    llm = FakeLLM()
    llm.args = EngineArgs(enable_prefix_caching=caching)
    server = Api(llm)
    empty = server.post("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]}).json()["input_tokens"]
    text = "x" * (length - empty + 1)
    usage = server.post("/v1/messages", {"messages": [{"role": "user", "content": text}], "max_tokens": 2}).json()["usage"]
    assert usage["cache_creation_input_tokens"] == stored and prompt_tokens(usage) == length
    details = server.post("/v1/responses", {"input": text, "max_output_tokens": 2}).json()["usage"]
    assert details["input_tokens_details"]["cache_write_tokens"] == stored and details["input_tokens"] == length


def test_the_history_reaches_the_template(scripts: Scripts) -> None:
    server = scripts("x")
    history: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "1 +"}]},
        {"role": "user", "content": [{"type": "text", "text": "2?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "sum", "signature": "foreign"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "So:"},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1, "b": 2}},
                {"type": "tool_use", "id": "t2", "name": "add", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "3"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
                {"type": "text", "text": "and?"},
            ],
        },
        {"role": "system", "content": "late"},
    ]
    fields = {"messages": history, "max_tokens": 1, "system": [{"type": "text", "text": "Be brief."}], "tools": [TOOL]}
    assert server.post("/v1/messages", fields).status_code == 200
    prompt = server.llm.seen[-1].prompt or ""
    assert "<|im_start|>system\nBe brief.<|im_start|>user\n1 +\n2?<|im_start|>assistant\n<think>sum</think>So:" in prompt
    assert '{"name": "add", "arguments": {"a": 1, "b": 2}}' in prompt
    assert "<|im_start|>tool\n3<|im_start|>tool\nError: no<|im_start|>user\nand?<|im_start|>system\nlate" in prompt


def test_late_system_messages_are_the_users_where_the_template_refuses_them(made: Tokenizer) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    llm = ScriptedLLM(scripted.with_template(made, template), ["x"])
    reminder = "<system-reminder>\nlate\n</system-reminder>"
    for role in ("system", "developer", "ctx", "msg"):
        body = {"messages": [*HI, {"role": role, "content": "late"}], "max_tokens": 1, "system": "early"}
        assert Api(llm).post("/v1/messages", body).status_code == 200
        assert llm.seen[-1].prompt == f"[system]early[user]Hi\n{reminder}"
    turns = [{"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Go."}]
    for history in ([*body["messages"], *turns], [*HI, turns[0], body["messages"][1], turns[1]]):
        assert Api(llm).post("/v1/messages", body | {"messages": history}).status_code == 200
    held, folded = (request.prompt or "" for request in llm.seen[-2:])
    assert held == f"[system]early[user]Hi\n{reminder}[assistant]Yes?[user]Go.", "the prefix has changed"
    assert folded == f"[system]early[user]Hi[assistant]Yes?[user]{reminder}\nGo."


@pytest.mark.parametrize("takes_late", [True, False])
def test_system_turns_between_calls_and_results_follow_the_results(made: Tokenizer, takes_late: bool) -> None:
    refuse = "{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    head = "{# <tool_call> #}{% for m in messages %}" + ("" if takes_late else refuse)
    llm = ScriptedLLM(scripted.with_template(made, head + "[{{ m.role }}]{{ m.content }}{% endfor %}"), ["x"])
    use = {"type": "tool_use", "name": "add", "input": {}}
    history = [
        *HI,
        {"role": "assistant", "content": [use | {"id": "t1"}, use | {"id": "t2"}]},
        {"role": "system", "content": "late"},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "1"}]},
        {"role": "system", "content": "later"},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t2", "content": "2"}]},
    ]
    assert Api(llm).post("/v1/messages", {"messages": history, "max_tokens": 1}).status_code == 200
    reminders = "\n".join(f"<system-reminder>\n{text}\n</system-reminder>" for text in ("late", "later"))
    told = "[system]late\nlater" if takes_late else f"[user]{reminders}"
    assert llm.seen[-1].prompt == f"[user]Hi[assistant][tool]1[tool]2{told}"


def test_a_last_turn_of_the_assistant_is_continued(scripts: Scripts) -> None:
    server = scripts("x")
    history = [*HI, {"role": "assistant", "content": "It is"}]
    assert server.post("/v1/messages", {"messages": history, "max_tokens": 1}).status_code == 200
    assert (server.llm.seen[-1].prompt or "").endswith("assistant\nIt is")


def test_the_billing_line_is_left_out(scripts: Scripts) -> None:
    line = "x-anthropic-billing-header: cc_version=2; cch=8f2a1;"
    for system in (f"{line}\nBe brief.", [{"type": "text", "text": line}, {"type": "text", "text": "Be brief."}]):
        for settings, kept in ((ServerSettings(), False), (ServerSettings(keep_client_headers=True), True)):
            server = scripts("x", settings=settings)
            assert server.post("/v1/messages", {"messages": HI, "max_tokens": 1, "system": system}).status_code == 200
            prompt = server.llm.seen[-1].prompt or ""
            assert ("cch=" in prompt, "Be brief." in prompt) == (kept, True)


def test_thinking_reaches_the_template(scripts: Scripts) -> None:
    for thinking, opened in (({"type": "adaptive"}, True), ({"type": "disabled"}, False)):
        server = scripts("x")
        fields = {"messages": HI, "max_tokens": 1, "thinking": thinking}
        assert server.post("/v1/messages", fields).status_code == 200
        assert (server.llm.seen[-1].prompt or "").endswith("<think>\n") == opened
    assert scripts("x").post("/v1/messages", fields | {"thinking": {"type": "enabled", "budget_tokens": 5}}).status_code == 200


def test_a_thinking_budget_is_taken_with_a_model_that_does_not_reason(made: Tokenizer) -> None:
    plain = scripted.with_template(made, "{% for m in messages %}{{ m.content }}{% endfor %}")
    llm = ScriptedLLM(plain, ["x"], reasoning="none")
    fields = {"messages": HI, "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 5}}
    assert Api(llm).post("/v1/messages", fields).status_code == 200 and llm.seen[-1].constraint is None
    assert Api(llm).post("/v1/messages/count_tokens", {k: fields[k] for k in ("messages", "thinking")}).status_code == 200
    assert "thinking.budget_tokens" in refused(Api(ScriptedLLM(made, ["x"], reasoning="none")).post("/v1/messages", fields))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temprature": 1}, "temprature"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "content[0].source"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].type: 'tool_use'"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]}, "messages[0].content[0].y"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
            "tool_result",
        ),
        ({"system": 7}, "system"),
        ({"system": [{"name": []}]}, "system[0].name is not a parameter"),
        ({"system": [{"type": "text", "text": "x", "y": 1}]}, "system[0].y is not a parameter"),
        ({"stop_sequences": 7}, "stop_sequences"),
        ({"stop_sequences": "abc"}, "stop_sequences"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "lost"}]}]}, "tool_use_id 'lost'"),
        (
            {"tools": [OTHER | {"descripton": "x"}]},
            "tools[0].descripton is not a parameter that this server knows; did you mean",
        ),
        ({"tools": [OTHER | {"allowed_callers": ["code_execution_20250825"]}]}, "tools[0].allowed_callers"),
        ({"tools": [{"type": "telepathy_20250305", "name": "mind"}]}, "tools[0].type 'telepathy_20250305' is not supported"),
        (
            {"tools": [{"type": "web_search_20250305"}, OTHER], "tool_choice": {"type": "tool", "name": "web_search"}},
            "tool_choice",
        ),
        ({"tools": [{"type": "web_search_20250305"}, {"name": "a b", "input_schema": {}}]}, "tools[1].name"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f"}]}, "input_schema"),
        ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema.type must be object"),
        (
            {"tools": [OTHER, {"name": "f", "strict": True, "input_schema": UNHELD}]},
            "tools[1].input_schema: the schema at #/properties/a/uniqueItems: ",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": UNHELD}}},
            "output_config.format.schema: the schema at #/properties/a/uniqueItems: ",
        ),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "maybe"}}, "thinking"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"output_config": {"effort": "gigantic"}}, "output_config.effort"),
        ({"top_k": "x"}, "top_k"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(scripts: Scripts, fields: dict[str, Any], named: str) -> None:
    server = scripts("x")
    assert named in refused(server.post("/v1/messages", {"messages": HI, "max_tokens": 5, **fields}))
    assert not server.llm.seen


def test_tools_of_the_server_are_skipped_unless_it_refuses_them(scripts: Scripts) -> None:
    offered: list[dict[str, Any]] = [{"type": "web_search_20250305", "name": "web_search"}, TOOL]
    fields = {"messages": HI, "max_tokens": 500, "tools": offered}
    for settings in (ServerSettings(), ServerSettings(unsupported_tools="skip")):
        server = scripts(CALL, settings=settings)
        assert server.post("/v1/messages", fields).json()["stop_reason"] == "tool_use"
        assert "web_search" not in (server.llm.seen[-1].prompt or "")
    message = refused(scripts(CALL, settings=ServerSettings(unsupported_tools="refuse")).post("/v1/messages", fields))
    assert "tools[0].type 'web_search_20250305'" in message and "--unsupported-tools auto" in message


def test_tools_that_wait_for_a_search_are_shown_and_referred_to(scripts: Scripts) -> None:
    server = scripts("x")
    tools = [OTHER, TOOL | {"defer_loading": True, "input_examples": [{"a": 1, "b": 41}], "allowed_callers": ["direct"]}]
    content: list[Any] = [{"type": "tool_reference", "tool_name": "add"}]
    history: list[Any] = [
        *HI,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "now", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": content}]},
    ]
    body = {"messages": history, "max_tokens": 1, "tools": tools}
    assert server.post("/v1/messages", body).status_code == 200
    prompt = server.llm.seen[-1].prompt or ""
    assert prompt.count('"name": "add"') == 2 and prompt.count('"examples": [{"a": 1, "b": 41}]') == 2
    content[0]["tool_name"] = "gone"
    assert "messages[2].content[0].content[0].tool_name 'gone'" in refused(server.post("/v1/messages", body))


def test_anthropics_helpers_go_on_without_threads(made: Tokenizer) -> None:
    """The tool runner asks for a thread first, and reads from the error that there are none."""
    llm = ScriptedLLM(made, [CALL, "It is 3."])
    asked: list[tuple[int, int]] = []

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Adds."""
        asked.append((a, b))
        return str(a + b)

    with running(llm) as server, anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        thread: Any = {"thread": {"type": "create"}}
        with pytest.raises(anthropic.BadRequestError, match="thread is not supported"):
            client.beta.messages.create(model="fake-model", max_tokens=9, messages=HI, extra_body=thread)
        runner = client.beta.messages.tool_runner(model="fake-model", max_tokens=500, messages=HI, tools=[add])
        final = runner.until_done()
    assert asked == [(1, 2)] and final.content[-1].text == "It is 3."


def test_errors_have_their_dialect() -> None:
    api = Api(FakeLLM(), ServerSettings(api_keys=("key",)))
    body = {"messages": HI, "max_tokens": 1}
    refused(api.post("/v1/messages", body), 401)
    assert api.post("/v1/messages", body, headers={"x-api-key": "key", "anthropic-version": "2023-06-01"}).status_code == 200
    refused(api.post("/v1/messages/batches", {}, headers={"x-api-key": "key"}), 404)
    missing = api.post("/v1/messages", body | {"model": "gone"}, headers={"authorization": "Bearer key"})
    refused(missing, 404)
    assert missing.json()["error"]["type"] == "not_found_error"
    full = Api(FakeLLM(max_queue=0)).post("/v1/messages", body)
    refused(full, 429)
    assert full.json()["error"]["type"] == "rate_limit_error"
    llm = FakeLLM()
    broken = FakeLLM(script=lambda request, index: [72, ValueError("it broke")])
    events = named_events(Api(broken).post("/v1/messages", body | {"max_tokens": 9, "stream": True}))
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error"
    assert "error" not in Api(llm).post("/v1/completions", {"prompt": "x"}).json()


def test_pings_come_between_the_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_SECONDS", 0.002)
    body = {"messages": HI, "max_tokens": 20, "stream": True}
    events = named_events(Api(FakeLLM(step=0.005)).post("/v1/messages", body))
    folded_messages(events)
    assert [event["type"] for event in events[2:-2]].count("ping") > 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_two_tools_with_the_anthropic_client(made: Tokenizer, stream: bool) -> None:
    tools: dict[str, Callable[..., Any]] = {"add": lambda a, b: a + b, "now": lambda: "noon"}
    script = [CALL, 'It is 3. <tool_call>{"name": "now", "arguments": {}}</tool_call>', "3 at noon"]
    llm = ScriptedLLM(made, script)
    called: list[str] = []
    with running(llm) as server, anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": "1 + 2, and when?"}]
        for _ in range(4):
            fields: dict[str, Any] = {"model": "fake-model", "max_tokens": 500, "messages": messages, "tools": [TOOL, OTHER]}
            if stream:
                with client.messages.stream(**fields) as parts:
                    answer: Any = parts.get_final_message()
            else:
                answer = client.messages.create(**fields)
            messages.append({"role": "assistant", "content": answer.content})
            if answer.stop_reason != "tool_use":
                break
            results = []
            for block in answer.content:
                if block.type == "tool_use":
                    called.append(block.name)
                    result = str(tools[block.name](**block.input))
                    results.append({"type": "tool_result", "tool_use_id": block.id, "content": result})
            messages.append({"role": "user", "content": results})
        counted = client.messages.count_tokens(model="fake-model", messages=messages[:1])
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="gone", max_tokens=1, messages=messages[:1])
    assert called == ["add", "now"] and counted.input_tokens > 0
    assert answer.content[-1].text == "3 at noon" and answer.stop_reason == "end_turn"
    assert "<|im_start|>tool\n3" in (llm.seen[-1].prompt or "")
