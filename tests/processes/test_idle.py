"""Work for idle moments is done while no request is there, one piece at a time."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

import pytest
from support.engine.fakes import FakeRunner, make_core

from headrace.core.plan import GraphCount
from headrace.errors import RankLostError
from headrace.host.channel import Channel as SocketChannel
from headrace.processes import process
from headrace.processes.load import _capture_graphs
from headrace.processes.messages import Shutdown, Stats, decode_from_engine, encode
from headrace.processes.process import EngineLoop


class Capturing(FakeRunner):
    """A runner with graphs to capture."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.captured, self.most = 0, most

    def capture_next(self) -> GraphCount:
        self.captured += self.captured < self.most
        return self.graphs()

    def graphs(self) -> GraphCount:
        return GraphCount(self.captured, self.most)


class Channel:
    """Has a message after so many looks at it."""

    def __init__(self, looks: int) -> None:
        self.looks, self.sent = looks, []  # type: tuple[int, list[Any]]

    def poll(self) -> bytes | None:
        self.looks -= 1
        return encode(Shutdown()) if self.looks < 0 else None

    def wait(self, timeout: float | None, others: Sequence[int]) -> None:
        pass

    def send(self, message: bytes) -> None:
        self.sent.append(decode_from_engine(message))


def idle(most: int, looks: int) -> tuple[Capturing, Channel]:
    core, channel = make_core(None), Channel(looks)
    runner: Any = Capturing(most)
    core.executor = runner
    loop: Any = EngineLoop(core, channel)
    loop.run()
    return runner, channel


def test_all_graphs_are_captured_and_told() -> None:
    runner, channel = idle(most=3, looks=1000)
    assert runner.captured == 3
    assert [report.stats.graphs_captured for report in channel.sent if isinstance(report, Stats)] == [1, 2, 3]
    assert channel.sent[-1].stats.graphs_total == 3


def test_a_message_waits_for_one_capture_at_most() -> None:
    runner, _ = idle(most=100, looks=3)
    assert runner.captured == 3


def test_with_work_nothing_is_captured() -> None:
    core = make_core(None)
    runner: Any = Capturing(5)
    core.executor = runner
    core.scheduler.has_work = lambda: True
    assert not core.idle() and runner.captured == 0


@pytest.mark.parametrize(("most", "captured"), [(2, 2), (4, 4), (100, 4)])
def test_a_graph_of_each_kind_is_captured_before_requests_are_taken(most: int, captured: int) -> None:
    """However short the time is: others take their place, so that no first request waits for a kernel."""
    runner: Any = Capturing(most)
    shown: list[str] = []
    assert _capture_graphs(runner, 0.0, lambda fraction, detail: shown.append(detail)) == GraphCount(captured, most)
    assert shown == [f"{count} of {most}" for count in range(1, captured)]


class Ranks(FakeRunner):
    """Several processes, one of which stops to answer after a while."""

    asked = 0

    def sentinels(self) -> tuple[int, ...]:
        return (0,)

    def graphs(self) -> GraphCount:
        self.asked += 1
        if self.asked == 3:
            raise RankLostError("rank 1 was stopped by a signal")
        return GraphCount(0, 0)


def test_ranks_are_asked_again_while_the_engine_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_IDLE_SECONDS", 0.01)
    core, (ours, theirs) = make_core(None), socket.socketpair()
    channel = SocketChannel(ours)
    monkeypatch.setattr(channel, "wait", lambda seconds, _, wait=channel.wait: wait(seconds))
    core.executor = Ranks()
    begin = time.monotonic()
    with pytest.raises(RankLostError):
        EngineLoop(core, channel).run()
    channel.close()
    theirs.close()
    assert core.executor.asked == 3 and time.monotonic() - begin >= 0.02
