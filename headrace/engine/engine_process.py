"""EngineProcess: one run of the engine's process, seen from its client."""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import zmq

from headrace.engine.messages import FromEngine, Shutdown, ToEngine, decode_from_engine, encode
from headrace.engine.process import SOCKET_FILE, STACK_SIGNAL, STACKS_FILE, STACKS_SIGNAL
from headrace.engine.spawn import Spawned

logger = logging.getLogger("headrace.engine")

_LAST_WORDS_SECONDS = 0.1
"""How long after its process's end an engine's messages may still arrive."""


class EngineProcess:
    """A started process and the socket to it. Lives in the event loop that made it; ``close`` frees everything.

    ``exited`` is done with the exit status once the process is gone and its last messages were delivered.
    """

    def __init__(self, spawned: Spawned, on_message: Callable[[FromEngine], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self._folder = spawned.folder
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        # The side that connects may send before the other one is there.
        self._socket.connect(f"ipc://{self._folder / SOCKET_FILE}")
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._read)
        self._process = spawned.process
        threading.Thread(target=self._wait, name="engine-exit", daemon=True).start()

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
        return self._stacks.read_text(errors="replace") if self._stacks.exists() else ""

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
        self.kill()
        if not self._socket.closed:
            self._loop.remove_reader(self._descriptor)
            self._socket.close(linger=0)
            self._context.term()
        if self._process.stdin is not None:
            self._process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)

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
