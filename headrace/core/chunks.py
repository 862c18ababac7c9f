"""Where a chunk of a prompt may end."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def chunk_length(start: int, end: int, limit: int, spans: Sequence[tuple[int, int]]) -> int:
    """Tokens of ``[start, end)`` that one step may compute: at most ``limit``, cutting no span.

    Args:
        start: the first token not yet computed; never inside a span.
        spans: ascending and disjoint ``(start, end)``.

    Returns:
        0 if a span begins at ``start`` and is longer than ``limit``.
    """
    stop = min(end, start + limit)
    # The only span that may hold `stop` inside it is the last that starts before it.
    place = bisect_left(spans, (stop,)) - 1
    if place >= 0 and stop < spans[place][1]:
        stop = max(start, spans[place][0])
    return max(0, stop - start)


def indivisible(start: int, spans: Sequence[tuple[int, int]]) -> int:
    """The least number of tokens that a chunk from ``start`` can have: 1, or the span that begins there."""
    place = bisect_left(spans, (start,))
    if place < len(spans) and spans[place][0] == start:
        return spans[place][1] - start
    return 1
