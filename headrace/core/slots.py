"""Slots: the persistent places of sequences in the runner."""

from __future__ import annotations

import heapq


class Slots:
    """Slots ``0 .. count - 1``; the lowest free one is taken, so that few sequences use few slots."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))
        self._released: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return heapq.heappop(self._free)

    def release(self, slot: int) -> None:
        """The slot may be taken again at once: a plan applies ``released`` before ``new``."""
        heapq.heappush(self._free, slot)
        self._released.append(slot)

    def take_released(self) -> tuple[int, ...]:
        """What was released since the last call, for the next plan."""
        released = tuple(self._released)
        self._released.clear()
        return released
