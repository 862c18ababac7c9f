"""FreeBlocks: the empty blocks of a region, ordered from its fixed end."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator


class FreeBlocks:
    """A set of block numbers that pops the lowest (or the highest) first, so that the region's other end stays free."""

    def __init__(self, *, highest_first: bool = False) -> None:
        self._sign = -1 if highest_first else 1
        self._blocks: set[int] = set()
        self._heap: list[int] = []
        """Every block of the set times ``_sign``, and blocks that were discarded since."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def append(self, block: int) -> None:
        self._blocks.add(block)
        heapq.heappush(self._heap, self._sign * block)

    def extend(self, blocks: Iterable[int]) -> None:
        self._blocks.update(blocks)
        self._heap = [self._sign * block for block in self._blocks]
        heapq.heapify(self._heap)

    def pop(self) -> int:
        """Raises IndexError if the set is empty."""
        while True:
            block = self._sign * heapq.heappop(self._heap)
            if block in self._blocks:
                self._blocks.remove(block)
                return block

    def discard(self, block: int) -> bool:
        """Removes a block; returns False if it is not in the set."""
        if block not in self._blocks:
            return False
        self._blocks.remove(block)
        if len(self._heap) > 2 * len(self._blocks) + 64:
            self.extend(())
        return True
