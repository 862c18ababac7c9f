"""Streams beside 200 hostile grammars, and the memory that they leave: ``python tests/e2e/hostile.py [serve options]``."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import numpy.typing as npt
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.hostile_constraints import BOMBS
from support.server.reader import StreamReader
from support.server.running import Server, start_server, stop_server

NAMES = {"json": "guided_json", "regex": "guided_regex", "choice": "guided_choice", "grammar": "guided_grammar"}


STREAM_TOKENS = 160
"""Tokens of one stream: another begins in its blocks."""
STREAM = {"prompt": "Once", "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}
BLOCK = 16
CONCURRENT = 8


def options(clients: int) -> list[str]:
    """Options of a server whose memory shows what grammars leave: no more KV blocks than requests need, and no cache of
    grammars."""
    blocks = (clients + CONCURRENT) * (STREAM_TOKENS // BLOCK + 2)
    return ["--num-kv-blocks", str(blocks), "--structured-outputs-config", json.dumps({"cache_bytes": 0})]


class Gaps(NamedTuple):
    """Between two events of a stream, in seconds."""

    p50: float
    p99: float
    longest: float
    above: int
    """Longer than twice the p99 beside nothing."""
    count: int


class Report(NamedTuple):
    quiet: Gaps
    plain: Gaps
    """Beside as many requests without grammars."""
    hostile: Gaps
    statuses: dict[int, int]
    """Number of requests with grammars by status."""
    memory: float
    """Memory of the server's processes in MiB, before the first of 200."""
    grown: float
    """Memory after the last one, less ``memory``."""
    seconds: float
    """Spent beside hostile grammars."""
    reader_busy: float
    """Processor time of a process that reads streams by the time that it reads, the largest: near 1, it measures itself."""


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


def gaps_within(times: list[array[float]], spans: list[tuple[float, float]]) -> npt.NDArray[np.float64]:
    """Lengths of the gaps between two events of a stream that begin and end in one of the spans.

    Args:
        times: as ``Arrivals.times``.
    """
    joined = np.concatenate([np.frombuffer(own) for own in times])
    begins, ends = joined[:-1], joined[1:]
    within = np.zeros(len(begins), dtype=bool)
    for start, stop in spans:
        within |= (begins >= start) & (ends <= stop)  # of NaN neither is true
    return (ends - begins)[within]


def gaps_of(lengths: npt.NDArray[np.float64], quiet: npt.NDArray[np.float64]) -> Gaps:
    p50, p99, longest = (float(np.quantile(lengths, share, method="higher")) for share in (0.5, 0.99, 1.0))
    limit = 2 * np.quantile(quiet, 0.99, method="higher")
    return Gaps(p50, p99, longest, int((lengths > limit).sum()), len(lengths))


def memory(server: Server) -> float:
    root = psutil.Process(server.process.pid)
    return sum(process.memory_info().rss for process in [root, *root.children(recursive=True)]) / 2**20


async def measure(server: Server, clients: int, grammars: int, rounds: int, quiet: float) -> Report:
    """Streams beside nothing, plain requests and hostile grammars in turns, since other programs use the machine too.

    Args:
        server: started with ``options(clients)``.
        quiet: seconds beside nothing, in each round.
    """
    statuses: dict[int, int] = {}
    phases: dict[str, list[tuple[float, float]]] = {"quiet": [], "plain": [], "hostile": []}
    share = grammars // rounds
    async with httpx.AsyncClient(timeout=1200) as client:

        async def ask(body: dict[str, Any]) -> None:
            response = await client.post(f"{server.url}/v1/completions", json=body)
            if "ignore_eos" not in body:
                statuses[response.status_code] = statuses.get(response.status_code, 0) + 1

        async def all_of(asked: list[dict[str, Any]]) -> None:
            for place in range(0, len(asked), CONCURRENT):
                await asyncio.gather(*map(ask, asked[place : place + CONCURRENT]))

        # Touch every KV block, and load what the first grammars load.
        prompts = [[1000 + index] * (STREAM_TOKENS + BLOCK) for index in range(clients + CONCURRENT)]
        await ask({"prompt": prompts, "max_tokens": BLOCK, "ignore_eos": True})
        await all_of(bodies(len(BOMBS), 0))
        statuses.clear()
        with StreamReader(server.url, STREAM, clients) as reader:
            await asyncio.sleep(quiet)
            before = memory(server)
            for place in range(rounds):
                for phase, spans in phases.items():
                    start = time.monotonic()
                    if phase == "quiet":
                        await asyncio.sleep(quiet)
                    elif phase == "plain":
                        await all_of([{"prompt": "Once", "max_tokens": 8, "ignore_eos": True}] * share)
                    else:
                        await all_of(bodies(share, len(BOMBS) + place * share))
                    spans.append((start, time.monotonic()))
            after = memory(server)
            arrivals = reader.stop()
    found = {phase: gaps_within(arrivals.times, spans) for phase, spans in phases.items()}
    return Report(
        *(gaps_of(lengths, found["quiet"]) for lengths in found.values()),
        statuses,
        before,
        after - before,
        sum(stop - start for start, stop in phases["hostile"]),
        arrivals.busy,
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(Path(folder) / "log.txt", *options(32), *sys.argv[1:])
        try:
            server.wait_healthy()
            print(json.dumps(asyncio.run(measure(server, 32, 200, 4, 20.0))._asdict(), indent=1))
        finally:
            stop_server(server)


if __name__ == "__main__":
    main()
