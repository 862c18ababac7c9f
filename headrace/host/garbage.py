"""Exempts objects that stay from garbage collection: those of start-up for good, an application's during a call."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_PYTHONS_OWN = 10_000
"""More objects than Python itself freezes when it starts, hundreds in 3.12, and fewer than it has with torch."""


def freeze_gc(young: int | None = None) -> None:
    """Drops the start-up's garbage, and keeps all that is left out of later collections, each of which would stop the
    process for as long as hundreds of thousands of objects take.

    Only for headrace's own processes: an application's objects would never be collected either. ``young``: how many new
    objects start a collection of these; None: as before.
    """
    gc.collect()
    gc.freeze()
    if young is not None:
        gc.set_threshold(young, *gc.get_threshold()[1:])


@contextlib.contextmanager
def frozen_meanwhile() -> Iterator[None]:
    """Keeps the objects that exist now out of the collections inside, which look at new ones alone: to look at all of them
    takes 0.1 s and more, in which a GPU runs out of work. Does nothing where the application has frozen its own."""
    if gc.get_freeze_count() > _PYTHONS_OWN:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
