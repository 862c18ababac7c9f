"""Tool calls and reasoning over HTTP, streaming and not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support.server import scripted
from support.server.harness import Api, error, events, running
from support.server.scripted import ScriptedLLM, Scripts

from headrace.errors import ConfigError
from headrace.server.settings import ServerSettings
from headrace.text.answers import AnswerFormats
from headrace.text.tokenizer import Tokenizer

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
OTHER = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
BOTH = f'<think>\nsums, ü\n</think>\n\nLet me see.\n{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'


def folded(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream, and its finish reason, as a client adds them up."""
    message: dict[str, Any] = {}
    finish = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            finish = choice["finish_reason"] or finish
            for name, value in choice["delta"].items():
                if name != "tool_calls":
                    message[name] = value if name == "role" else message.get(name, "") + value
                    continue
                (call,) = value
                calls = message.setdefault("tool_calls", [])
                if "id" in call:
                    assert call["index"] == len(calls) and call["function"]["arguments"] == ""
                    calls.append({key: call[key] for key in ("id", "type")} | {"function": dict(call["function"])})
                else:
                    assert call["index"] == len(calls) - 1, "deltas of calls are interleaved"
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return {"message": message, "finish_reason": finish}


def answers(make: Scripts, *texts: str, settings: ServerSettings | None = None, **fields: Any) -> dict[str, Any]:
    """The answer, which is the same streamed and not; ids apart, which are another request's."""
    whole = make(*texts, settings=settings).chat(**fields)
    assert whole.status_code == 200, whole.text
    choice = whole.json()["choices"][0]
    stream = events(make(*texts, settings=settings).chat(stream=True, stream_options={"include_usage": True}, **fields))
    assert stream[-1]["usage"] == whole.json()["usage"]
    found = folded(stream[:-1])
    message = {name: value for name, value in choice["message"].items() if name != "refusal"}
    streamed = found["message"] | ({"content": found["message"]["content"] or None} if "tool_calls" in message else {})
    for call, other in zip(message.get("tool_calls", []), streamed.get("tool_calls", []), strict=True):
        assert call["id"].startswith("call_") and len(call["id"]) == 29
        other["id"] = call["id"]
    assert (streamed, found["finish_reason"]) == (message, choice["finish_reason"])
    return choice | {"usage": whole.json()["usage"]}


def test_calls_and_reasoning(scripts: Scripts) -> None:
    choice = answers(scripts, BOTH, tools=[TOOL, OTHER])
    message = choice["message"]
    assert message["content"] == "Let me see."
    assert message["reasoning_content"] == message["reasoning"] == "sums, ü"
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]] == [
        ("add", '{"a": 1, "b": 2}'),
        ("now", "{}"),
    ]
    assert choice["finish_reason"] == "tool_calls"
    # Both markers, two line breaks, and a token a byte.
    assert choice["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("sums, ü".encode()) + 4}


@pytest.mark.parametrize("field", ["both", "reasoning_content", "reasoning"])
def test_the_field_of_reasoning(scripts: Scripts, field: Any) -> None:
    message = answers(scripts, BOTH, settings=ServerSettings(reasoning_field=field))["message"]
    wanted = {"reasoning_content", "reasoning"} if field == "both" else {field}
    assert message.keys() & {"reasoning_content", "reasoning"} == wanted
    assert "<tool_call>" in message["content"], "no tools were offered"


def test_reasoning_is_left_out_or_left_in_the_content(scripts: Scripts) -> None:
    out = answers(scripts, BOTH, include_reasoning=False, tools=[TOOL])
    assert not out["message"].keys() & {"reasoning_content", "reasoning"} and out["message"]["content"] == "Let me see."
    assert out["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    left = answers(scripts, "<think>a</think>b", separate_reasoning=False)
    assert left["message"]["content"] == "<think>a</think>b"
    assert left["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_reasoning_that_the_prompt_opens(scripts: Scripts) -> None:
    choice = answers(scripts, "why\n</think>\n\nso", chat_template_kwargs={"enable_thinking": True})
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("why", "so")


def test_length_stays_length_at_every_token(scripts: Scripts) -> None:
    """A call that max_tokens cuts off, or that was complete before the cut, is not to be executed as if all were told."""
    tokens = len(scripts(CALL).llm.tokenizer.encode(CALL, add_special_tokens=False))
    for limit in range(1, tokens + 1):
        choice = scripts(CALL).chat(tools=[TOOL], max_tokens=limit).json()["choices"][0]
        assert choice["finish_reason"] == "length"
    assert scripts(CALL).chat(tools=[TOOL], max_tokens=tokens + 1).json()["choices"][0]["finish_reason"] == "tool_calls"


def test_choice_none_leaves_calls_in_the_content(scripts: Scripts) -> None:
    choice = answers(scripts, CALL, tools=[TOOL], tool_choice="none")
    assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"


def test_an_unfinished_call_is_no_tool_call(scripts: Scripts) -> None:
    choice = answers(scripts, '<tool_call>{"name": "add", "arguments": {"a": ', tools=[TOOL])
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": '


def test_one_call_only(scripts: Scripts) -> None:
    choice = answers(scripts, BOTH, tools=[TOOL, OTHER], parallel_tool_calls=False)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["add"]
    assert choice["finish_reason"] == "tool_calls"
    whole = answers(scripts, BOTH, tools=[TOOL, OTHER])
    assert choice["usage"]["completion_tokens"] < whole["usage"]["completion_tokens"]


def test_stop_strings_look_at_content_only(scripts: Scripts) -> None:
    text = f"<think>one two</think>\n\none {CALL.replace('add', 'one')}three two four"
    choice = answers(scripts, text, tools=[TOOL], stop=["two"])
    message = choice["message"]
    assert (message["reasoning"], message["content"], choice["finish_reason"]) == ("one two", "one three ", "tool_calls")
    assert choice["stop_reason"] == "two"
    early = answers(scripts, text, tools=[TOOL], stop=["two"], stop_in_reasoning=True)
    assert (early["message"]["reasoning"], early["message"]["content"]) == ("one ", "")
    within = answers(scripts, f"tw{CALL}o", tools=[TOOL], stop=["two"])
    assert within["message"]["content"] == "two" and within["finish_reason"] == "tool_calls"


def test_logprobs_and_token_ids_are_of_all_tokens(scripts: Scripts) -> None:
    fields: dict[str, Any] = {"tools": [TOOL], "logprobs": True, "return_token_ids": True}
    choice = scripts(BOTH).chat(**fields).json()["choices"][0]
    stream = [chunk["choices"][0] for chunk in events(scripts(BOTH).chat(stream=True, **fields))]
    tokens = [token for part in stream for token in part.get("token_ids", [])]
    entries = [entry for part in stream if part["logprobs"] for entry in part["logprobs"]["content"]]
    assert tokens == choice["token_ids"] and entries == choice["logprobs"]["content"]
    assert len(tokens) == len(entries) == len(scripts("").llm.tokenizer.encode(BOTH, add_special_tokens=False)) + 1


def test_samples_have_calls_of_their_own(scripts: Scripts) -> None:
    choices = scripts(CALL).chat(tools=[TOOL], n=2).json()["choices"]
    assert [len(choice["message"]["tool_calls"]) for choice in choices] == [1, 1]
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 2


def test_old_functions_are_tools(scripts: Scripts) -> None:
    """One call answers, in the form that belongs to functions."""
    functions = [TOOL["function"], OTHER["function"]]
    for ask, reason in ((None, "function_call"), ("auto", "function_call"), ({"name": "add"}, "stop")):
        whole = scripts(BOTH).chat(functions=functions, function_call=ask).json()["choices"][0]
        deltas = [
            chunk["choices"][0] for chunk in events(scripts(BOTH).chat(functions=functions, function_call=ask, stream=True))
        ]
        calls = [choice["delta"]["function_call"] for choice in deltas if "function_call" in choice["delta"]]
        streamed = {"name": calls[0]["name"], "arguments": "".join(call["arguments"] for call in calls)}
        assert whole["message"]["function_call"] == streamed == {"name": "add", "arguments": '{"a": 1, "b": 2}'}
        assert "tool_calls" not in whole["message"] and sum("name" in call for call in calls) == 1
        assert not any("tool_calls" in choice["delta"] for choice in deltas)
        assert whole["finish_reason"] == deltas[-1]["finish_reason"] == reason
    assert answers(scripts, "no call", functions=functions)["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": "add"}, "tools"),
        ({"tools": [7]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [TOOL, {"type": "function", "function": {"name": "a b"}}]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 65}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools[0].function.parameters.type",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}, "tools[0].function.strict"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": 7}}]}, "tools[0].function.description"),
        ({"tools": [{"functoin": {}, **TOOL}]}, "tools[0].functoin"),
        ({"tools": [TOOL | {"function": TOOL["function"] | {"paramters": {}}}]}, "tools[0].function.paramters"),
        ({"tools": [TOOL | {"function": TOOL["function"] | {"strickt": True}}]}, "tools[0].function.strickt"),
        ({"functions": [TOOL["function"] | {"descripton": "x"}]}, "functions[0].descripton"),
        ({"tools": [TOOL], "functions": []}, "functions"),
        ({"functions": [{"name": "?"}]}, "functions[0].name"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice.function.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.allowed_tools.mode"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice.allowed_tools.tools",
        ),
        (
            {"tools": [OTHER, TOOL | {"function": TOOL["function"] | {"strict": True, "parameters": {"not": {}}}}]},
            "tools[1].function.parameters",
        ),
        (
            {"tools": [TOOL | {"function": TOOL["function"] | {"parameters": {"not": {}}}}], "tool_choice": "required"},
            "tools[0].function.parameters",
        ),
        ({"tools": [TOOL], "tool_choice": "some"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": 7}, "tool_choice"),
        ({"functions": [], "function_call": {"name": "add"}}, "function_call.name"),
        ({"tool_choice": "none", "function_call": "none"}, "function_call"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    ],
)
def test_what_cannot_be_offered_is_named(scripts: Scripts, fields: dict[str, Any], param: str) -> None:
    refused = error(scripts(CALL).chat(**fields))
    assert refused["param"] == param and param.rpartition(".")[2].partition("[")[0] in refused["message"]
    assert ("did you mean" in refused["message"]) == (refused["code"] == "unknown_parameter")


def test_tools_need_a_format_and_a_template(made: Tokenizer, scripts: Scripts) -> None:
    unknown = scripts(CALL, tools="none")
    assert "--tool-call-parser" in error(unknown.chat(tools=[TOOL]))["message"]
    assert unknown.chat(tools=[TOOL], tool_choice="none").status_code == 200
    silent = ScriptedLLM(scripted.with_template(made, "{{ messages[0].content }}<tool_call>"), [CALL])
    assert "--chat-template" in error(Api(silent).chat(tools=[TOOL]))["message"]
    off = scripts(CALL, settings=ServerSettings(enable_auto_tool_choice=False))
    assert "--no-enable-auto-tool-choice" in error(off.chat(tools=[TOOL]))["message"]
    with pytest.raises(ConfigError):
        AnswerFormats(made, "hermez")


def test_the_prompt_has_the_tools_and_the_history(scripts: Scripts) -> None:
    server = scripts(CALL)
    history = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": None, "reasoning": "sum", "tool_calls": [_answer_call("call_7")]},
        {"role": "tool", "tool_call_id": "call_7", "content": "3"},
    ]
    assert server.chat(messages=history, tools=[TOOL]).status_code == 200
    prompt = server.llm.seen[-1].prompt
    assert '"description": "Adds."' in prompt
    assert '<think>sum</think><tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>' in prompt


def _answer_call(identity: str) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}


def test_mistrals_templates_get_ids_of_their_length(made: Tokenizer) -> None:
    template = "[TOOL_CALLS]{% for m in messages %}{% for c in m.tool_calls or [] %}={{ c.id }}{% endfor %}{% endfor %}"
    template += "{% for m in messages if m.tool_call_id %}={{ m.tool_call_id }}{% endfor %}{{ tools }}"
    llm = ScriptedLLM(scripted.with_template(made, template), ['[TOOL_CALLS]add[ARGS]{"a": 1}'])
    history: list[Any] = [{"role": "user", "content": "x"}]
    for identity in ("call_of_another_server", "abcdefgh9"):
        history.append({"role": "assistant", "content": None, "tool_calls": [_answer_call(identity)]})
        history.append({"role": "tool", "tool_call_id": identity, "content": "3"})
    (call,) = Api(llm).chat(messages=history, tools=[TOOL]).json()["choices"][0]["message"]["tool_calls"]
    assert len(call["id"]) == 9 and call["id"].isalnum()
    first, second, *results = re.findall("=(.{9})(?==|None|\\[)", llm.seen[-1].prompt or "")
    assert second == "abcdefgh9" and first.isalnum() and results == [first, second]


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_two_tools_with_the_openai_client(made: Tokenizer, stream: bool) -> None:
    tools: dict[str, Callable[..., Any]] = {"add": lambda a, b: a + b, "now": lambda: "noon"}
    script = [CALL, 'It is 3. <tool_call>{"name": "now", "arguments": {}}</tool_call>', "3 at noon"]
    llm = ScriptedLLM(made, script)
    with running(llm) as server:
        completions = server.openai().chat.completions
        messages: list[Any] = [{"role": "user", "content": "1 + 2, and when?"}]
        called: list[str] = []
        for _ in range(4):
            arguments: dict[str, Any] = {"model": "fake-model", "messages": messages, "tools": [TOOL, OTHER]}
            if stream:
                with completions.stream(**arguments) as parts:
                    for _part in parts:
                        pass
                    choice = parts.get_final_completion().choices[0]
            else:
                choice = completions.create(**arguments).choices[0]
            messages.append(choice.message.model_dump(exclude={"parsed"}, exclude_none=True))
            for call in messages[-1].get("tool_calls", []):
                call["function"].pop("parsed_arguments", None)
            if choice.finish_reason != "tool_calls":
                break
            for call in choice.message.tool_calls or []:
                called.append(call.function.name)
                result = tools[call.function.name](**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    assert called == ["add", "now"]
    assert choice.message.content == "3 at noon" and choice.finish_reason == "stop"
    assert "<|im_start|>tool\n3" in (llm.seen[-1].prompt or "")


def test_an_effort_reaches_the_prompt_in_every_protocol(scripts: Scripts) -> None:
    """The template of these tests opens <think> only where enable_thinking is true."""
    say = [{"role": "user", "content": "hi"}]
    on = {"chat_template_kwargs": {"enable_thinking": True}}
    for effort, body, param in (
        ("none", {"messages": say, **on, "reasoning_effort": "none"}, "reasoning_effort"),
        ("high", {"messages": say, "reasoning_effort": "high"}, "reasoning_effort"),
    ):
        found = error(scripts("x").post("/v1/chat/completions", body))
        assert found["param"] == param and effort in found["message"]
    assert scripts("x").chat(reasoning_effort="none").status_code == 200
    found = error(scripts("x").post("/v1/responses", {"input": "hi", "reasoning": {"effort": "high"}}))
    assert found["param"] == "reasoning.effort"
    answer = scripts("x").post("/v1/messages", {"messages": say, "max_tokens": 5, "output_config": {"effort": "high"}})
    assert answer.status_code == 400 and "output_config.effort" in answer.json()["error"]["message"]


def test_tools_stay_in_the_prompt_where_no_call_is_wanted_unless_the_server_leaves_them_out(made: Tokenizer) -> None:
    lengths = []
    for exclude in (False, True):
        llm = ScriptedLLM(made, ("x",))
        answer = Api(llm, ServerSettings(exclude_tools_when_tool_choice_none=exclude)).chat(tools=[TOOL], tool_choice="none")
        lengths.append(answer.json()["usage"]["prompt_tokens"])
    assert lengths[0] > lengths[1]
