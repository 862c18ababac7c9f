"""Clocks: the machine's, and one that stands still until it is told to go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class RealTime:
    """The time of the machine."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class VirtualTime(RealTime):
    """Passes by sleeping and advancing alone, so that no load of the machine changes it; with the timers set by it."""

    def __init__(self) -> None:
        self._now = 0.0
        self._timers: list[tuple[float, Callable[[], None], asyncio.TimerHandle]] = []

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def call_later(self, delay: float, callback: Callable[[], None], /) -> asyncio.TimerHandle:
        loop = asyncio.new_event_loop()
        handle = asyncio.TimerHandle(self._now + delay, callback, (), loop)
        loop.close()
        self._timers.append((self._now + delay, callback, handle))
        return handle

    def advance(self, seconds: float) -> None:
        end = self._now + seconds
        while due := sorted((timer for timer in self._timers if timer[0] <= end), key=lambda timer: timer[0]):
            self._timers.remove(due[0])
            if not due[0][2].cancelled():
                self._now = due[0][0]
                due[0][1]()
        self._now = end
