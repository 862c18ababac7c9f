"""``headrace serve`` with no model, used through the openai client, under load, and through the death of its engine."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import httpx
import openai
import psutil
import pytest
from support.server.running import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_CLIENTS = 64


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def wait_until_idle(server: Server, timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if server.metric("headrace_requests_running") == 0 and server.metric("headrace_kv_blocks_used") == 0:
            return
        time.sleep(0.1)
    raise TimeoutError("the engine did not become idle")


def test_answers_in_english(server: Server) -> None:
    client = client_of(server)
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model, temperature=0, max_tokens=40, messages=[{"role": "user", "content": "What is the capital of France?"}]
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None and answer.usage.completion_tokens > 3


def test_stream_equals_the_whole(server: Server) -> None:
    client = client_of(server)
    model = client.models.list().data[0].id
    ask = {"model": model, "temperature": 0, "max_tokens": 48, "messages": [{"role": "user", "content": "Name three rivers."}]}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_stored_answer_is_found_in_the_prefix_cache_however_it_is_spelled(server: Server) -> None:
    """Letter by letter, in place of the tokenizer's own tokens."""
    with httpx.Client(base_url=server.url, timeout=120) as http:
        letters = [http.post("/tokenize", json={"prompt": letter}).json()["tokens"][0] for letter in "aeinrst"]
        end = http.post("/tokenize", json={"prompt": "<|im_end|>"}).json()["tokens"][0]
        odd = {
            "allowed_token_ids": [*letters, end],
            "logit_bias": {str(end): 100},
            "min_tokens": 70,
            "temperature": 1,
            "seed": 1,
        }
        first = http.post("/v1/responses", json={"input": "Spell.", "max_output_tokens": 99, **odd}).json()
        text = first["output"][0]["content"][0]["text"]
        assert first["status"] == "completed" and len(http.post("/tokenize", json={"prompt": text}).json()["tokens"]) < 70
        body = {"input": "Again.", "previous_response_id": first["id"], "max_output_tokens": 1}
        usage = http.post("/v1/responses", json=body).json()["usage"]
    known = first["usage"]["input_tokens"] + first["usage"]["output_tokens"] - 1
    assert usage["input_tokens_details"]["cached_tokens"] == known // 16 * 16


def test_samples_as_the_model_card_says(server: Server) -> None:
    [card] = httpx.get(f"{server.url}/v1/models", timeout=30).json()["data"]
    assert card["default_sampling_params"] == {"temperature": 0.2, "top_p": 0.9}
    assert "temperature 0.2, top_p 0.9" in server.log.read_text()


async def stream_one(client: openai.AsyncOpenAI, model: str, number: int, leave_after: int | None) -> int:
    """Streams one completion; leaves after so many chunks if told to. Returns how many tokens it was told it got."""
    stream = await client.completions.create(
        model=model,
        prompt=f"Story number {number}: once upon a time",
        max_tokens=40,
        temperature=0.8,
        seed=number,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    seen, tokens = 0, 0
    async for chunk in stream:
        seen += 1
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
        if leave_after is not None and seen >= leave_after:
            await stream.close()
            return -1
    return tokens


async def many_clients(server: Server, model: str) -> list[int]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        leave = {number: 1 + number % 7 for number in range(NUM_CLIENTS) if number % 3 == 0}
        return await asyncio.gather(*(stream_one(client, model, n, leave.get(n)) for n in range(NUM_CLIENTS)))


def test_a_third_of_64_streams_leaves_and_the_others_complete(server: Server) -> None:
    model = client_of(server).models.list().data[0].id
    wait_until_idle(server)
    before = {name: server.metric(name) for name in ("headrace_sequences_finished_total", "headrace_generation_tokens_total")}
    tokens = asyncio.run(many_clients(server, model))
    stayed = [count for number, count in enumerate(tokens) if number % 3]
    assert stayed == [40] * len(stayed)
    wait_until_idle(server)
    assert server.metric("headrace_requests_waiting") == 0
    assert server.metric("headrace_sequences_finished_total") - before["headrace_sequences_finished_total"] == NUM_CLIENTS
    generated = server.metric("headrace_generation_tokens_total") - before["headrace_generation_tokens_total"]
    assert 40 * len(stayed) <= generated < 40 * NUM_CLIENTS


def engine_process(server: Server) -> psutil.Process:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return next(child for child in children if "headrace.processes.process" in " ".join(child.cmdline()))


def test_a_crashed_server_is_started_again(server: Server) -> None:
    before, engine = server.serving_process(), engine_process(server)
    before.send_signal(signal.SIGSEGV)
    before.wait(30)
    # The connection waits in the socket that the command holds open.
    assert httpx.get(f"{server.url}/live", timeout=60).status_code == 200
    server.wait_healthy()
    assert server.serving_process().pid != before.pid and not engine.is_running()
    assert "died by SIGSEGV: it is started again" in server.log.read_text()
    test_answers_in_english(server)


async def kill_under_load(server: Server, model: str) -> list[int | Exception]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        jobs = [asyncio.create_task(stream_one(client, model, n, None)) for n in range(16)]
        await asyncio.sleep(1.0)
        os.kill(engine_process(server).pid, signal.SIGKILL)
        return await asyncio.gather(*jobs, return_exceptions=True)


def test_a_killed_engine_answers_everyone_and_comes_back(server: Server) -> None:
    model = client_of(server).models.list().data[0].id
    old = engine_process(server).pid
    results = asyncio.run(kill_under_load(server, model))
    assert any(isinstance(result, Exception) for result in results)
    assert all(isinstance(result, (int, openai.APIError)) for result in results)
    server.wait_healthy()
    assert engine_process(server).pid != old
    test_answers_in_english(server)


def test_drains_on_sigterm(server: Server) -> None:
    """The last test: it ends the server. A request in flight is finished, not cut."""
    model = client_of(server).models.list().data[0].id
    body = {"model": model, "prompt": "Rivers", "max_tokens": 60, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert server.process.wait(60) == 0
