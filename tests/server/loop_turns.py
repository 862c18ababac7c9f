"""The longest turns of an event loop, in processor time."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest


class Turn(NamedTuple):
    """One callback of the loop."""

    seconds: float
    """Processor time of the loop's thread."""
    what: str


@contextlib.contextmanager
def turns(patch: pytest.MonkeyPatch) -> Iterator[list[Turn]]:
    """Those of this thread's loop that use a millisecond or more."""
    found: list[Turn] = []
    run, thread = asyncio.events.Handle._run, threading.current_thread()

    def timed(handle: asyncio.events.Handle) -> None:
        began = time.thread_time()
        run(handle)
        if (seconds := time.thread_time() - began) > 0.001 and threading.current_thread() is thread:
            found.append(Turn(seconds, repr(handle)))

    with patch.context() as own:
        own.setattr(asyncio.events.Handle, "_run", timed)
        yield found
