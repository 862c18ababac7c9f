"""Reports of prompts' attention: in the answer, by the id of the answer, and as a metric."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable

import httpx
import msgspec
import pytest
from support.server.fakes import FakeLLM
from support.server.harness import Api, client, error, events

from headrace.core.request import Request
from headrace.outputs import AttentionReport, OutputDelta
from headrace.server import state
from headrace.server.settings import ServerSettings

BASE = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 5},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
}
REPORT = AttentionReport(
    mode="elastic",
    density=0.25,
    computed=10,
    block=128,
    threshold=0.9,
    layers=[0.5, None],
    head_types=[[["full", "xattn"], ["xattn", "xattn"]]],
)


class SparseLLM(FakeLLM):
    """Prompts attend sparsely unless the request says otherwise. The second sample shares the first one's prompt."""

    async def _stream(self, request: Request) -> AsyncGenerator[OutputDelta]:
        async for delta in super()._stream(request):
            if delta.finish_reason is not None and request.sampling.sparse_prefill is not False:
                report = msgspec.structs.replace(REPORT, computed=10 - delta.index, density=0.25 + delta.index / 2)
                delta = msgspec.structs.replace(delta, attention=report)
            yield delta


@pytest.mark.parametrize("path", BASE)
def test_in_the_answer_and_in_the_last_chunk(path: str) -> None:
    api = Api(SparseLLM())
    asked = BASE[path] | {"return_attention_report": True}
    assert api.post(path, asked).json()["attention"] == msgspec.to_builtins(REPORT)
    assert api.post(path, asked | {"n": 2}).json()["attention"]["computed"] == 10
    for more in ({}, {"stream_options": {"include_usage": True}}):
        *others, last = events(api.post(path, asked | {"stream": True} | more))
        assert last["attention"]["layers"] == [0.5, None]
        assert all("attention" not in chunk for chunk in others)
    assert "attention" not in api.post(path, BASE[path]).json()
    dense = api.post(path, asked | {"sparse_prefill": False}).json()["attention"]
    assert (dense["mode"], dense["density"], dense["layers"]) == ("dense", 1.0, [])


def test_of_one_prompt_only() -> None:
    api = Api(SparseLLM())
    assert error(api.complete(prompt=["a", "b"], return_attention_report=True))["param"] == "return_attention_report"
    assert not api.llm.seen


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_the_field_reaches_the_engine(path: str) -> None:
    api = Api(FakeLLM())
    body = BASE.get(path) or {"/v1/responses": {"input": "Hi"}}.get(path) or BASE["/v1/chat/completions"]
    assert api.post(path, body | {"sparse_prefill": False}).status_code == 200
    assert api.llm.seen[0].sampling.sparse_prefill is False
    refused = api.post(path, body | {"sparse_prefill": "no"})
    assert refused.status_code == 400 and "sparse_prefill" in refused.text


def served(work: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    """One server for several requests."""

    async def run() -> None:
        async with client(SparseLLM()) as http:
            await work(http)

    asyncio.run(run())


async def complete(http: httpx.AsyncClient, **fields: object) -> str:
    return (await http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 3, **fields})).json()["id"]


def test_by_the_id_of_the_answer() -> None:
    async def work(http: httpx.AsyncClient) -> None:
        sparse, dense = await complete(http, n=2), await complete(http, sparse_prefill=False)
        found = (await http.get(f"/v1/inspect/{sparse}")).json()
        assert found == {"id": sparse, "object": "attention_report", **msgspec.to_builtins(REPORT)}
        for unknown in (dense, "cmpl-other"):
            assert error(await http.get(f"/v1/inspect/{unknown}"), 404)["param"] == "request_id"

    served(work)


def test_a_dump_has_the_reports_of_the_key_alone() -> None:
    async def run() -> None:
        settings = ServerSettings(api_keys=("one", "two"))
        async with client(SparseLLM(), settings) as http:
            made = {}
            for key in ("one", "two"):
                http.headers["authorization"] = f"Bearer {key}"
                made[key] = [await complete(http) for _ in range(2)]
                lines = (await http.get("/v1/inspect")).text.splitlines()
                assert [json.loads(line)["id"] for line in lines] == made[key]
                assert json.loads(lines[0])["head_types"] == REPORT.head_types
            assert error(await http.get(f"/v1/inspect/{made['one'][0]}"), 404)["param"] == "request_id"

    asyncio.run(run())


def test_each_key_has_a_share_of_the_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another key asks for drops none of them."""
    monkeypatch.setattr(state, "_REPORTS", 4)

    async def run() -> None:
        async with client(SparseLLM(), ServerSettings(api_keys=("one", "two"))) as http:
            http.headers["authorization"] = "Bearer one"
            made = [await complete(http) for _ in range(3)]
            http.headers["authorization"] = "Bearer two"
            for _ in range(5):
                await complete(http)
            http.headers["authorization"] = "Bearer one"
            assert [json.loads(line)["id"] for line in (await http.get("/v1/inspect")).text.splitlines()] == made[1:]

    asyncio.run(run())


def test_densities_are_counted_once_a_prompt() -> None:
    async def work(http: httpx.AsyncClient) -> None:
        await complete(http, n=2)
        await complete(http, sparse_prefill=False)
        text = (await http.get("/metrics")).text
        assert 'headrace_request_attention_density_bucket{le="0.2"} 0.0' in text
        assert 'headrace_request_attention_density_bucket{le="0.3"} 1.0' in text
        assert "headrace_request_attention_density_count 1.0" in text

    served(work)
