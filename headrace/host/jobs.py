"""JobProcesses: child processes that answer one job after another, within limits of processor time and memory for each.

For work whose cost its input decides: chat templates, constraints, pictures, videos. In a thread, nothing can end one
operation of the interpreter or of a library; the kernel ends a process, with one timer and one rlimit, and its crash is not
its owner's. A process imports and prepares once; a fork of it does the jobs, and another takes its place when a job ends it.

A process gets none of its owner's secrets from the environment. On Linux it can open no socket, start no program, and reach
into no other process (``sandbox.isolate``).

    processes = JobProcesses("package.upper_worker", Answer, ProcessLimits(seconds=1.0, memory=2**28), "writes capitals")
    answer = processes.call(job)                           # the owner's module; an Answer or an EndedProcess

    def main(parent: Parent) -> int:                       # package/upper_worker.py
        answer_jobs(parent, read_limits(parent), upper)

    if __name__ == "__main__":
        run(main)
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import signal
import subprocess
import threading
import weakref
from collections.abc import Callable
from queue import LifoQueue
from typing import Any, Generic, NoReturn, TypeVar

import msgspec

from headrace.host.channel import Channel, Data
from headrace.host.child import END_SECONDS, ChildProcess, crashed, python
from headrace.host.parent import Parent, die_with_thread_of_parent, end
from headrace.host.sandbox import isolate, isolated_environment, limit_memory

_STARTUP_SECONDS = 60.0
_WALL_FACTOR = 10.0
"""Seconds that a job may take for each second of processor time that it may use, on a machine that is busy."""

Answer = TypeVar("Answer")


class ProcessLimits(msgspec.Struct, frozen=True):
    """Limits of one job."""

    seconds: float
    """Processor time."""
    memory: int
    """Bytes beside what the process has when it starts."""


@dataclasses.dataclass(frozen=True)
class EndedProcess:
    """A job that ended its process."""

    status: int
    """Exit status in the form of ``subprocess.Popen.returncode``."""

    @property
    def out_of_time(self) -> bool:
        return self.status == -signal.SIGPROF


class JobProcesses(Generic[Answer]):
    """Does several jobs at once, each in one of ``count`` processes, which start as jobs need them. May be used from several
    threads."""

    def __init__(
        self,
        module: str,
        answer: type[Answer],
        limits: ProcessLimits,
        purpose: str,
        *,
        count: int = 1,
        setup: Callable[[], bytes] | None = None,
    ) -> None:
        """
        Args:
            module: its ``main`` calls ``answer_jobs``.
            answer: the struct that a process answers with.
            purpose: what the processes do, for an error: "renders ...".
            setup: makes the message that a process receives after its limits, before the first job.
        """
        # A fork that a job ended is reported by its status, a number.
        decode = msgspec.msgpack.Decoder(answer | int).decode
        self._count = count
        # The last one used is the next, so that no more of them start than jobs are done at once.
        self._idle: LifoQueue[_JobProcess] = LifoQueue()
        for _ in range(count):
            self._idle.put(_JobProcess(module, decode, limits, purpose, setup))

    def call(self, job: Data, admit: Callable[[int], object] = lambda size: None) -> Answer | EndedProcess:
        """The answer to a job, once a process is idle.

        Args:
            admit: called with the answer's size before there is room made for it. What it raises ends the process.

        Raises:
            EngineError: the process could not be started. And whatever ``setup`` raises.
        """
        process = self._idle.get()
        try:
            return process.call(job, admit)  # type: ignore[no-any-return]
        finally:
            self._idle.put(process)

    def close(self) -> None:
        """Ends the processes, once their jobs are done. Another job starts one again."""
        processes = [self._idle.get() for _ in range(self._count)]
        for process in processes:
            process.end()
            self._idle.put(process)


class _JobProcess:
    """One of them, which starts with its first job."""

    def __init__(
        self, module: str, decode: Callable[[Data], Any], limits: ProcessLimits, purpose: str, setup: Callable[[], bytes] | None
    ) -> None:
        self._module = module
        self._decode = decode
        self._limits = limits
        self._purpose = purpose
        self._setup = setup
        self._lock = threading.Lock()
        self._child: ChildProcess | None = None
        self.end: Callable[[], int | None] = lambda: None
        """Ends the process: when it fails, when this object is collected, and at the interpreter's exit."""

    def call(self, job: Data, admit: Callable[[int], object]) -> Any:
        with self._lock:
            child = self._started()
            answer: Any = None
            status: int | None = 0
            try:
                child.send(job)
                answer = self._decode(child.receive(_STARTUP_SECONDS + _WALL_FACTOR * self._limits.seconds, admit))
            except EOFError:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(END_SECONDS)  # Its status is there a little later.
            except TimeoutError:
                pass
            finally:
                if answer is None:  # an interrupted job would leave its answer to the next one
                    status = self.end()
            if answer is None:
                return EndedProcess(0 if status is None else status)
            return EndedProcess(answer) if isinstance(answer, int) else answer

    def _started(self) -> ChildProcess:
        if self._child is not None and not self._child.usable:
            self.end()
            self._child = None
        if self._child is None:
            setup = None if self._setup is None else self._setup()
            purpose, environment = f"the process that {self._purpose}", isolated_environment()
            self._child = child = ChildProcess(python(self._module), purpose, environment=environment, quiet=True)
            self.end = weakref.finalize(self, child.end, 0.0)
            child.send(msgspec.msgpack.encode(self._limits))
            if setup is not None:
                child.send(setup)
        return self._child


def read_limits(parent: Parent) -> ProcessLimits:
    """The first message of a process that answers jobs."""
    return msgspec.msgpack.decode(parent.receive(), type=ProcessLimits)


def answer_jobs(parent: Parent, limits: ProcessLimits, answer: Callable[[bytearray], msgspec.Struct]) -> NoReturn:
    """Answers jobs until the parent closes its end: EOFError. The module's imports are done."""
    isolate()
    working = mmap.mmap(-1, 1)
    """Whether the fork is between the reading of a job and the writing of its answer. Shared with the fork."""
    while True:
        working[0] = 0
        if not (fork := os.fork()):
            die_with_thread_of_parent()
            end(_answer_jobs(Channel(parent.connection), answer, limits, working))
        status = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
        # The parent has gone, or the fork has failed or was killed, perhaps with a part of its answer written.
        if status >= 0 or not working[0] or not (status == -signal.SIGPROF or crashed(status)):
            end(status if status >= 0 else 128 - status)
        parent.send(msgspec.msgpack.encode(status))


def _answer_jobs(
    parent: Channel, answer: Callable[[bytearray], msgspec.Struct], limits: ProcessLimits, working: mmap.mmap
) -> int:
    """Returns the exit status once the parent has closed its end."""
    limit_memory(limits.memory)
    while True:
        try:
            job = parent.receive()
        except EOFError:
            return 0
        working[0] = 1
        signal.setitimer(signal.ITIMER_PROF, limits.seconds)
        data = msgspec.msgpack.encode(answer(job))
        signal.setitimer(signal.ITIMER_PROF, 0)
        working[0] = 0
        del job
        parent.send(data)
        parent.drain()
        del data
