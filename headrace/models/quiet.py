"""Keeps transformers quiet while it reads weights: headrace reports progress, and weights that are missing or left out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import transformers


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Disables transformers' progress bars, and its warnings with their table of MISSING and UNEXPECTED weights."""
    logging: Any = transformers.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
