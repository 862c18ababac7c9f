"""Exempts start-up objects, which live as long as the process, from garbage collection."""

from __future__ import annotations

import gc


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
