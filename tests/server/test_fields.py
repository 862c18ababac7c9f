"""The table of fields: complete against the openai package, and true."""

from __future__ import annotations

import typing

import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from reference import request_fields

from headrace.server import fields
from headrace.server.fields import FIELDS, applied_fields, rules
from headrace.server.schema import ChatBody, CompletionBody, GenerationBody
from server.fakes import FakeLLM
from server.harness import Api

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
BASE = {
    "chat": {"messages": [{"role": "user", "content": "Hi"}], "seed": 7, "max_tokens": 8},
    "completions": {"prompt": "Hi", "seed": 7, "max_tokens": 8},
}
VLLM = {
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "bad_words", "allowed_token_ids"),
    *("ignore_eos", "prompt_logprobs", "cache_salt", "priority", "return_token_ids", "include_stop_str_in_output"),
    *("skip_special_tokens", "add_special_tokens", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "guided_whitespace_pattern", "response_format"),
}

HARMLESS = {
    "user": ["someone", ""],
    "safety_identifier": ["abc"],
    "metadata": [{}, {"run": "7"}],
    "prompt_cache_key": ["key"],
    "store": [False],
    "service_tier": ["auto", "default"],
    "modalities": [["text"]],
    "audio": [],
    "prediction": [],
    "reasoning_effort": ["none"],
    "verbosity": ["medium"],
    "web_search_options": [],
    "moderation": [],
    "prompt_cache_options": [{}, {"mode": "implicit"}],
    "prompt_cache_retention": ["in_memory"],
    "guided_decoding_backend": [],
}
"""Values that pass and change nothing."""
REFUSED = {
    "user": [7, {"name": "x"}],
    "safety_identifier": [1.5],
    "metadata": ["x", {"a": 1}, {"a" * 65: "x"}, {"a": "x" * 513}, {str(i): "x" for i in range(17)}],
    "prompt_cache_key": [[]],
    "store": [True],
    "service_tier": ["flex", "scale", "priority", "fast", ""],
    "guided_decoding_backend": ["outlines", ""],
    "modalities": [["text", "audio"], ["audio"], []],
    "audio": [{"voice": "alloy", "format": "wav"}],
    "prediction": [{"type": "content", "content": "x"}],
    "reasoning_effort": ["minimal", "low", "medium", "high", "xhigh", "max"],
    "verbosity": ["low", "high"],
    "web_search_options": [{}],
    "moderation": [{"model": "omni-moderation-latest"}],
    "prompt_cache_options": [{"mode": "explicit"}, {"ttl": "30m"}],
    "prompt_cache_retention": ["24h"],
}


def openai_fields(params: typing.Any) -> set[str]:
    both = (params.CompletionCreateParamsNonStreaming, params.CompletionCreateParamsStreaming)
    return set().union(*(typing.get_type_hints(kind) for kind in both))


@pytest.mark.parametrize(("endpoint", "params"), [("chat", chat_params), ("completions", text_params)])
def test_covers_every_field_of_openai(endpoint: fields.Endpoint, params: typing.Any) -> None:
    known = {name for name, rule in rules(endpoint).items() if rule.origin == "OpenAI"}
    assert known == openai_fields(params)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_covers_the_fields_of_vllm(endpoint: fields.Endpoint) -> None:
    assert {name for name, rule in rules(endpoint).items() if rule.treatment == "applied"} >= VLLM


@pytest.mark.parametrize(("endpoint", "body"), [("chat", ChatBody), ("completions", CompletionBody)])
def test_applied_fields_are_those_of_the_request_model(endpoint: fields.Endpoint, body: type[GenerationBody]) -> None:
    assert {name for name, rule in rules(endpoint).items() if rule.treatment == "applied"} == set(body.model_fields) | set(
        body.sampling_schema()
    )


def test_one_rule_a_field_and_endpoint() -> None:
    keys = [(rule.name, endpoint) for rule in FIELDS for endpoint in rule.endpoints]
    assert len(keys) == len(set(keys))


def test_the_samples_here_cover_the_table() -> None:
    assert set(HARMLESS) == set(REFUSED) == {rule.name for rule in FIELDS if rule.treatment != "applied"}


def _cases(samples: dict[str, list[typing.Any]]) -> list[tuple[str, str, typing.Any]]:
    pairs = ((rule, endpoint) for rule in FIELDS if rule.treatment != "applied" for endpoint in rule.endpoints)
    return [(endpoint, rule.name, value) for rule, endpoint in pairs for value in samples[rule.name]]


def _answer(endpoint: str, **extra: typing.Any) -> tuple[dict[str, typing.Any], typing.Any]:
    llm = FakeLLM()
    response = Api(llm).post(PATHS[endpoint], BASE[endpoint] | extra)
    assert response.status_code == 200, response.text
    answer = {key: value for key, value in response.json().items() if key not in ("id", "created")}
    return answer, (llm.seen[0].sampling, llm.seen[0].prompt_token_ids, llm.seen[0].cache_salt, llm.seen[0].priority)


@pytest.mark.parametrize(("endpoint", "name", "value"), [*_cases(HARMLESS), *_cases({name: [None] for name in HARMLESS})])
def test_what_is_accepted_changes_nothing(endpoint: str, name: str, value: typing.Any) -> None:
    assert _answer(endpoint, **{name: value}) == _answer(endpoint)


@pytest.mark.parametrize(("endpoint", "name", "value"), _cases(REFUSED))
def test_what_is_refused_is_refused_by_name(endpoint: str, name: str, value: typing.Any) -> None:
    llm = FakeLLM()
    response = Api(llm).post(PATHS[endpoint], BASE[endpoint] | {name: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == name
    assert name in error["message"]
    assert not llm.seen


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_unknown_fields_are_refused_by_name(endpoint: str) -> None:
    response = Api(FakeLLM()).post(PATHS[endpoint], BASE[endpoint] | {"temprature": 1})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "temprature"
    assert response.json()["error"]["code"] == "unknown_parameter"
    assert "did you mean temperature?" in response.json()["error"]["message"]


def test_fields_of_the_other_endpoint_are_unknown() -> None:
    for endpoint, name in [("chat", "echo"), ("completions", "messages"), ("completions", "tools")]:
        response = Api(FakeLLM()).post(PATHS[endpoint], BASE[endpoint] | {name: []})
        assert response.json()["error"]["code"] == "unknown_parameter"


def test_applied_fields_pass_through_as_they_are() -> None:
    body = {"messages": [], "temperature": 0.5, "user": "x"}
    assert applied_fields("chat", body) == {"messages": [], "temperature": 0.5}


def test_the_documentation_names_every_rule() -> None:
    lines = request_fields().splitlines()
    assert len(lines) == len(FIELDS) + 2
    assert all(line.count("|") == 7 for line in lines)
    for rule in FIELDS:
        start = f"| `{rule.name}` | {', '.join(rule.endpoints)} | {rule.origin} | {rule.treatment} |"
        assert sum(line.startswith(start) for line in lines) == 1
