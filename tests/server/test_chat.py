"""/v1/chat/completions: shapes, parameters, messages."""

from __future__ import annotations

from typing import Any

import pytest
from support.byte_tokenizer import BOS, EOS
from support.server.fakes import FakeLLM
from support.server.harness import Api, error, events

from headrace.sampling_params import SamplingParams
from headrace.server.settings import ServerSettings


@pytest.mark.parametrize("name", ["messages", "chat_template_kwargs"])
def test_values_of_a_conversation_are_bounded(name: str) -> None:
    api = Api(FakeLLM(), ServerSettings(max_chat_values=8))
    parts = [{"type": "text", "text": "x"}] * 2
    fits = {"messages": [{"role": "user", "content": parts[:1]}], "chat_template_kwargs": {"x": [[], [[], {"y": {}}, 1]]}}
    assert api.chat(**fits).status_code == 200
    more = {"messages": [{"role": "user", "content": parts}], "chat_template_kwargs": {"x": [[], [[], {"y": {}}, 1, 2, 3]]}}
    assert error(api.chat(**fits | {name: more[name]}))["param"] == name


def test_answer(api: Api) -> None:
    answer = api.chat(seed=5).json()
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "fake-model" and answer["system_fingerprint"].startswith("fp_")
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello 0, wörld € 🙂 seed 5", "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"], choice["index"]) == ("stop", None, 0)
    text = "[user]Hi\n[assistant]"
    assert api.llm.seen[0].prompt_token_ids == list(text.encode())
    generated = len("Hello 0, wörld € 🙂 seed 5".encode()) + 1
    assert answer["usage"] == {
        "prompt_tokens": len(text),
        "completion_tokens": generated,
        "total_tokens": len(text) + generated,
        "prompt_tokens_details": {"cached_tokens": 16},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_stream_is_the_answer_in_chunks(api: Api) -> None:
    chunks = events(api.chat(stream=True, seed=5))
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {} and choices[-1]["finish_reason"] == "stop"
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert all(set(choice["delta"]) == {"content"} and choice["delta"]["content"] for choice in choices[1:-1])
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Hello 0, wörld € 🙂 seed 5"
    assert all("usage" not in chunk for chunk in chunks)


def test_stream_usage_comes_last_with_empty_choices(api: Api) -> None:
    chunks = events(api.chat(stream=True, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == api.chat().json()["usage"]


def test_stream_usage_with_every_chunk(api: Api) -> None:
    chunks = events(api.chat(stream=True, max_tokens=3, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [1, 1, 2, 3, 3, 3]


def test_samples_stream_side_by_side(api: Api) -> None:
    chunks = events(api.chat(stream=True, n=3, seed=1))
    texts = {0: "", 1: "", 2: ""}
    roles, finished = [], []
    for chunk in chunks:
        [choice] = chunk["choices"]
        if "role" in choice["delta"]:
            roles.append(choice["index"])
        if choice["finish_reason"]:
            finished.append(choice["index"])
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert sorted(roles) == sorted(finished) == [0, 1, 2]
    assert texts == {i: f"Hello {i}, wörld € 🙂 seed 1" for i in range(3)}
    answer = api.chat(n=3, seed=1).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == list(texts.values())
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]


def test_logprobs_carry_bytes() -> None:
    llm = FakeLLM(script=lambda request, index: [*"é".encode(), 0, EOS])
    answer = Api(llm).chat(logprobs=True, top_logprobs=2).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["\ufffd", "\ufffd", "\x00", "<eos>"]
    assert bytes(byte for entry in content[:2] for byte in entry["bytes"]).decode() == "é"
    assert content[2]["logprob"] == -9999.0, "JSON has no minus infinity"
    for entry in content:
        assert entry["top_logprobs"][0]["token"] == "a"
        assert len(entry["top_logprobs"]) == 2
        assert {"token", "logprob", "bytes"} == set(entry["top_logprobs"][0])


@pytest.mark.parametrize("top", [None, 0, 3])
def test_logprobs_of_stream_and_answer_are_the_same(api: Api, top: int | None) -> None:
    fields: dict[str, Any] = {"logprobs": True, "max_tokens": 24} | ({} if top is None else {"top_logprobs": top})
    whole = api.chat(**fields).json()["choices"][0]["logprobs"]["content"]
    chunks = [chunk["choices"][0]["logprobs"] for chunk in events(api.chat(stream=True, **fields))]
    assert [entry for part in chunks if part for entry in part["content"]] == whole
    assert len(whole) == 24
    assert all(len(entry["top_logprobs"]) == (top or 0) for entry in whole)


def test_token_ids_on_request(api: Api) -> None:
    answer = api.chat(return_token_ids=True, max_tokens=4).json()
    assert answer["choices"][0]["token_ids"] == list(b"Hell")
    assert answer["prompt_token_ids"] == api.llm.seen[0].prompt_token_ids
    chunks = [chunk["choices"][0] for chunk in events(api.chat(stream=True, return_token_ids=True, max_tokens=4))]
    assert [token for chunk in chunks for token in chunk.get("token_ids", [])] == list(b"Hell")
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert "token_ids" not in api.chat().json()["choices"][0]


def test_prompt_logprobs_in_the_answer(api: Api) -> None:
    answer = api.chat(prompt_logprobs=1).json()
    prompt = api.llm.seen[0].prompt_token_ids
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == len(prompt)
    assert answer["prompt_logprobs"][1][str(prompt[1])] == {"logprob": -1.5, "rank": 2, "decoded_token": "u"}
    assert error(api.chat(prompt_logprobs=1, stream=True))["param"] == "prompt_logprobs"


def test_every_sampling_field_arrives(api: Api) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": -3, "frequency_penalty": 0.3, "n": 2,
        "presence_penalty": -0.4, "repetition_penalty": 1.2, "logit_bias": {"5": 1, "6": -2.5}, "min_tokens": 2,
        "allowed_token_ids": list(range(200)), "bad_words": ["no"], "stop": ["xx", "yy"], "stop_token_ids": [9],
        "include_stop_str_in_output": True, "max_tokens": 5, "ignore_eos": True, "skip_special_tokens": False,
        "logprobs": True, "top_logprobs": 4, "logprobs_mode": "processed", "prompt_logprobs": 2,
    }  # fmt: skip
    assert api.chat(**fields).status_code == 200
    given = {name: value for name, value in fields.items() if name != "top_logprobs"}
    expected = SamplingParams(**given | {"logit_bias": {5: 1.0, 6: -2.5}, "logprobs": 4})
    assert api.llm.seen[0].sampling == expected


def test_request_fields_beside_sampling_arrive(api: Api) -> None:
    api.chat(cache_salt="mine", priority=-5)
    assert (api.llm.seen[0].cache_salt, api.llm.seen[0].priority) == ("mine", -5)


def test_the_models_defaults_hold_where_the_request_is_silent(api: Api) -> None:
    api.llm.inputs.default_sampling = SamplingParams(temperature=0.2, top_k=20)
    api.chat()
    api.chat(temperature=0.9, top_k=-1)
    assert [(r.sampling.temperature, r.sampling.top_k) for r in api.llm.seen] == [(0.2, 20), (0.9, -1)]


def test_max_tokens_by_either_name(api: Api) -> None:
    assert api.chat(max_tokens=2).json()["choices"][0]["finish_reason"] == "length"
    assert api.chat(max_completion_tokens=3).json()["usage"]["completion_tokens"] == 3
    assert api.chat(max_completion_tokens=3, max_tokens=3).status_code == 200
    assert error(api.chat(max_completion_tokens=3, max_tokens=4))["param"] == "max_completion_tokens"
    assert error(api.chat(max_tokens=0))["param"] == "max_tokens"
    assert error(api.chat(max_completion_tokens=0))["param"] == "max_completion_tokens"


@pytest.mark.parametrize("stop", ["wör", ["zzz", "wör"]])
def test_stop_strings(api: Api, stop: Any) -> None:
    [choice] = api.chat(stop=stop).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("Hello 0, ", "stop", "wör")
    kept = api.chat(stop=stop, include_stop_str_in_output=True).json()
    assert kept["choices"][0]["message"]["content"] == "Hello 0, wör"
    chunks = events(api.chat(stop=stop, stream=True))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Hello 0, "


def test_special_tokens_in_text_and_prompt(api: Api) -> None:
    answer = api.chat(skip_special_tokens=False, ignore_eos=True, max_tokens=34).json()
    assert answer["choices"][0]["message"]["content"] == "Hello 0, wörld € 🙂 seed 0<eos>.."
    api.chat(add_special_tokens=True)
    assert api.llm.seen[-1].prompt_token_ids[0] == BOS


# Messages


def rendered(api: Api, messages: list[Any], **fields: Any) -> list[dict[str, Any]]:
    response = api.chat(messages=messages, max_tokens=1, **fields)
    assert response.status_code == 200, response.text
    assert api.llm.tokenizer is not None
    return api.llm.tokenizer.rendered[-1]["messages"]


def test_roles(api: Api) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "system", "content": "and kind"},
        {"role": "user", "content": "a", "name": "ann"},
        {"role": "assistant", "content": "b", "refusal": None, "tool_calls": None, "audio": None, "function_call": None},
    ]
    assert rendered(api, messages) == [
        {"role": "system", "content": "be brief"},
        {"role": "system", "content": "and kind"},
        {"role": "user", "content": "a", "name": "ann"},
        {"role": "assistant", "content": "b"},
    ]


def test_text_parts_are_joined_by_newlines(api: Api) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two", "prompt_cache_breakpoint": {"mode": "explicit"}}]
    assert rendered(api, [{"role": "user", "content": parts}]) == [{"role": "user", "content": "one\ntwo"}]


def _called(arguments: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


CALL = _called("{}")


def test_answers_with_calls_and_reasoning_go_back_to_the_template(api: Api) -> None:
    """Arguments travel as JSON text and reach the template as objects; reasoning reaches it by both names."""
    answer = {"role": "assistant", "content": None, "reasoning": "why", "tool_calls": [_called('{"a": [1]}')]}
    old = {"role": "assistant", "function_call": {"name": "f", "arguments": ""}}
    result = {"role": "tool", "content": [{"type": "text", "text": "2"}], "tool_call_id": "c"}
    found = rendered(api, [{"role": "user", "content": "x"}, answer, result, old, result | {"content": "3"}])
    assert found[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": [1]}}
    assert (found[1]["content"], found[1]["reasoning"], found[1]["reasoning_content"]) == ("", "why", "why")
    assert found[2] == {"role": "tool", "content": "2", "tool_call_id": "c"}
    assert found[3]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    result = {"role": "function", "name": "f", "content": "3"}
    call, answered = rendered(api, [{"role": "user", "content": "x"}, old, result])[1:]
    assert answered["role"] == "tool" and answered["tool_call_id"] == call["tool_calls"][0]["id"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "user", "content": 7}, "messages[1].content"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "critic", "content": "x", "name": "f"}, "messages[1].role"),
        ({"role": 5, "content": "x"}, "messages[1].role"),
        ({"role": "user", "content": "x", "colour": 1}, "messages[1].colour"),
        ({"role": "user", "content": "x", "name": 1}, "messages[1].name"),
        ({"role": "user", "content": "x", "tool_call_id": "c"}, "messages[1].tool_call_id"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[1].tool_calls[0].function"),
        ({"role": "assistant", "content": "x", "tool_calls": {"f": 1}}, "messages[1].tool_calls"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[1].function_call.arguments"),
        ({"role": "assistant", "tool_calls": [CALL | {"id": 7}]}, "messages[1].tool_calls[0].id"),
        ({"role": "assistant", "tool_calls": [_called("{")]}, "messages[1].tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [_called("[1]")]}, "messages[1].tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [_called({})]}, "messages[1].tool_calls[0].function.arguments"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[1].tool_calls"),
        ({"role": "user", "content": "x", "reasoning": "y"}, "messages[1].reasoning"),
        ({"role": "assistant", "content": "x", "reasoning_content": 1}, "messages[1].reasoning_content"),
        ({"role": "assistant", "tool_calls": []}, "messages[1].content"),
        ({"role": "assistant", "audio": {"id": "a"}}, "messages[1].audio"),
        ({"role": "assistant", "refusal": "no"}, "messages[1].refusal"),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}, "messages[1].content[0].y"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "file", "file": {}}]}, "messages[1].content[0].type"),
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": "lost"}, "messages[1].tool_call_id"),
        ({"role": "function", "name": "f", "content": "x"}, "messages[1].tool_call_id"),
        ("x", "messages[1]"),
    ],
)
def test_bad_messages_are_named(api: Api, message: Any, param: str) -> None:
    response = api.chat(messages=[{"role": "user", "content": "fine"}, message])
    assert error(response)["param"] == param


def test_template_arguments(api: Api) -> None:
    api.chat(chat_template_kwargs={"prefix": ">"}, max_tokens=1)
    assert bytes(api.llm.seen[-1].prompt_token_ids) == b">[user]Hi\n[assistant]"
    api.chat(add_generation_prompt=False, max_tokens=1)
    assert bytes(api.llm.seen[-1].prompt_token_ids) == b"[user]Hi\n"
    api.chat(continue_final_message=True, max_tokens=1)
    assert bytes(api.llm.seen[-1].prompt_token_ids) == b"[user]Hi"
    both = api.chat(continue_final_message=True, add_generation_prompt=True)
    assert error(both)["param"] == "continue_final_message"
    for name in ("messages", "tools", "add_generation_prompt", "self", "chat_template"):
        assert error(api.chat(chat_template_kwargs={name: 1}))["param"] == f"chat_template_kwargs.{name}"


def test_a_template_of_the_request(api: Api) -> None:
    """Trainers render conversations with the template that they train with."""
    refused = error(api.chat(chat_template="{{ messages }}"), 400)
    assert refused["param"] == "chat_template" and "--trust-request-chat-template" in refused["message"]
    trusting = Api(api.llm, ServerSettings(trust_request_chat_template=True))
    assert trusting.chat(chat_template="own:", max_tokens=1).status_code == 200
    assert bytes(api.llm.seen[-1].prompt_token_ids).startswith(b"own:[user]Hi")
    assert error(trusting.chat(chat_template=""), 400)["param"] == "chat_template"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 10**30}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"5" * 40: 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stop": [1]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"bad_words": "x"}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [1, -1]}, "allowed_token_ids[1]"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"max_tokens": 4096}, "max_tokens"),
        ({"max_completion_tokens": 4096}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logprobs_mode": "cooked"}, "logprobs_mode"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"priority": "high"}, "priority"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_bad_parameters_are_named(api: Api, fields: dict[str, Any], param: str) -> None:
    found = error(api.chat(**fields))
    assert found["param"] == param
    assert found["type"] == "invalid_request_error"
    assert not api.llm.seen


def test_prompts_that_do_not_fit(api: Api) -> None:
    for content in ("x" * 600, "x" * 100_000):
        found = error(api.chat(messages=[{"role": "user", "content": content}]))
        assert (found["param"], found["code"]) == ("messages", "context_length_exceeded")


def test_unknown_model(api: Api) -> None:
    found = error(api.chat(model="gpt-6"), 404)
    assert (found["param"], found["code"]) == ("model", "model_not_found")
    assert api.chat(model="fake-model").status_code == 200


def test_message_limit() -> None:
    api = Api(FakeLLM(), ServerSettings(max_messages=2))
    assert error(api.chat(messages=[{"role": "user", "content": "x"}] * 3))["param"] == "messages"
