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
from headrace.server.routes import explain
from headrace.server.settings import ServerSettings

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


@pytest.mark.parametrize(
    ("query", "param"),
    [("layer=1", "layer"), ("head=4", "head"), ("layer=-1", "layer"), ("head=x", "head"), ("layer=\u0663", "layer")],
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
