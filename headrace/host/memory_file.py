"""Files without a name, which this process shares with its children."""

from __future__ import annotations

import os
import sys
import tempfile


def memory_file(name: str) -> int:
    """Returns the descriptor of an empty file that is gone once no process has it open. ``name``: for debugging."""
    if sys.platform == "linux":
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
