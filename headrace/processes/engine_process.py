"""EngineProcess: one run of the engine's process, seen from its client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from headrace.errors import EngineError
from headrace.processes.messages import FromEngine, Shutdown, ToEngine, decode_from_engine, encode
from headrace.processes.process import SOCKET_FILE, STACK_SIGNAL, STACKS_FILE, STACKS_SIGNAL
from headrace.processes.spawn import Spawned
from headrace.processes.watchdog import ThreadTimes, thread_times

logger = logging.getLogger("headrace.engine")

_LAST_WORDS_SECONDS = 0.1
"""How long after its process's end an engine's messages may still arrive."""


class EngineProcess:
    """A started process and the socket to it. Lives in the event loop that made it; ``close`` frees everything.

    ``exited`` is done with the exit status once the process is gone and its last messages were delivered.
    """

    def __init__(self, spawned: Spawned, context: zmq.Context[Any], on_message: Callable[[FromEngine], None]) -> None:
        """Discards ``spawned`` where it raises.

        Args:
            context: for its socket. A context that has had a socket makes another without ending this process where no
                descriptor is left; a new one does not.

        Raises:
            EngineError: no descriptor or thread is left.
        """
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self._folder = spawned.folder.path
        self._process = spawned.process
        try:
            with contextlib.ExitStack() as resources:
                resources.callback(spawned.discard)
                self._socket = context.socket(zmq.PAIR)
                resources.callback(self._socket.close, linger=0)
                self._socket.set_hwm(0)
                self._socket.linger = 0
                # The side that connects may send before the other one is there.
                self._socket.connect(f"ipc://{self._folder / SOCKET_FILE}")
                descriptor = int(self._socket.getsockopt(zmq.FD))
                self._loop.add_reader(descriptor, self._read)
                resources.callback(self._loop.remove_reader, descriptor)
                threading.Thread(target=self._wait, name="engine-exit", daemon=True).start()
                self._resources = resources.pop_all()
        except (zmq.ZMQError, OSError, RuntimeError) as error:
            raise EngineError(f"the engine's process cannot be reached: {error}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Never blocks. What a dead engine does not read is lost."""
        self._socket.send(encode(message))
        # The socket's descriptor signals changes, not states: a send may have swallowed the news of a message.
        self._loop.call_soon(self._read)

    async def stacks(self, seconds: float = 1.0) -> str:
        """What every thread of the engine is doing; less, or nothing, if it does not answer in time."""
        # A stopped process takes no other signal.
        self._signal(signal.SIGCONT)
        for wanted in (STACK_SIGNAL, STACKS_SIGNAL):
            self._signal(wanted)
            await self._written(seconds)
        try:
            return self._stacks.read_text(errors="replace")
        except OSError:
            return ""

    async def _written(self, seconds: float) -> None:
        """Until more stacks were written than there were, and no more comes."""
        deadline = self._loop.time() + seconds
        first = size = self._stacks_size()
        while self._loop.time() < deadline and not self.exited.done():
            await asyncio.sleep(0.1)
            now = self._stacks_size()
            if now > first and now == size:
                return
            size = now

    @property
    def _stacks(self) -> Path:
        return self._folder / STACKS_FILE

    def _stacks_size(self) -> int:
        return self._stacks.stat().st_size if self._stacks.exists() else 0

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def thread_times(self) -> ThreadTimes:
        """Processor time of the process and its children."""
        return thread_times([self.pid], children=True)

    async def stop(self, seconds: float) -> None:
        """Asks the engine to end, and kills it where that takes longer than ``seconds``."""
        if not self.exited.done():
            self.send(Shutdown())
            await asyncio.wait([self.exited], timeout=seconds)
        if not self.exited.done():
            self.kill()
            await asyncio.wait([self.exited])

    def close(self) -> None:
        """Frees the socket and the folder; kills a process that still runs."""
        self._resources.close()

    def _read(self) -> None:
        while not self._socket.closed and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._on_message(decode_from_engine(self._socket.recv(zmq.NOBLOCK)))

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            self._process.send_signal(number)

    def _wait(self) -> None:
        status = self._process.wait()
        try:
            self._loop.call_soon_threadsafe(self._loop.call_later, _LAST_WORDS_SECONDS, self._gone, status)
        except RuntimeError:
            logger.debug("the event loop ended before the engine's process")

    def _gone(self, status: int) -> None:
        self._read()
        if not self.exited.done():
            self.exited.set_result(status)
