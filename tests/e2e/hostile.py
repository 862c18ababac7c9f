"""Streams beside 200 hostile grammars, and the memory that they leave: ``python tests/e2e/hostile.py [serve options]``."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from constrain.test_grammars import BOMBS

from e2e.running import Server, start_server, stop_server

NAMES = {"json": "guided_json", "regex": "guided_regex", "choice": "guided_choice", "grammar": "guided_grammar"}


class Report(NamedTuple):
    quiet_p99: float
    hostile_p99: float
    """Seconds between two tokens of a stream."""
    hostile_longest: float
    statuses: dict[int, int]
    grown_mib: float
    """Memory of the server's processes, less what it was after the first 200."""
    seconds: float


def bodies(count: int, first: int) -> list[dict[str, Any]]:
    """Requests with grammars of which no two are equal."""
    made = []
    for number in range(first, first + count):
        name = [*BOMBS][number % len(BOMBS)]
        ((kind, value),) = BOMBS[name].items()
        if kind == "json":
            value = {**value, "title": str(number)}
        elif kind == "choice":
            value = [*value, f"other {number}"]
        elif kind == "grammar":
            value = f'{value}\nunused{number}: "{number}"'
        else:
            value = f"{value}|x{number}"
        made.append({"prompt": "Once", "max_tokens": 8, NAMES[kind]: value})
    return made


async def streams(url: str, clients: int, gaps: list[tuple[float, float]]) -> None:
    """Reads streams until it is cancelled; ``gaps``: (end, length) of each gap."""

    async def one(client: httpx.AsyncClient) -> None:
        body = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        while True:
            last = None
            async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        now = time.monotonic()
                        if last is not None:
                            gaps.append((now, now - last))
                        last = now

    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        await asyncio.gather(*(one(client) for _ in range(clients)))


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))] if values else 0.0


def memory(server: Server) -> float:
    root = psutil.Process(server.process.pid)
    return sum(process.memory_info().rss for process in [root, *root.children(recursive=True)]) / 2**20


async def measure(server: Server, clients: int, grammars: int, quiet: float) -> Report:
    gaps: list[tuple[float, float]] = []
    background = asyncio.create_task(streams(server.url, clients, gaps))
    statuses: dict[int, int] = {}
    async with httpx.AsyncClient(timeout=600) as client:

        async def ask(body: dict[str, Any]) -> None:
            response = await client.post(f"{server.url}/v1/completions", json=body)
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1

        async def all_of(asked: list[dict[str, Any]]) -> None:
            for place in range(0, len(asked), 8):
                await asyncio.gather(*map(ask, asked[place : place + 8]))

        await asyncio.sleep(quiet / 4)
        gaps.clear()
        await asyncio.sleep(quiet)
        calm = [length for _, length in gaps]
        start = time.monotonic()
        await all_of(bodies(grammars, 0))
        seconds = time.monotonic() - start
        hostile = [length for end, length in gaps if start <= end]
        settled = memory(server)
        await all_of(bodies(grammars, grammars))
        grown = memory(server) - settled
    background.cancel()
    await asyncio.gather(background, return_exceptions=True)
    return Report(p99(calm), p99(hostile), max(hostile, default=0.0), statuses, grown, seconds)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(Path(folder) / "log.txt", *sys.argv[1:])
        try:
            server.wait_healthy()
            print(json.dumps(asyncio.run(measure(server, 32, 200, 20.0))._asdict(), indent=1))
        finally:
            stop_server(server)


if __name__ == "__main__":
    main()
