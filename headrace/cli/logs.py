"""Log lines on standard error: time, level, where from, what."""

from __future__ import annotations

import logging


def set_up(level: str) -> None:
    """``level`` holds for headrace; libraries speak up from warnings on."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("headrace").setLevel(level.upper())
