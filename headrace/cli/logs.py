"""Log lines on standard error: time, level, where from, what."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any, TextIO


class LossyStream:
    """A text stream that drops what it cannot write: a full disk, or a reader that left, must not end what only reports."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def set_up(level: str) -> None:
    """``level`` holds for headrace; libraries speak up from warnings on."""
    # Python has None in place of a stream that its caller closed.
    sys.stdout, sys.stderr = (LossyStream(stream) if stream else stream for stream in (sys.stdout, sys.stderr))
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("headrace").setLevel(level.upper())
