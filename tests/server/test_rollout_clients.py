"""Requests of trainers as they send them, and what they read of the answers."""

from __future__ import annotations

import base64
import dataclasses
from typing import Any

import numpy as np
import pytest
from support.byte_tokenizer import BOS, EOS, VOCAB
from support.server.fakes import LIMITS, FakeLLM
from support.server.harness import Api, error, events

from headrace.config import EngineArgs

PROMPT = [BOS, *b"Hi"]


class Recording(FakeLLM):
    """An engine that records routed experts."""

    args = EngineArgs(enable_return_routed_experts=True)
    limits = dataclasses.replace(LIMITS, enable_return_routed_experts=True, max_logprobs=-1)


@pytest.fixture
def api() -> Api:
    return Api(Recording())


def posted(api: Api, path: str, body: dict[str, Any], **options: Any) -> Any:
    answer = api.post(path, body, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


def int32(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype="<i4")


# slime. ``max_new_tokens`` shrinks by what a partial rollout has already.

SLIME = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 64,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}


def slime(api: Api, *, sampling: dict[str, Any] | None = None, **fields: Any) -> tuple[list[int], list[float], dict[str, Any]]:
    """Tokens and logprobs as slime takes them, and ``meta_info``."""
    body = {"sampling_params": SLIME | (sampling or {}), "return_logprob": True, "input_ids": PROMPT, **fields}
    answer = posted(api, "/generate", body, headers={"X-SMG-Routing-Key": "session-1"})
    meta = answer["meta_info"]
    pairs = meta["output_token_logprobs"]
    assert isinstance(answer["text"], str)
    return [item[1] for item in pairs], [item[0] for item in pairs], meta


def test_slimes_rollout(api: Api) -> None:
    tokens, logprobs, meta = slime(api)
    assert tokens[-1] == EOS and len(tokens) == len(logprobs) == meta["completion_tokens"]
    assert (meta["finish_reason"]["type"], meta["prompt_tokens"], meta["cached_tokens"]) == ("stop", 3, 0)
    assert isinstance(meta["weight_version"], str)
    assert api.llm.seen[0].session == "session-1"


def test_slimes_rollout_with_a_nucleus(api: Api) -> None:
    """``custom_params`` comes with ``top_p`` below 1: the ids that each token was sampled from, one behind the other."""
    sampling = {"top_p": 0.9, "custom_params": {"return_top_p_token_ids": True}, "sampling_seed": 1234}
    tokens, _, meta = slime(api, sampling=sampling)
    ids, offsets = int32(meta["top_p_token_ids"]), int32(meta["top_p_token_offsets"])
    assert len(offsets) == len(tokens) + 1 and offsets[0] == 0 and offsets[-1] == len(ids)
    for token, start, end in zip(tokens, offsets[:-1], offsets[1:], strict=True):
        assert token in ids[start:end]
    assert offsets[1] == 2 and offsets[2] - offsets[1] == VOCAB
    assert api.llm.seen[0].sampling.seed == 1234


@pytest.mark.parametrize("start", [None, 0, 2])
def test_slimes_routing_replay(api: Api, start: int | None) -> None:
    """Rows of experts are the tokens but the last, less those before the start: else slime raises."""
    fields = {} if start is None else {"routed_experts_start_len": start}
    tokens, _, meta = slime(api, return_routed_experts=True, **fields)
    layers, top_k = 2, 2
    experts = int32(meta["routed_experts"]).reshape(-1, layers, top_k)
    assert len(experts) == len(PROMPT) + len(tokens) - 1 - meta["routed_experts_start_len"]
    assert meta["routed_experts_start_len"] == (start or 0)


def test_slimes_stream(api: Api) -> None:
    """Each event has all tokens so far, and says how many they are."""
    body = {
        "sampling_params": SLIME,
        "return_logprob": True,
        "input_ids": PROMPT,
        "stream": True,
        "return_routed_experts": True,
    }
    previous = 0
    for event in events(api.post("/generate", body)):
        meta = event["meta_info"]
        assert previous <= len(meta["output_token_logprobs"]) == meta["output_token_logprobs_length"]
        previous = meta["output_token_logprobs_length"]
    assert meta["finish_reason"]["type"] == "stop"
    assert len(int32(meta["routed_experts"])) == (len(PROMPT) + previous - 1) * 4


def test_slimes_teacher(api: Api) -> None:
    """A teacher scores a sequence and generates nothing."""
    sampling = {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    meta = posted(api, "/generate", body | {"return_routed_experts": True})["meta_info"]
    assert len(int32(meta["routed_experts"])) == (len(PROMPT) - 1) * 4
    scores = [item[0] for item in meta["input_token_logprobs"]]
    assert scores[0] is None and scores[1:] == [-1.5, -1.5]


def test_an_engine_that_records_nothing() -> None:
    body = {"input_ids": PROMPT, "sampling_params": SLIME, "return_routed_experts": True}
    assert error(Api(FakeLLM()).post("/generate", body), 400)["param"] == "return_routed_experts"
    body = {"token_ids": PROMPT, "return_routed_experts": True}
    assert error(Api(FakeLLM()).post("/inference/v1/generate", body), 400)["param"] == "return_routed_experts"
    beyond = {"input_ids": PROMPT, "return_routed_experts": True, "routed_experts_start_len": 4}
    assert error(Api(Recording()).post("/generate", beyond), 400)["param"] == "routed_experts_start_len"


# prime-rl, which salts the cache with the version of the weights.


def test_prime_rls_rollout(api: Api) -> None:
    sampling = {"temperature": 1.0, "logprobs": 1, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "seed": None, "n": 1}
    body = {"model": "fake-model", "token_ids": PROMPT, "sampling_params": sampling, "cache_salt": "7", "priority": 0}
    headers = {"X-data-parallel-rank": "0"}
    answer = posted(api, "/inference/v1/generate", body | {"routed_experts_format": "raw"}, headers=headers)
    [choice] = answer["choices"]
    tokens = choice["token_ids"]
    assert len(choice["logprobs"]["content"]) == len(tokens)
    assert answer["usage"]["prompt_tokens"] == 3 and answer["usage"]["completion_tokens"] == len(tokens)
    experts = choice["routed_experts"]
    array = np.frombuffer(base64.b64decode(experts["data"]), experts["dtype"]).reshape(experts["shape"])
    assert array.shape == (len(PROMPT) + len(tokens) - 1, 2, 2) and experts["start"] == 0
    assert api.llm.seen[0].cache_salt == "7"
    without = posted(api, "/inference/v1/generate", body | {"return_routed_experts": False})
    assert "routed_experts" not in without["choices"][0]


# TRL: one policy by completions, the conversations by chat, sequences of a teacher's scores.


def test_trls_asynchronous_rollout(api: Api) -> None:
    body = {"model": "fake-model", "prompt": PROMPT, "max_tokens": 16, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    body |= {"repetition_penalty": 1.0, "n": 1, "min_p": 0.1, "return_token_ids": True, "logprobs": 0, "seed": 2**63 - 1}
    [choice] = posted(api, "/v1/completions", body)["choices"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 16
    sampling = api.llm.seen[0].sampling
    assert (sampling.seed, sampling.min_p, sampling.top_k) == (2**63 - 1, 0.1, 0)


def ids_of(tokens: list[str]) -> list[int]:
    return [int(token.removeprefix("token_id:")) for token in tokens]


def test_trls_generation_on_a_server(api: Api) -> None:
    """Answers are prompt-major, and every choice has its prompt's tokens."""
    sampling = {"n": 2, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 4}
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    prompts = [PROMPT, [BOS, *b"Ho"]]
    body = {"model": "fake-model", "prompt": prompts, "logprobs": 0, **ids, **sampling}
    choices = posted(api, "/v1/completions", body)["choices"]
    assert [choice["prompt_token_ids"] for choice in choices[::2]] == prompts
    for choice in choices:
        scores = choice["logprobs"]
        assert ids_of(scores["tokens"]) == choice["token_ids"]
        assert len(scores["token_logprobs"]) == len(scores["top_logprobs"]) == 4
        assert all(token in top for token, top in zip(scores["tokens"], scores["top_logprobs"], strict=True))
    messages = [{"role": "user", "content": "Hi"}]
    chat = {"model": "fake-model", "messages": messages, "logprobs": True, "top_logprobs": 0, **ids, **sampling}
    answer = posted(api, "/v1/chat/completions", chat)
    assert answer["prompt_token_ids"] == api.llm.seen[-1].prompt_token_ids
    for choice in answer["choices"]:
        content = choice["logprobs"]["content"]
        assert ids_of([entry["token"] for entry in content]) == choice["token_ids"]
        assert [entry["top_logprobs"] for entry in content] == [[]] * 4


def test_trls_generation_from_tokens(api: Api) -> None:
    sampling = {"n": 2, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 4, "logprobs": 0}
    body = {"request_id": "trl-0", "model": "fake-model", "token_ids": PROMPT, "features": None}
    answer = posted(api, "/inference/v1/generate", body | {"sampling_params": sampling | {"output_kind": 2}})
    assert len(answer["choices"]) == 2
    for choice in answer["choices"]:
        assert ids_of([entry["token"] for entry in choice["logprobs"]["content"]]) == choice["token_ids"]


def test_trls_teacher(api: Api) -> None:
    """The scores of every token, and of the hundred most likely ones beside it."""
    sequences = [PROMPT, [BOS, *b"Hello"]]
    body = {"model": "fake-model", "prompt": sequences, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 100}
    choices = posted(api, "/v1/completions", body)["choices"]
    for choice, sequence in zip(choices, sequences, strict=True):
        assert len(choice["prompt_logprobs"]) == len(sequence)
        for token, scores in zip(sequence[1:], choice["prompt_logprobs"][1:], strict=True):
            assert {"logprob", "rank"} <= scores[str(token)].keys()
            assert len(scores) >= 100
