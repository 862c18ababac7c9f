"""EngineProcess: one run of the engine's process, seen from its client."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from headrace.errors import EngineError
from headrace.processes import messages
from headrace.processes.spawn import STACK_SIGNAL, STACKS_SIGNAL, Spawned
from headrace.processes.watchdog import ThreadTimes, thread_times

_EXIT_POLL_SECONDS = 0.01
"""Interval at which a process that has closed its end is asked for its status."""


class EngineProcess:
    """A started process. Lives in the event loop that made it; ``close`` frees everything.

    ``exited`` is done with the exit status once the process is gone; all its messages were delivered before.
    """

    def __init__(self, spawned: Spawned, on_message: Callable[[messages.FromEngine], None]) -> None:
        """Ends ``spawned`` where it raises. Raises: EngineError: no descriptor is left."""
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self._spawned = spawned
        self._child = spawned.child
        self._descriptor = self._child.fileno()
        try:
            self._loop.add_reader(self._descriptor, self._read)
        except OSError as error:
            spawned.end()
            raise EngineError(f"the engine's process cannot be reached: {error}") from error
        self._child.on_unsent = self._write_later

    @property
    def pid(self) -> int:
        return self._child.pid

    def send(self, message: messages.ToEngine) -> None:
        """Never blocks. What a dead engine does not read is lost."""
        self._child.send(messages.encode(message))

    async def stacks(self, seconds: float = 1.0) -> str:
        """Returns the stacks of every thread of the engine; fewer, or none, if it does not answer in time."""
        # A stopped process takes no other signal.
        self._child.signal(signal.SIGCONT)
        for wanted in (STACK_SIGNAL, STACKS_SIGNAL):
            self._child.signal(wanted)
            await self._written(seconds)
        return os.pread(self._spawned.stacks, self._stacks_size(), 0).decode(errors="replace")

    async def _written(self, seconds: float) -> None:
        """Waits until more stacks are written and no more come."""
        deadline = self._loop.time() + seconds
        first = size = self._stacks_size()
        while self._loop.time() < deadline and not self.exited.done():
            await asyncio.sleep(0.1)
            now = self._stacks_size()
            if now > first and now == size:
                return
            size = now

    def _stacks_size(self) -> int:
        return os.fstat(self._spawned.stacks).st_size

    def kill(self) -> None:
        self._child.kill()

    def thread_times(self) -> ThreadTimes:
        """Processor time of the process and its children."""
        return thread_times([self.pid], children=True)

    async def stop(self, seconds: float) -> None:
        """Asks the engine to end, and kills it where that takes longer than ``seconds``."""
        if not self.exited.done():
            self.send(messages.Shutdown())
            await asyncio.wait([self.exited], timeout=seconds)
        if not self.exited.done():
            self.kill()
            await asyncio.wait([self.exited])

    def close(self) -> None:
        """Frees what the process had here; kills a process that still runs."""
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_writer(self._descriptor)
        self._spawned.end()

    def _read(self) -> None:
        try:
            while (data := self._child.poll()) is not None:
                self._on_message(messages.decode_from_engine(data))
        except EOFError:
            self._loop.remove_reader(self._descriptor)
            self._await_exit()

    def _write_later(self) -> None:
        self._loop.add_writer(self._descriptor, self._write)

    def _write(self) -> None:
        if self._child.flush():
            self._loop.remove_writer(self._descriptor)

    def _await_exit(self) -> None:
        status = self._child.process.poll()
        if status is None:
            self._loop.call_later(_EXIT_POLL_SECONDS, self._await_exit)
        elif not self.exited.done():
            self.exited.set_result(status)
