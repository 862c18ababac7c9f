"""A server under attack for as long as it takes: ``make soak``.

SOAK_SCALE shortens or lengthens it; 1, the default, is 100,000 fuzzed requests, 1,000 kills of the engine and 30 minutes of
mixed load, and a part of it on replicas and on tensor-parallel ranks. Memory, descriptors, threads, processes, temporary
files and KV blocks must be back where they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from .conftest import SoakedServer
from .traffic import fuzzed, leave, plausible, speak_oddly, stall, work_hard

SCALE = float(os.environ.get("SOAK_SCALE", "1"))
AT_ONCE = 24
ANSWER_SECONDS = 60.0
GREEDY = {"prompt": "the bystander", "max_tokens": 64, "temperature": 0, "ignore_eos": True, "stream": True}

REPLICAS = ("--data-parallel-size", "2")
RANKS = ("--tensor-parallel-size", "2")

pytestmark = [pytest.mark.soak, pytest.mark.timeout(4 * 3600)]


def client(soaked: SoakedServer) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=soaked.url, timeout=ANSWER_SECONDS, limits=limits)


async def crowd(count: int, one: Callable[[], Awaitable[str]]) -> Counter[str]:
    """Runs ``one`` so many times, ``AT_ONCE`` at a time; counts the outcomes."""
    counts: Counter[str] = Counter()
    left = iter(range(count))

    async def work() -> None:
        for _ in left:
            counts[await one()] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work())
    return counts


def test_fuzzed_requests(soaked: SoakedServer) -> None:
    """Every body is answered with 200 or a 4xx that OpenAI's clients can read."""
    chance = random.Random(1)

    async def run(count: int) -> Counter[str]:
        async with client(soaked) as http:

            async def one() -> str:
                path, body = fuzzed(chance)
                response = await http.post(path, content=body, headers={"content-type": "application/json"})
                status = response.status_code
                assert status == 200 or 400 <= status < 500, (status, path, body, response.text[:500])
                assert status == 200 or isinstance(response.json()["error"]["message"], str)
                return str(status)

            return await crowd(count, one)

    asyncio.run(run(int(5_000 * SCALE)))
    before = soaked.warm()
    counts = asyncio.run(run(int(95_000 * SCALE)))
    print(f"\nfuzzed requests by status: {dict(counts)}")
    assert {"200", "400"} <= counts.keys()
    assert soaked.holdings().grown_since(before) == []


@pytest.mark.parametrize(
    ("soaked", "kills"), [((), 1_000), (REPLICAS, 50), (RANKS, 50)], ids=["engine", "replica", "rank"], indirect=["soaked"]
)
def test_kills(soaked: SoakedServer, kills: int) -> None:
    """An engine's process is killed at a random step, again and again: the server comes back, and no request is blamed, though
    clients repeat theirs until they are served."""
    chance = random.Random(2)
    fixed = {"max_tokens": 200, "ignore_eos": True, "stream": False}
    bodies = [plausible(chance) | {"prompt": f"{number} " * 9} | fixed for number in range(8)]
    answers: Counter[str] = Counter()
    killed = 0

    async def one(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
        status = 503
        while status == 503:
            response = await http.post("/v1/completions", json=body)
            status = response.status_code
            assert status == 200 or (status == 503 and response.headers["retry-after"]), (status, response.text)
            answers[str(status)] += 1
            await asyncio.sleep(0.05)

    async def kill_once() -> None:
        nonlocal killed
        async with client(soaked) as http:
            tasks = [asyncio.create_task(one(http, body)) for body in bodies]
            await asyncio.sleep(chance.uniform(0, 0.5))
            with contextlib.suppress(psutil.NoSuchProcess):
                chance.choice(soaked.engines()).send_signal(signal.SIGKILL)
                killed += 1
            await asyncio.wait_for(asyncio.gather(*tasks), ANSWER_SECONDS)
        await asyncio.to_thread(soaked.idle)
        # Deaths that no served request separates count as a crash loop.
        assert httpx.post(f"{soaked.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200

    asyncio.run(kill_once())
    before = soaked.warm()
    waits = []
    for _ in range(max(1, int(kills * SCALE))):
        start = time.monotonic()
        asyncio.run(kill_once())
        waits.append(time.monotonic() - start)
    waits.sort()
    print(f"\n{len(waits)} kills; healthy again after {waits[len(waits) // 2]:.1f} s (median), {waits[-1]:.1f} s at most")
    print(f"answers by status: {dict(answers)}")
    assert killed > kills * SCALE / 2 and answers["503"] >= killed
    assert soaked.holdings().grown_since(before) == []


@pytest.mark.parametrize(
    ("soaked", "minutes"), [((), 30), (REPLICAS, 5), (RANKS, 5)], ids=["engine", "replicas", "ranks"], indirect=["soaked"]
)
def test_hostile_load(soaked: SoakedServer, minutes: float) -> None:
    """A bystander's stream goes on beside all of it, with the same tokens as alone."""
    chance = random.Random(3)
    address = urlsplit(soaked.url)
    place: tuple[Any, Any] = (address.hostname, address.port)
    longest = 0.0

    async def bystander(http: httpx.AsyncClient) -> str:
        nonlocal longest
        text, last = "", None
        async with http.stream("POST", "/v1/completions", json=GREEDY) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                now = time.monotonic()
                if last is not None:
                    longest = max(longest, now - last)
                last = now
                if line.startswith("data: {"):
                    text += "".join(choice["text"] for choice in json.loads(line.removeprefix("data: "))["choices"])
        return text

    async def attack(http: httpx.AsyncClient) -> None:
        match chance.randrange(8):
            case 0:
                await leave(http, chance)
            case 1:
                await work_hard(http, chance)
            case 2:
                await stall(*place, chance)
            case 3:
                await speak_oddly(*place, chance)
            case _:
                path, body = fuzzed(chance)
                response = await http.post(path, content=body, headers={"content-type": "application/json"})
                assert response.status_code < 500 or response.status_code == 503, (response.status_code, body, response.text)

    async def run(seconds: float) -> int:
        async with client(soaked) as http:
            expected, count = await bystander(http), 0
            end = time.monotonic() + seconds

            async def attacker() -> None:
                while time.monotonic() < end:
                    await attack(http)

            async def watch() -> None:
                nonlocal count
                while time.monotonic() < end:
                    assert await bystander(http) == expected
                    count += 1

            async with asyncio.TaskGroup() as group:
                group.create_task(watch())
                for _ in range(AT_ONCE // 2):
                    group.create_task(attacker())
        return count

    asyncio.run(run(4 * minutes * SCALE))
    before = soaked.warm()
    longest = 0.0
    count = asyncio.run(run(56 * minutes * SCALE))
    print(f"\n{count} streams of a bystander, longest pause {longest:.2f} s; {before}")
    assert count
    assert soaked.holdings().grown_since(before) == []
