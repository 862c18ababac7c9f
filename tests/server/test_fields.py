"""The table of fields: complete against the openai package, and true."""

from __future__ import annotations

import typing

import pytest
from anthropic.types import MessageCountTokensParams
from anthropic.types import message_create_params as message_params
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params
from reference import request_fields
from support.server.fakes import FakeLLM
from support.server.harness import Api

from headrace.constrain.fields import ConstraintFields
from headrace.core.request import Request
from headrace.options import options
from headrace.sampling_params import SamplingParams
from headrace.server import fields
from headrace.server.fields import FIELDS, applied_fields, rules
from headrace.server.schema import BODIES

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "count_tokens": "/v1/messages/count_tokens",
    "responses": "/v1/responses",
    "generate": "/generate",
    "inference": "/inference/v1/generate",
}
BASE = {
    "chat": {"messages": [{"role": "user", "content": "Hi"}], "seed": 7, "max_tokens": 8},
    "completions": {"prompt": "Hi", "seed": 7, "max_tokens": 8},
    "messages": {"messages": [{"role": "user", "content": "Hi"}], "seed": 7, "max_tokens": 8},
    "count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    "responses": {"input": "Hi", "seed": 7, "max_output_tokens": 8},
    "generate": {"text": "Hi", "rid": "r", "sampling_params": {"sampling_seed": 7, "max_new_tokens": 8}},
    "inference": {"token_ids": [72, 105], "request_id": "r", "sampling_params": {"seed": 7, "max_tokens": 8}},
}
VLLM = {
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "bad_words", "allowed_token_ids"),
    *("ignore_eos", "prompt_logprobs", "cache_salt", "priority", "return_token_ids", "include_stop_str_in_output"),
    *("skip_special_tokens", "add_special_tokens", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "guided_whitespace_pattern", "response_format"),
}

NEVER = (
    "container",
    "mcp_servers",
    "responses.context_management",
    "diagnostics",
    "inference_geo",
    "user_profile_id",
    "thread",
    "workspace_id",
    "access_programs",
    "background_options",
    "conversation",
    "image",
    "prompt",
    "guided_decoding_backend",
    "truncate_prompt_tokens",
    "request_id",
    "logits_processors",
    "kv_transfer_params",
    "vllm_xargs",
    "documents",
    "media_io_kwargs",
    "prompt_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "input_embeds",
    "custom_logit_processor",
    "session_params",
    "bootstrap_host",
    "bootstrap_room",
    "data_parallel_rank",
    "routed_dp_rank",
    "features",
)
HARMLESS = {
    "safety_identifier": ["abc"],
    "metadata": [{}, {"run": "7"}],
    "client_metadata": [{}, {"turn": "7"}],
    "prompt_cache_key": ["key"],
    "store": [False],
    "service_tier": ["auto", "default"],
    "modalities": [["text"]],
    "audio": [],
    "prediction": [],
    "verbosity": ["medium"],
    "web_search_options": [],
    "moderation": [],
    "prompt_cache_options": [{}, {"mode": "implicit"}],
    "prompt_cache_retention": ["in_memory"],
    "use_beam_search": [False],
    "length_penalty": [1, 0.5],
    "spaces_between_special_tokens": [True, False],
    "echo": [False],
    "context_management": [{}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}],
    "cache_control": [{"type": "ephemeral"}],
    "messages.metadata": [{"user_id": "me"}, {"user_id": None}],
    "messages.service_tier": ["auto", "standard_only"],
    "speed": ["standard"],
    "background": [False],
    "responses.prompt_cache_options": [],
    "responses.prompt_cache_retention": [],
    "truncation": ["disabled"],
    "log_metrics": [True, False],
    "no_logs": [True],
    "custom_labels": [{"run": "7"}],
    "generate.modalities": [["image"]],
    "priority": [0],
    "token_ids_logprob": [[]],
    "return_hidden_states": [False],
    **{key: [] for key in NEVER},
}
"""Values that pass and change nothing. A name may have its endpoint before it."""
REFUSED = {
    "safety_identifier": [1.5],
    "metadata": ["x", {"a": 1}, {"a" * 65: "x"}, {"a": "x" * 513}, {str(i): "x" for i in range(17)}],
    "client_metadata": ["x", {"turn": 7}],
    "prompt_cache_key": [[]],
    "store": [True],
    "service_tier": ["flex", "scale", "priority", "fast", ""],
    "use_beam_search": [True],
    "length_penalty": ["1"],
    "spaces_between_special_tokens": ["yes"],
    "echo": [True],
    "context_management": [
        {"edits": [{"type": "clear_thinking_20251015"}]},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all", "x": 1}]},
        {"edits": [{"type": "clear_tool_uses_20250919"}]},
        {"other": 1},
        "x",
    ],
    "modalities": [["text", "audio"], ["audio"], []],
    "audio": [{"voice": "alloy", "format": "wav"}],
    "prediction": [{"type": "content", "content": "x"}],
    "verbosity": ["low", "high"],
    "web_search_options": [{}],
    "moderation": [{"model": "omni-moderation-latest"}],
    "prompt_cache_options": [{"mode": "explicit"}, {"ttl": "30m"}],
    "prompt_cache_retention": ["24h"],
    "cache_control": ["x"],
    "messages.metadata": [{"user": "me"}, "me"],
    "messages.service_tier": ["priority"],
    "speed": ["fast"],
    "background": [True],
    "truncation": ["auto"],
    "responses.prompt_cache_options": [{"mode": "implicit"}],
    "responses.prompt_cache_retention": ["in_memory"],
    "log_metrics": ["x"],
    "no_logs": [1],
    "custom_labels": [{"run": 7}],
    "generate.modalities": ["image"],
    "priority": [1],
    "token_ids_logprob": [[1]],
    "return_hidden_states": [True],
    **{key: [{}, "x"] for key in NEVER},
}


def openai_fields(params: typing.Any) -> set[str]:
    start = "Response" if params is response_params else "Completion"
    both = [getattr(params, f"{start}CreateParams{kind}") for kind in ("NonStreaming", "Streaming")]
    return set().union(*(typing.get_type_hints(kind) for kind in both))


@pytest.mark.parametrize(
    ("endpoint", "params"), [("chat", chat_params), ("completions", text_params), ("responses", response_params)]
)
def test_covers_every_field_of_openai(endpoint: fields.Endpoint, params: typing.Any) -> None:
    known = {name for name, rule in rules(endpoint).items() if rule.origin == "OpenAI"}
    assert known == openai_fields(params)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_covers_the_fields_of_vllm(endpoint: fields.Endpoint) -> None:
    assert {name for name, rule in rules(endpoint).items() if rule.treatment == "applied"} >= VLLM


def test_covers_every_field_of_anthropic() -> None:
    both = (message_params.MessageCreateParamsNonStreaming, message_params.MessageCreateParamsStreaming)
    fields_of = {"messages": both, "count_tokens": (MessageCountTokensParams,)}
    for endpoint, params in fields_of.items():
        known = {name for name, rule in rules(endpoint).items() if rule.origin == "Anthropic"}
        assert known >= set().union(*(typing.get_type_hints(kind) for kind in params))


@pytest.mark.parametrize("endpoint", BODIES)
def test_a_body_holds_each_of_its_fields(endpoint: fields.Endpoint) -> None:
    """A field of a body that no endpoint takes, or whose name two declarations have, would be ignored."""
    applied = {name for name, rule in rules(endpoint).items() if rule.treatment == "applied"}
    owners = (BODIES[endpoint], SamplingParams, Request, ConstraintFields)
    declared = [option.name for owner in owners for option in options(owner).values() if endpoint in option.spec.apis]
    assert sorted(declared) == sorted(applied)
    assert applied >= {name for name, option in options(BODIES[endpoint]).items() if option.required}


def test_one_rule_a_field_and_endpoint() -> None:
    keys = [(rule.name, endpoint) for rule in FIELDS for endpoint in rule.endpoints]
    assert len(keys) == len(set(keys))


def test_the_samples_here_cover_the_table() -> None:
    names = {name.rpartition(".")[2] for name in HARMLESS}
    assert set(HARMLESS) == set(REFUSED) and names == {rule.name for rule in FIELDS if rule.treatment != "applied"}


def _cases(samples: dict[str, list[typing.Any]]) -> list[tuple[str, str, typing.Any]]:
    pairs = ((rule, endpoint) for rule in FIELDS if rule.treatment != "applied" for endpoint in rule.endpoints)
    return [
        (endpoint, rule.name, value)
        for rule, endpoint in pairs
        for value in samples.get(f"{rule.endpoints[0]}.{rule.name}", samples[rule.name])
    ]


def _answer(endpoint: str, **extra: typing.Any) -> tuple[dict[str, typing.Any], typing.Any]:
    llm = FakeLLM()
    response = Api(llm).post(PATHS[endpoint], BASE[endpoint] | extra)
    assert response.status_code == 200, response.text
    own = ("id", "created", "created_at", "completed_at", "output")
    answer = {key: value for key, value in response.json().items() if key not in own}
    answer.get("meta_info", {}).pop("e2e_latency", None)
    seen = [(request.sampling, request.prompt_token_ids, request.cache_salt, request.priority) for request in llm.seen]
    return answer, seen


@pytest.mark.parametrize(("endpoint", "name", "value"), [*_cases(HARMLESS), *_cases({name: [None] for name in HARMLESS})])
def test_what_is_accepted_changes_nothing(endpoint: str, name: str, value: typing.Any) -> None:
    assert _answer(endpoint, **{name: value}) == _answer(endpoint)


@pytest.mark.parametrize(("endpoint", "name", "value"), _cases(REFUSED))
def test_what_is_refused_is_refused_by_name(endpoint: str, name: str, value: typing.Any) -> None:
    llm = FakeLLM()
    response = Api(llm).post(PATHS[endpoint], BASE[endpoint] | {name: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error.get("param", name) == name
    assert name in error["message"]
    assert not llm.seen


@pytest.mark.parametrize("endpoint", PATHS)
def test_unknown_fields_are_refused_by_name(endpoint: str) -> None:
    response = Api(FakeLLM()).post(PATHS[endpoint], BASE[endpoint] | {"modle": 1})
    assert response.status_code == 400
    error = response.json()["error"]
    assert "modle" in error["message"] and ("did you mean model?" in error["message"] or endpoint == "generate")
    if "messages" not in PATHS[endpoint]:
        assert (error["param"], error["code"]) == ("modle", "unknown_parameter")


def test_fields_of_the_other_endpoint_are_unknown() -> None:
    for endpoint, name in [("chat", "suffix"), ("completions", "messages"), ("completions", "tools")]:
        response = Api(FakeLLM()).post(PATHS[endpoint], BASE[endpoint] | {name: []})
        assert response.json()["error"]["code"] == "unknown_parameter"


def test_applied_fields_pass_through_as_they_are() -> None:
    body = {"messages": [], "temperature": 0.5, "safety_identifier": "x"}
    assert applied_fields("chat", body) == {"messages": [], "temperature": 0.5}


def test_the_documentation_names_every_rule() -> None:
    lines = request_fields().splitlines()
    assert len(lines) == len(FIELDS) + 2
    assert all(line.count("|") == 7 for line in lines)
    for rule in FIELDS:
        start = f"| `{rule.name}` | {', '.join(rule.endpoints)} | {rule.origin} | {rule.treatment} |"
        assert sum(line.startswith(start) for line in lines) == 1


@pytest.mark.parametrize(
    ("endpoint", "extra", "param"),
    [
        ("responses", {"include": ["message.output_text.logprob"]}, "include[0]"),
        ("responses", {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ("chat", {"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages"),
        ("chat", {"chat_template_kwargs": []}, "chat_template_kwargs"),
        ("chat", {"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        ("completions", {"echo": 1}, "echo"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_accepted(endpoint: str, extra: dict[str, typing.Any], param: str) -> None:
    error = Api(FakeLLM()).post(PATHS[endpoint], BASE[endpoint] | extra)
    assert error.status_code == 400 and error.json()["error"]["param"] == param, error.text
    assert "must be" in error.json()["error"]["message"] or "did you mean include_usage?" in error.json()["error"]["message"]
