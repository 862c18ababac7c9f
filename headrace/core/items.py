"""Chunk boundaries and encoder costs that follow from the items of a prompt."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter

from headrace.kv import Item

_start = attrgetter("start")


def chunk_length(start: int, end: int, limit: int, items: Sequence[Item]) -> int:
    """Length of a chunk from ``start``: at most ``limit`` tokens of ``[start, end)``, without cutting an atomic item.

    Args:
        start: the first token not yet computed; never inside an atomic item.
        items: ascending and disjoint.

    Returns:
        0 if an atomic item begins at ``start`` and is longer than ``limit``.
    """
    stop = min(end, start + limit)
    # Only the last item that starts before `stop` can contain it.
    place = bisect_left(items, stop, key=_start) - 1
    if place >= 0 and items[place].atomic and stop < items[place].end:
        stop = max(start, items[place].start)
    return max(0, stop - start)


def least_chunk(start: int, items: Sequence[Item]) -> int:
    """Smallest length of a chunk from ``start``: 1, or that of the atomic item that begins there."""
    place = bisect_left(items, start, key=_start)
    if place < len(items) and items[place].start == start and items[place].atomic:
        return items[place].end - start
    return 1


def encoder_cost(start: int, end: int, items: Sequence[Item], encoded: int) -> int:
    """Encoder tokens of the items in the chunk ``[start, end)``, except items that start before ``encoded``: earlier chunks
    have paid for those."""
    needed = [item for item in items if max(start, item.start) < min(end, item.end)]
    return sum(item.encoder_tokens for item in needed if item.start >= encoded)


def affordable_length(start: int, length: int, items: Sequence[Item], encoded: int, encoder_tokens: int) -> int:
    """Shortens a chunk of ``length`` tokens from ``start`` to end before the first item that ``encoder_tokens`` cannot pay."""
    for item in items:
        cost = encoder_cost(start, start + length, [item], encoded)
        if cost > encoder_tokens:
            return max(0, item.start - start)
        encoder_tokens -= cost
    return length
