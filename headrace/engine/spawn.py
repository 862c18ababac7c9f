"""Starts the engine's process. Imports next to nothing, so that a command can start it before it imports its own part."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import headrace
from headrace.engine.timeline import clock

COMMAND = (sys.executable, "-P", "-m", "headrace.engine.process")


@dataclasses.dataclass(frozen=True)
class Spawned:
    """A process that imports the engine and waits for its first message; it ends when its standard input is closed."""

    process: subprocess.Popen[bytes]
    folder: Path
    """Private to the process and its client."""
    origin: float
    """What the timeline of its start-up counts from, on ``timeline.clock``."""


def spawn(command: Sequence[str] = COMMAND, origin: float | None = None) -> Spawned:
    """Starts a process.

    Args:
        origin: when the start-up began that this is part of; None: now.
    """
    folder = Path(tempfile.mkdtemp(prefix="headrace-"))
    begin = clock() if origin is None else origin
    process = subprocess.Popen([*command, str(folder)], stdin=subprocess.PIPE, start_new_session=True, env=_environment())
    return Spawned(process, folder, begin)


def _environment() -> dict[str, str]:
    """Ours, so that the child finds the same headrace."""
    home = str(Path(headrace.__file__).resolve().parent.parent)
    path = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": home if not path else os.pathsep.join((home, path))}
