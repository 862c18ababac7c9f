"""Explanations of answers, and attention weights of conversations."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from support.server.fakes import FakeLLM
from support.server.harness import Api, client, error

from headrace.config import EngineArgs
from headrace.core.request import Request
from headrace.outputs import OutputDelta, RequestTimes
from headrace.sampling_params import SamplingParams
from headrace.server.routes import explain
from headrace.server.settings import ServerSettings
from headrace.server.shape.explanation import AnswerExplanation

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
URL = "/v1/chat/completions/attention"


def served(work: Callable[[httpx.AsyncClient], Awaitable[None]], settings: ServerSettings | None = None) -> None:
    async def run() -> None:
        async with client(FakeLLM(), settings) as http:
            await work(http)

    asyncio.run(run())


async def complete(http: httpx.AsyncClient, **fields: object) -> Any:
    return (await http.post("/v1/chat/completions", json={**CHAT, **fields})).json()["id"]


def test_an_answer_is_explained_by_its_id() -> None:
    async def work(http: httpx.AsyncClient) -> None:
        cut, whole = await complete(http), await complete(http, max_tokens=None, n=2)
        found = (await http.get(f"/v1/explain/{cut}")).json()
        assert (found["id"], found["object"], found["attention"], found["cache"]) == (cut, "explanation", None, None)
        assert found["cached_tokens"] % 16 == 0 and 0 <= found["cached_tokens"] < found["prompt_tokens"]
        assert all(found[name] >= 0 for name in ("queue_ms", "prompt_ms", "generation_ms"))
        assert found["reasons"][-1] == "The answer was cut off after 3 tokens, which is max_tokens."
        both = (await http.get(f"/v1/explain/{whole}")).json()
        assert [sample["finish_reason"] for sample in both["samples"]] == ["stop", "stop"]
        assert both["reasons"][-1] == "Answer 2 ended with the model's end token."
        listed = (await http.get("/v1/explain", params={"last": 1})).json()["data"]
        assert [entry["id"] for entry in listed] == [whole]
        assert error(await http.get("/v1/explain/chatcmpl-other"), 404)["param"] == "request_id"
        assert error(await http.get("/v1/explain", params={"last": "-1"}))["param"] == "last"

    served(work)


@pytest.mark.parametrize(
    ("cause", "option"),
    [
        ("slots", "--max-num-seqs"),
        ("blocks", "--kv-cache-memory"),
        ("tokens", "--max-num-batched-tokens"),
        ("preparation", "--max-loras"),
    ],
)
def test_a_wait_and_preemptions_have_their_causes(cause: str, option: str) -> None:
    found = explained(RequestTimes(1.0, 1.5, 2.0, 3.0, cause, 2))
    assert (found["waited_for"], found["preemptions"], found["queue_ms"]) == (cause, 2, 500.0)
    assert found["reasons"][0].startswith("It waited 500 ms for its first step: ") and option in found["reasons"][0]
    assert (
        "It was preempted 2 times: earlier requests needed its KV blocks, and its tokens were computed again."
        in found["reasons"]
    )


@pytest.mark.parametrize(
    ("length", "sampling", "caching", "why"),
    [
        (40, {}, False, "the prefix cache is off"),
        (40, {"prompt_logprobs": 0}, True, "every one of them"),
        (16, {}, True, "whole blocks of 16 tokens"),
        (40, {}, True, "no prompt with the same first 16 tokens"),
    ],
)
def test_why_the_prefix_cache_had_nothing(length: int, sampling: dict[str, Any], caching: bool, why: str) -> None:
    found = explained(RequestTimes(1.0, 1.0), length=length, caching=caching, **sampling)
    assert (found["waited_for"], found["preemptions"]) == (None, 0)
    (reason,) = [reason for reason in found["reasons"] if reason.startswith(f"All {length} prompt tokens were computed: ")]
    assert why in reason


def explained(times: RequestTimes, length: int = 40, *, caching: bool = True, **sampling: Any) -> dict[str, Any]:
    request = Request(request_id="a", prompt_token_ids=[1] * length, sampling=SamplingParams(**sampling), max_tokens=4, seed=0)
    explanation = AnswerExplanation(request, msgspec.structs.replace(FakeLLM().info, block_size=16), caching=caching)
    explanation.end(OutputDelta(request_id="a", finish_reason="stop", times=times), 0)
    return explanation.json()


def test_a_key_sees_its_own_answers_alone() -> None:
    async def work(http: httpx.AsyncClient) -> None:
        http.headers["authorization"] = "Bearer one"
        mine = await complete(http)
        http.headers["authorization"] = "Bearer two"
        assert error(await http.get(f"/v1/explain/{mine}"), 404)
        assert (await http.get("/v1/explain")).json()["data"] == []
        del http.headers["authorization"]
        for answer in (await http.get("/v1/explain"), await http.post(URL, json=CHAT)):
            assert answer.status_code == 401

    served(work, ServerSettings(api_keys=("one", "two")))


def test_a_conversation_has_attention_weights() -> None:
    api = Api(FakeLLM())
    api.llm.pool = lambda request: np.eye(len(request.prompt_token_ids), dtype=np.float32).ravel().tolist()
    found = api.post(f"{URL}?layer=0&head=3", CHAT).json()
    (request,) = api.llm.seen
    assert (request.pooling.method, request.pooling.layer, request.pooling.query_head) == ("attention", 0, 3)
    assert request.sampling.sparse_prefill is False
    size = len(request.prompt_token_ids)
    assert len(found["tokens"]) == size and (found["num_layers"], found["num_heads"]) == (1, 4)
    weights = np.frombuffer(base64.b64decode(found["weights"]), dtype="<f4").reshape(size, size)
    assert np.array_equal(weights, np.eye(size))


def test_attention_between_messages() -> None:
    """Each token attends alike to itself and those before it; the rows of messages are means, and sum up to 1."""
    api = Api(FakeLLM())

    def evenly(request: Request) -> list[float]:
        size = len(request.prompt_token_ids)
        return (np.tri(size) / np.arange(1, size + 1)[:, None]).astype(np.float32).ravel().tolist()

    api.llm.pool = evenly
    messages = [{"role": "system", "content": "Be"}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    found = api.post(f"{URL}?layer=0&by=message", {"messages": messages, "add_generation_prompt": False}).json()
    (request,) = [request for request in api.llm.seen if request.pooling is not None]
    segments, size = found["segments"], len(request.prompt_token_ids)
    assert [(segment["message"], segment["role"]) for segment in segments] == [(0, "system"), (1, "user"), (2, "assistant")]
    assert [segment["start"] for segment in segments] == [0, *(segment["end"] for segment in segments[:-1])]
    assert segments[-1]["end"] == size and "tokens" not in found
    weights = np.tri(size) / np.arange(1, size + 1)[:, None]
    for row, query in zip(found["weights"], segments, strict=True):
        rows = weights[query["start"] : query["end"]]
        wanted = [rows[:, key["start"] : key["end"]].sum(1).mean() for key in segments]
        assert row == pytest.approx(wanted, abs=1e-6) and sum(row) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("by=tool", "by"),
        ("layer=1", "layer"),
        ("head=4", "head"),
        ("layer=-1", "layer"),
        ("head=x", "head"),
        ("layer=\u0663", "layer"),
    ],
)
def test_there_must_be_such_a_layer_and_head(query: str, param: str) -> None:
    assert error(Api(FakeLLM()).post(f"{URL}?{query}", CHAT))["param"] == param


def test_weights_that_are_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api(FakeLLM())
    monkeypatch.setattr(explain, "MAX_ATTENTION_TOKENS", 3)
    assert error(api.post(URL, CHAT))["param"] == "messages"
    layer = msgspec.structs.replace(api.llm.info.layers[0], mla=True)
    api.llm.info = msgspec.structs.replace(api.llm.info, layers=[layer])
    assert "compressed KV" in error(api.post(URL, CHAT))["message"]
    api.llm.args = EngineArgs(tensor_parallel_size=2)
    assert "tensor parallelism" in error(api.post(URL, CHAT))["message"]
    assert api.llm.seen == []
