"""Several models in one server: which answers, when it is loaded, and when it is unloaded."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from support.server.several import NBYTES, Several

from headrace.errors import ConfigError
from headrace.server.models import hosted
from headrace.server.models.host import ModelHost
from headrace.server.models.plan import Planned

Test = Callable[[httpx.AsyncClient, ModelHost], Awaitable[None]]
ONE = NBYTES * 3 // 2
"""Memory for one model."""


def run(several: Several, test: Test, **options: Any) -> None:
    async def body() -> None:
        host = several.host(**options)
        async with several.client(host) as http:
            await test(http, host)

    asyncio.run(body())


async def chat(http: httpx.AsyncClient, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], **fields}
    return await http.post("/v1/chat/completions", json=body)


def states(host: ModelHost) -> dict[str, str]:
    return {model.name: model.state for model in host.table.models}


def message(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    return error if isinstance(error, str) else error["message"]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def test_each_request_reaches_its_model() -> None:
    several = Several("a", "b")
    several.of_model["b"] = {"model_alias": ("gpt-*=b",), "lora_modules": ()}

    async def test(http: httpx.AsyncClient, host: ModelHost) -> None:
        for asked, answers in (("a", "a"), ("b", "b"), ("gpt-4", "b")):
            response = await chat(http, asked)
            assert response.status_code == 200 and response.json()["model"] == asked
            assert len(several.made[answers][-1].seen) == 1, asked
            several.made[answers][-1].seen.clear()
        generated = await http.post("/api/generate", json={"model": "a:latest", "prompt": "Hi", "stream": False})
        assert generated.status_code == 200
        named = await http.post("/generate?model=b", json={"text": "Hi"})
        assert named.status_code == 200 and len(several.made["b"][-1].seen) == 1
        said = message(await chat(http, "c"), 404)
        assert "'c' is not served here; there is a, b" in said and "model-alias" in said
        unnamed = await http.post("/v1/chat/completions", json={"messages": []})
        assert "this server has a, b" in message(unnamed, 400)
        assert message(await http.post("/api/chat", json={"model": "c"}), 404)
        assert (await http.get("/nothing")).status_code == 404
        assert (await http.put("/v1/chat/completions")).status_code == 405

    run(several, test)


def test_a_stream_is_the_models_own_and_its_work_ends_with_its_client() -> None:
    several = Several("a", "b")
    several.step = 0.001

    async def test(http: httpx.AsyncClient, host: ModelHost) -> None:
        response = await chat(http, "a", stream=True)
        assert response.text.endswith("data: [DONE]\n\n") and response.headers["x-request-id"]
        assert host.table.models[0].num_in_flight == 0
        body = {"model": "a", "messages": [{"role": "user", "content": "Hi"}], "stream": True, "min_tokens": 400}
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await http.post("/v1/chat/completions", json=body)
        await until(lambda: host.table.models[0].num_in_flight == 0)

    run(several, test)


def test_the_body_is_bounded_before_a_model_is_chosen() -> None:
    several = Several("a", "b", max_body_bytes=1000, api_keys=("k",))

    async def test(http: httpx.AsyncClient, host: ModelHost) -> None:
        body = {"model": "a", "prompt": "x" * 2000}
        assert (await http.post("/v1/completions", json=body)).status_code == 401
        http.headers["Authorization"] = "Bearer k"
        assert "max_body_bytes" in message(await http.post("/v1/completions", json=body), 413)
        for content, status in ((b"{", 400), (b"[]", 400), (b'{"model": 5}', 400), (b"\xff", 400), (b"[" * 900, 400)):
            response = await http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
            assert message(response, status)
        plain = await http.post("/v1/completions", content=b'{"model": "a"}', headers={"content-type": "text/plain"})
        assert "Content-Type" in message(plain, 415)
        assert host.bodies.used == 0 and states(host) == {"a": "idle", "b": "idle"}
        assert (await http.post("/v1/completions", json={"model": "a", "prompt": "x"})).status_code == 200
        assert host.bodies.used == 0

    run(several, test)


def test_the_least_recently_used_model_makes_room() -> None:
    several = Several("a", "b", "c", machine=2 * NBYTES)

    async def test(http: httpx.AsyncClient, host: ModelHost) -> None:
        for name, loaded in (("a", "a"), ("b", "ab"), ("a", "ab"), ("c", "ac"), ("a", "ac"), ("b", "ab")):
            assert (await chat(http, name)).status_code == 200
            assert {model for model, state in states(host).items() if state == "loaded"} == set(loaded)
            assert host.table.in_use <= host.table.budget
        assert several.made["c"][-2].closed and not several.made["a"][-1].closed

    run(several, test)


def test_no_model_is_unloaded_while_it_answers_and_each_gets_its_turn() -> None:
    several = Several("a", "b", machine=ONE)
    several.step = 0.002

    async def test(http: httpx.AsyncClient, host: ModelHost) -> None:
        a, b = host.table.models
        first = asyncio.create_task(chat(http, "a", min_tokens=40, max_tokens=60))
        await until(lambda: a.num_in_flight == 1)
        second = asyncio.create_task(chat(http, "b"))
        await until(lambda: a.leaving)
        again = asyncio.create_task(chat(http, "a"))
        assert (await first).status_code == 200 and first.result().json()["usage"]["completion_tokens"] == 60
        assert (await second).status_code == 200
        assert (await again).status_code == 200
        assert states(host) == {"a": "loaded", "b": "idle"} and (a.loads, b.loads) == (2, 1)

    run(several, test)


def test_requests_for_a_model_share_its_load() -> None:
    several = Several("a", "b")
    several.load_seconds = 0.02

    async def test(http: httpx.AsyncClient, host: ModelHost) -> None:
        answers = await asyncio.gather(*(chat(http, "a") for _ in range(5)))
        assert [answer.status_code for answer in answers] == [200] * 5
        assert host.table.models[0].loads == 1

    run(several, test)


def test_waiting_is_bounded_in_time_and_number() -> None:
    several = Several("a", "b", ready_timeout=0.05)
    several.load_seconds = 0.4

    async def test(http: httpx.AsyncClient, host: ModelHost) -> None:
        waiting = [asyncio.create_task(chat(http, "a")) for _ in range(2)]
        await until(lambda: len(host.table.models[0].waiting) == 2)
        assert "models_max_waiting" in message(await chat(http, "b"), 503)
        for each in waiting:
            assert "is being loaded" in message(await each, 503)
            assert each.result().headers["retry-after"] == "1"
        text = (await http.get("/metrics")).text
        assert 'headrace_requests_total{endpoint="/v1/chat/completions",outcome="error"} 3.0' in text
        await until(lambda: states(host)["a"] == "loaded")
        assert (await chat(http, "a")).status_code == 200

    run(several, test, models_max_waiting=2)


def test_a_failed_load_is_told_to_all_that_wait_and_tried_again_after_a_pause(caplog: pytest.LogCaptureFixture) -> None:
    several = Several("a", "b")
    several.load_seconds = 0.02
    several.errors["a"] = ConfigError("there is no such file")

    async def test(http: httpx.AsyncClient, host: ModelHost) -> None:
        a = host.table.models[0]
        for answer in await asyncio.gather(*(chat(http, "a") for _ in range(3))):
            assert message(answer, 503) == "the model a cannot be loaded: there is no such file"
            assert 1 < int(answer.headers["retry-after"]) <= hosted.RETRY_SECONDS
        assert [record.message for record in caplog.records] == ["a does not serve: there is no such file"]
        started = len(several.made["a"])
        assert message(await chat(http, "a"), 503) and len(several.made["a"]) == started
        (card, _) = (await http.get("/v1/models")).json()["data"]
        assert (card["state"], card["failure"]) == ("idle", "there is no such file")
        assert (await chat(http, "b")).status_code == 200
        del several.errors["a"]
        a.retry_at = time.monotonic()
        assert (await chat(http, "a")).status_code == 200
        assert (a.loads, a.failed_loads, a.failure) == (1, 1, "")

    run(several, test)


def test_a_dead_engine_harms_no_other_and_is_replaced() -> None:
    several = Several("a", "b")

    async def test(http: httpx.AsyncClient, host: ModelHost) -> None:
        a = host.table.models[0]
        assert (await chat(http, "a")).status_code == (await chat(http, "b")).status_code == 200
        dead = several.made["a"][-1]
        dead.give_up()
        assert "the engine died 3 times" in message(await chat(http, "a"), 503)
        assert (await chat(http, "b")).status_code == 200 and (await http.get("/health")).status_code == 200
        a.retry_at = time.monotonic()
        assert (await chat(http, "a")).status_code == 200 and dead.closed and a.loads == 2

    run(several, test)


def test_an_idle_model_is_unloaded_and_keep_alive_says_when() -> None:
    several = Several("a", "b")

    async def generate(http: httpx.AsyncClient, name: str, **fields: Any) -> dict[str, Any]:
        response = await http.post("/api/generate", json={"model": name, "stream": False, **fields})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def test(http: httpx.AsyncClient, host: ModelHost) -> None:
        a, b = host.table.models
        await chat(http, "a")
        await until(lambda: states(host)["a"] == "idle")
        loaded = await generate(http, "a", keep_alive=-1)
        assert loaded["done_reason"] == "load" and a.expires_at == math.inf
        await generate(http, "b", prompt="Hi", keep_alive="1h30m")
        assert 5390 < b.expires_at - time.monotonic() <= 5400
        first, second = (await http.get("/api/ps")).json()["models"]
        assert first["expires_at"].startswith("9999") and not second["expires_at"].startswith("9999")
        assert (await generate(http, "b", keep_alive=0))["done_reason"] == "unload"
        await until(lambda: states(host)["b"] == "idle")
        assert (await generate(http, "b", keep_alive="0s"))["done_reason"] == "unload" and b.loads == 1
        assert [one["name"] for one in (await http.get("/api/ps")).json()["models"]] == ["a"]
        wrong = await http.post("/api/generate", json={"model": "a", "keep_alive": "soon"})
        assert "keep_alive must be a duration" in message(wrong, 400)

    run(several, test, model_idle_timeout=0.01)


def test_what_clients_stored_outlasts_the_engine() -> None:
    several = Several("a", "b", machine=ONE)

    async def test(http: httpx.AsyncClient, host: ModelHost) -> None:
        stored = (await http.post("/v1/responses", json={"model": "a", "input": "Hi"})).json()["id"]
        await chat(http, "b")
        assert states(host) == {"a": "idle", "b": "loaded"}
        assert (await http.get(f"/v1/responses/{stored}?model=a")).json()["id"] == stored
        more = {"model": "a", "input": "And?", "previous_response_id": stored}
        assert (await http.post("/v1/responses", json=more)).status_code == 200

    run(several, test)


def test_routes_about_the_server_know_all_models() -> None:
    several = Several("a", "b", metrics_compat="vllm")
    several.of_model["b"] = {"max_prompts": 1}

    async def test(http: httpx.AsyncClient, host: ModelHost) -> None:
        await chat(http, "b")
        cards = (await http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["state"], card["max_model_len"]) for card in cards] == [
            ("a", "idle", 512),
            ("b", "loaded", 512),
        ]
        assert (await http.get("/v1/models/a")).json() == cards[0]
        assert [one["name"] for one in (await http.get("/api/tags")).json()["models"]] == ["a", "b"]
        described = (await http.post("/api/show", json={"name": "a"})).json()  # Without a load.
        assert described["model_info"]["fake.context_length"] == 512 and described["capabilities"] == ["completion"]
        assert (await http.get("/health")).json() == {"status": "ok", "models": {"loaded": 1, "total": 2}}
        assert (await http.get("/live")).status_code == (await http.get("/version")).status_code == 200
        page = await http.get("/", headers={"accept": "text/html"})
        assert page.text.startswith("<!doctype html>")
        assert "/v1/chat/completions" in (await http.get("/openapi.json")).json()["paths"]
        text = (await http.get("/metrics")).text
        assert 'headrace_model_loaded{model_name="b"} 1.0' in text and 'headrace_model_loaded{model_name="a"} 0.0' in text
        assert 'headrace_requests_total{endpoint="/v1/chat/completions",model_name="b",outcome="completed"} 1.0' in text
        assert 'headrace_http_requests_total{method="GET",route="/health",status="200"} 1.0' in text
        assert 'vllm:num_requests_running{engine="0",model_name="b"} 0.0' in text
        helps = [line for line in text.splitlines() if line.startswith("# HELP")]
        assert len(helps) == len(set(helps)) and text.count("# HELP headrace_build_info ") == 1
        too_many = await http.post("/v1/completions", json={"model": "b", "prompt": ["x", "y"]})
        assert "max_prompts" in message(too_many, 400)

    run(several, test)


def test_the_server_ends_with_a_model_that_cannot_be_served() -> None:
    async def failure(several: Several, **options: Any) -> Exception | None:
        host = several.host(**options)
        async with several.client(host) as http:
            await host.start()
            assert (await http.get("/health")).status_code == 503
        return host.failure

    too_large = asyncio.run(failure(Several("a", "b"), models_memory=NBYTES - 1))
    assert "a takes 100 B (weights 100 B, KV cache 0 B), and there are 99 B" in str(too_large)
    refused = Several("a", "b")

    async def plan(args: Any) -> list[Planned]:
        return [Planned(None, "kv_cache_memory must be set", "kv_cache_memory", 0) for _ in args]

    refused.plan = plan
    assert str(asyncio.run(failure(refused))) == "a: kv_cache_memory must be set"
    twice = Several("a", "b")
    twice.of_model["b"] = {"lora_modules": ("a=/x",)}
    with pytest.raises(ConfigError, match="b and a both have the name a"):
        twice.host()


def test_a_shutdown_ends_every_engine() -> None:
    several = Several("a", "b")
    several.step = 0.001

    async def test(http: httpx.AsyncClient, host: ModelHost) -> None:
        await chat(http, "b")
        running = asyncio.create_task(chat(http, "a", min_tokens=400))
        await until(lambda: host.table.models[0].num_in_flight == 1)
        host.stop()
        assert "shutting down" in message(await running, 503)
        assert "shutting down" in message(await chat(http, "b"), 503)

    run(several, test)
    assert all(made[-1].closed for made in several.made.values())
