"""Interrupts of a call of ``LLM``."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, which is checked between steps: an interrupted step would leave inconsistent state.

    A second Ctrl-C interrupts at once.
    """
    interrupted = threading.Event()
    replaceable = threading.current_thread() is threading.main_thread()
    if not replaceable or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupted
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
