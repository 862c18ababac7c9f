"""A clock that all processes of a machine share, and the start of this process on it."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

_IMPORTED = time.time()


def clock() -> float:
    """Seconds on a clock that all processes of a machine share."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.time()


def process_start() -> float:
    """Start of this process on ``clock``; import of this module where the system does not report it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name of the program, in parentheses, may hold spaces.
            fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
            began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
            if 0 <= clock() - began < time.process_time() + 3600:
                return began
    return clock() - (time.time() - _IMPORTED)
