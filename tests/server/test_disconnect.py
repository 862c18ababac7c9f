"""A client that goes frees what it asked for, at whatever moment it goes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import threading
from collections.abc import Iterator

import httpx
import pytest
from support.server.fakes import FakeLLM
from support.server.harness import Running, error, running, wait_for
from support.server.raw import RawClient, post

STEP = 0.02
LONG = [97] * 400
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400}


@pytest.fixture
def slow() -> Iterator[Running]:
    with running(FakeLLM(step=STEP, script=lambda request, index: LONG)) as server:
        yield server


def outcomes(server: Running) -> dict[str, float]:
    metric = server.app.state.serving.metrics.outcomes.collect()[0]
    return {sample.labels["outcome"]: sample.value for sample in metric.samples if sample.name.endswith("_total")}


@pytest.mark.parametrize("n", [1, 3])
def test_leaving_a_stream(slow: Running, n: int) -> None:
    with httpx.stream("POST", f"{slow.url}/v1/chat/completions", json=CHAT | {"stream": True, "n": n}) as response:
        lines = response.iter_lines()
        for _ in range(8):
            next(lines)
        assert len(slow.llm.running) == 1
    wait_for(lambda: not slow.llm.running, 2)
    assert len(slow.llm.aborted) == 1
    wait_for(lambda: outcomes(slow).get("disconnected") == 1)


def test_leaving_while_the_answer_is_made(slow: Running) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{slow.url}/v1/completions", json={"prompt": ["a", "b", "c"], "max_tokens": 400}, timeout=0.3)
    wait_for(lambda: not slow.llm.running, 2)
    assert len(slow.llm.aborted) == 3
    wait_for(lambda: outcomes(slow).get("disconnected") == 1)


def test_leaving_before_the_first_token() -> None:
    with running(FakeLLM(step=5)) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/chat/completions", json=CHAT | {"stream": True}, timeout=0.3)
        wait_for(lambda: not server.llm.running, 2)
        assert len(server.llm.aborted) == 1


def test_leaving_before_the_body_is_whole(slow: Running) -> None:
    with RawClient(slow.url) as client:
        client.send(post(b"{", length=100))
        wait_for(lambda: slow.app.state.serving.num_in_flight == 1)
    wait_for(lambda: slow.app.state.serving.num_in_flight == 0)
    assert not slow.llm.seen


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/v1/chat/completions", CHAT | {"structured_outputs": {"regex": "a"}}),
        ("/v1/messages", CHAT),
        ("/v1/messages/count_tokens", {"messages": CHAT["messages"]}),
        ("/tokenize", {"messages": CHAT["messages"]}),
        ("/tokenize", {"prompt": "Hi"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_leaving_while_the_request_waits_for_a_thread(slow: Running, path: str, body: dict[str, object]) -> None:
    """What it waits for is not done: a client could queue any amount of work, and leave."""
    gate, all_busy, inputs = threading.Event(), threading.Barrier(3), slow.llm.inputs
    serving = slow.app.state.serving

    def occupy() -> bool:
        all_busy.wait(60)
        return gate.wait()

    with concurrent.futures.ThreadPoolExecutor(2) as others:
        busy = [others.submit(asyncio.run, inputs.in_thread("", occupy)) for _ in range(2)]
        try:
            all_busy.wait(60)
            # The bodies of agents are read in threads already.
            for agent in ("httpx", "claude-cli/2.0"):
                with RawClient(slow.url) as client:
                    client.send(post(json.dumps(body).encode(), f"user-agent: {agent}", path=path))
                    wait_for(lambda: inputs._threads._work)
                wait_for(lambda: serving.num_in_flight == 0)
            assert not inputs._threads._work
        finally:
            gate.set()
        assert [job.result() for job in busy] == [True, True]
    assert not slow.llm.seen


def test_a_third_of_many_streams_leaves() -> None:
    llm = FakeLLM(step=0.005, script=lambda request, index: [97] * 30)

    async def one(http: httpx.AsyncClient, leaves: bool) -> int:
        body = {"prompt": "Hi", "stream": True, "max_tokens": 30}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            count = 0
            async for line in response.aiter_lines():
                count += line.startswith("data: {")
                if leaves and count == 5:
                    break
            return count

    async def many(url: str) -> list[int]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=30) as http:
            return await asyncio.gather(*(one(http, i % 3 == 0) for i in range(64)))

    with running(llm) as server:
        counts = asyncio.run(many(server.url))
        assert [count for i, count in enumerate(counts) if i % 3] == [30] * 42
        wait_for(lambda: not llm.running)
        assert len(llm.aborted) == 22
        wait_for(lambda: outcomes(server) == {"completed": 42, "disconnected": 22})


def test_stopping_ends_everything_with_an_error(slow: Running) -> None:
    async def calls() -> tuple[httpx.Response, httpx.Response]:
        async with httpx.AsyncClient(base_url=slow.url, timeout=10) as http:
            plain = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT))
            stream = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT | {"stream": True}))
            await asyncio.to_thread(wait_for, lambda: len(slow.llm.running) == 2)
            await asyncio.sleep(5 * STEP)
            slow.stop()
            return await plain, await stream

    plain, stream = asyncio.run(calls())
    assert error(plain, 503)["message"] == "the server is shutting down"
    assert "the server is shutting down" in stream.text.strip().split("\n")[-1]
    assert not slow.llm.running
    error(httpx.post(f"{slow.url}/v1/chat/completions", json=CHAT), 503)
