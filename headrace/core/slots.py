"""Slots: allocates the runner's per-sequence state slots."""

from __future__ import annotations

import heapq


class Slots:
    """Allocates slots ``0 .. count - 1``, lowest first, so that few sequences use few slots."""

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
        """Frees a slot. It can be taken again in the same plan, which applies ``released`` before ``new``."""
        heapq.heappush(self._free, slot)
        self._released.append(slot)

    def take_released(self) -> tuple[int, ...]:
        """Returns the slots released since the last call, for the next plan."""
        released = tuple(self._released)
        self._released.clear()
        return released
