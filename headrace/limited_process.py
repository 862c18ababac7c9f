"""LimitedProcess: a process that answers one job after another, within limits of processor time and memory for each.

For work whose cost its input decides: chat templates, pictures, videos. In a thread, nothing can end one operation of the
interpreter or of a library; the kernel ends a process, with one timer and one rlimit, and its crash is not its owner's.

    class Upper: ...                                       # the owner's module
        process = LimitedProcess("package.upper_worker", ProcessLimits(seconds=1.0, memory=2**28))
        answer = process.call(b"text")                     # bytes, or an EndedProcess

    if __name__ == "__main__":                             # package/upper_worker.py
        serve(lambda job, limits: bytes(job).upper())
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from headrace.errors import EngineError

_STARTUP_SECONDS = 60.0
_WALL_FACTOR = 10.0
"""Seconds that a job may take for each second of processor time that it may use, on a machine that is busy."""
_LENGTH_BYTES = 8
"""A message is its length, then its bytes."""


@dataclasses.dataclass(frozen=True)
class ProcessLimits:
    """What one job may use."""

    seconds: float
    """Processor time."""
    memory: int
    """Bytes beside what the process has when it starts."""


@dataclasses.dataclass(frozen=True)
class EndedProcess:
    """A job that ended its process."""

    status: int | None

    @property
    def out_of_time(self) -> bool:
        return self.status == -signal.SIGPROF


class _Process:
    """It ends with its time limit, with its connection, and so with its owner."""

    def __init__(self, module: str, limits: ProcessLimits) -> None:
        self.connection, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", module, str(limits.seconds), str(limits.memory)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with theirs:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, start_new_session=True, env=environment
            )
        self.owner = os.getpid()
        self.connection.settimeout(_STARTUP_SECONDS + _WALL_FACTOR * limits.seconds)

    @property
    def usable(self) -> bool:
        """False in a process forked from its owner, and after its end."""
        return self.owner == os.getpid() and self.process.poll() is None

    def stop(self) -> int:
        """Ends the process; returns its status."""
        self.connection.close()
        if self.process.poll() is None:
            self.process.kill()
        return self.process.wait()


class LimitedProcess:
    """Does one job after another. The process starts with the first job, and again after a job that ended it.

    May be used from several threads.
    """

    def __init__(self, module: str, limits: ProcessLimits, purpose: str) -> None:
        """``module``: run by name, it calls ``serve``. ``purpose``: what the process does, for an error: "renders ..."."""
        self._module = module
        self._limits = limits
        self._purpose = purpose
        self._lock = threading.Lock()
        self._running: _Process | None = None
        self._end: Callable[[], int | None] = lambda: None
        """Ends the process: when it fails, when this object is collected, and at the interpreter's exit."""

    def call(self, job: bytes) -> bytearray | EndedProcess:
        """The answer to a job.

        Raises:
            EngineError: the process could not be started.
        """
        with self._lock:
            running = self._started()
            answer: bytearray | None = None
            status: int | None = 0
            try:
                with contextlib.suppress(OSError):
                    send(running.connection, job)
                    answer = receive(running.connection)
            finally:
                if answer is None:  # an interrupted job would leave its answer to the next one
                    status = self._end()
            return EndedProcess(status) if answer is None else answer

    def close(self) -> None:
        """Ends the process; another job starts it again."""
        with self._lock:
            self._end()

    def _started(self) -> _Process:
        if self._running is not None and not self._running.usable:
            self._end()
            self._running = None
        if self._running is None:
            try:
                self._running = _Process(self._module, self._limits)
            except OSError as error:
                raise EngineError(f"the process that {self._purpose} cannot be started: {error}") from error
            self._end = weakref.finalize(self, self._running.stop)
        return self._running


def serve(answer: Callable[[bytearray, ProcessLimits], bytes]) -> None:
    """Answers the jobs of this process's owner until it goes; then ends the process. The module's imports are done."""
    limits = ProcessLimits(float(sys.argv[1]), int(sys.argv[2]))
    connection = socket.socket(fileno=0)
    _limit_memory(limits.memory)
    while (job := receive(connection)) is not None:
        signal.setitimer(signal.ITIMER_PROF, limits.seconds)
        data = answer(job, limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        del job
        send(connection, data)
        del data
    os._exit(0)  # at once: its owner is gone, and nothing is to be written


def _limit_memory(size: int) -> None:
    """Bounds the address space to what the process has now and ``size`` more (Linux)."""
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + size
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(len(data).to_bytes(_LENGTH_BYTES, "little"))
    connection.sendall(data)


def receive(connection: socket.socket) -> bytearray | None:
    """None: the other end has closed the connection."""
    head = _read(connection, _LENGTH_BYTES)
    return None if head is None else _read(connection, int.from_bytes(head, "little"))


def _read(connection: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view, read = memoryview(data), 0
    while read < size:
        count = connection.recv_into(view[read:])
        if not count:
            return None
        read += count
    return data
