"""Where snapshots of a prompt's states are taken, and where its chunks end for it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

from headrace.core.items import chunk_length, least_chunk
from headrace.kv import Item

MERGE = 512
"""Snapshots closer than this many tokens are one, the later; and a branch is worth one from here on."""


class ChunkGrid:
    """Ends of the chunks of one prompt: the points at which snapshots are taken, and multiples of ``grid``.

    Args:
        points: ascending.
    """

    def __init__(self, grid: int, points: Sequence[int] = ()) -> None:
        self.grid = grid
        self.points = points

    def cut(self, start: int, end: int, limit: int, items: Sequence[Item]) -> int:
        """Length of a chunk from ``start``: at most ``limit`` tokens of ``[start, end)``; 0 if what cannot be cut is longer."""
        stop = min(end, start + limit)
        place = bisect_right(self.points, start)
        if place < len(self.points) and self.points[place] <= stop:
            stop = self.points[place]
        elif stop < end:
            stop -= stop % self.grid
        length = chunk_length(start, end, max(0, stop - start), items)
        if length:
            return length
        least = self.least(start, end, items)
        return least if least <= limit else 0

    def least(self, start: int, end: int, items: Sequence[Item]) -> int:
        """Smallest length of a chunk from ``start``: to the grid, or to the edge of an atomic item that covers it."""
        stop = min(end, start - start % self.grid + self.grid)
        length = chunk_length(start, end, stop - start, items)
        return length or least_chunk(start, items)


def snapshot_points(
    kept: Iterable[int], others: Iterable[int], start: int, end: int, boundary: Callable[[int], int]
) -> tuple[int, ...]:
    """Returns the points inside ``(start, end)`` at which a sequence's snapshots are taken, ascending.

    Args:
        kept: points that are taken however close they are to others.
        others: of two that are close, the later is taken.
        boundary: the largest number of tokens up to another at which a snapshot can be taken.
    """
    fixed = {boundary(point) for point in kept if point <= end}
    merged: list[int] = []
    for point in sorted(fixed | {boundary(point) for point in others if point <= end}, reverse=True):
        if start < point < end and (point in fixed or not merged or merged[-1] - point >= MERGE):
            merged.append(point)
    return tuple(reversed(merged))
