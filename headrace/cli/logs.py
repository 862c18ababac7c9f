"""Log lines on standard error: time, level, where from, what."""

from __future__ import annotations

import logging

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def set_up(level: str) -> None:
    """``level`` holds for headrace; libraries speak up from warnings on."""
    logging.basicConfig(level=logging.WARNING, format=FORMAT)
    logging.getLogger("headrace").setLevel(level.upper())
