"""Hostile grammars beside streams: every one is answered, the streams go on, and memory stays."""

from __future__ import annotations

import asyncio

import pytest

from e2e.hostile import measure
from e2e.running import Server

PAUSE = 3.0
"""Seconds that a stream may wait on a machine that is busy with other things, where that is more than twice its quiet p99."""
GROWTH = 200.0
"""MiB that further grammars may add: caches are full by then."""


@pytest.mark.slow
def test_hostile_grammars_stop_no_stream_and_leave_no_memory(server: Server) -> None:
    report = asyncio.run(measure(server, clients=8, grammars=48, quiet=8.0))
    assert {*report.statuses} <= {200, 400}, report
    assert report.hostile_p99 < max(PAUSE, 2 * report.quiet_p99), report
    assert report.grown_mib < GROWTH, report
