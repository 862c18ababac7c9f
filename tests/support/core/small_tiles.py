"""Snapshots of states that lie close to each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def small_tiles() -> Iterator[None]:
    """Makes points of snapshots lie close to each other."""
    with (
        mock.patch("headrace.core.points.MERGE", 6),
        mock.patch("headrace.core.states.MERGE", 6),
        mock.patch.multiple("headrace.core.states", _LEAST_PERIOD=8, _LONGEST_PERIOD=16),
    ):
        yield
