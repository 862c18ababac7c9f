"""Starts the engine's process. Imports next to nothing, so that a command can start it before it imports its own part."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Sequence

from headrace.errors import EngineError
from headrace.host.child import ChildProcess, python
from headrace.host.clock import clock
from headrace.host.memory_file import memory_file

COMMAND = python("headrace.processes.process")
STACK_SIGNAL, STACKS_SIGNAL = signal.SIGUSR1, signal.SIGUSR2
"""Ask for the stack of the thread that gets the signal, the main one as a rule, and for every thread's, in the stacks file. The
frames of threads that run meanwhile are read as they change, which can end the process: what is wanted most comes first."""


@dataclasses.dataclass(frozen=True)
class Spawned:
    """A process that imports the engine and waits for its first message."""

    child: ChildProcess
    stacks: int
    """Descriptor of the stacks file, the same in both processes."""
    origin: float
    """Start of the timeline of its start-up, on ``host.clock``."""

    def end(self) -> None:
        """Kills the process if it runs."""
        self.child.end(0.0)
        os.close(self.stacks)


def spawn(command: Sequence[str] = COMMAND, origin: float | None = None) -> Spawned:
    """Starts a process.

    Args:
        origin: when the start-up began that this is part of; None: now.

    Raises:
        EngineError: the system has no room for it: no descriptor or memory is left.
    """
    begin = clock() if origin is None else origin
    try:
        stacks = memory_file("stacks")
    except OSError as error:
        raise EngineError(f"the engine's process cannot be started: {error}") from error
    try:
        return Spawned(ChildProcess(command, "the engine's process", descriptors=(stacks,)), stacks, begin)
    except BaseException:
        os.close(stacks)
        raise
