"""What waits for an idle moment is done while no request is there, one piece at a time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from engine.fakes import FakeRunner, make_core

from headrace.errors import RankLostError
from headrace.processes import process
from headrace.processes.messages import Shutdown, Stats, ToEngine
from headrace.processes.process import EngineLoop
from headrace.runner.graphs import GraphCount


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

    def waiting(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def receive(self) -> ToEngine:
        return Shutdown()

    def send(self, message: Any) -> None:
        self.sent.append(message)


def idle(most: int, looks: int) -> tuple[Capturing, Channel]:
    core, channel = make_core(None), Channel(looks)
    runner: Any = Capturing(most)
    core.executor = runner
    loop: Any = EngineLoop(core, channel)  # type: ignore[arg-type]
    loop.run()
    return runner, channel


def test_all_graphs_are_captured_and_told() -> None:
    runner, channel = idle(most=3, looks=1000)
    assert runner.captured == 3
    assert [report.stats.graphs_captured for report in channel.sent if isinstance(report, Stats)] == [1, 2, 3]
    assert channel.sent[-1].stats.graphs_total == 3


def test_a_message_waits_for_one_capture_at_most() -> None:
    runner, _ = idle(most=100, looks=6)
    assert runner.captured == 3, "each turn looks twice: whether there is a message, and again before it captures"


def test_with_work_nothing_is_captured() -> None:
    core = make_core(None)
    runner: Any = Capturing(5)
    core.executor = runner
    core.scheduler.has_work = lambda: True  # type: ignore[method-assign]
    assert not core.idle() and runner.captured == 0


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


def test_ranks_are_asked_again_while_the_engine_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_IDLE_SECONDS", 0.01)
    core, channel = make_core(None), process.Channel(tmp_path)
    monkeypatch.setattr(channel, "wait", lambda _, wait=channel.wait: wait(()))
    core.executor = Ranks()  # type: ignore[assignment]
    begin = time.monotonic()
    with pytest.raises(RankLostError):
        EngineLoop(core, channel).run()
    channel.close()
    assert core.executor.asked == 3 and time.monotonic() - begin >= 0.02  # type: ignore[attr-defined]
