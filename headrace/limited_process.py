"""LimitedProcess: a process that answers one job after another, within limits of processor time and memory for each.

For work whose cost its input decides: chat templates, constraints, pictures, videos. In a thread, nothing can end one
operation of the interpreter or of a library; the kernel ends a process, with one timer and one rlimit, and its crash is not
its owner's. The process imports and prepares once; a fork of it does the jobs, and another takes its place when a job ends it.

The process gets none of its owner's secrets from the environment. On Linux it can open no socket, start no program, and reach
into no other process (``_isolate``).

    class Upper: ...                                       # the owner's module
        process = LimitedProcess("package.upper_worker", ProcessLimits(seconds=1.0, memory=2**28), "writes capitals")
        answer = process.call(b"text")                     # bytes, or an EndedProcess

    if __name__ == "__main__":                             # package/upper_worker.py
        serve(lambda job, limits: bytes(job).upper())
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import mmap
import os
import platform
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from queue import LifoQueue
from typing import NoReturn

from headrace.errors import EngineError

_STARTUP_SECONDS = 60.0
_WALL_FACTOR = 10.0
"""Seconds that a job may take for each second of processor time that it may use, on a machine that is busy."""
_LENGTH_BYTES = 8
"""A message is its length, then its bytes. A negative number alone is the status of a fork that its job has ended."""
_LIBRARIES = ("LD_LIBRARY_PATH", "MALLOC_ARENA_MAX", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_ENVIRONMENT = frozenset(("PATH", "PYTHONHOME", "HOME", "TMPDIR", "TZ", "LANG", "LC_ALL", "LC_CTYPE", *_LIBRARIES))
"""Variables that the process gets of its owner's: keys and tokens are among the others."""


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
    """As ``subprocess.Popen.returncode``."""

    @property
    def out_of_time(self) -> bool:
        return self.status == -signal.SIGPROF


class _Process:
    """It ends with its time limit, with its connection, and so with its owner."""

    def __init__(self, module: str, limits: ProcessLimits, setup: bytes | None) -> None:
        self.connection, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", module, str(limits.seconds), str(limits.memory)]
        environment = {name: value for name, value in os.environ.items() if name in _ENVIRONMENT}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        with theirs:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, start_new_session=True, env=environment
            )
        self.owner = os.getpid()
        self.connection.settimeout(_STARTUP_SECONDS + _WALL_FACTOR * limits.seconds)
        if setup is not None:
            with contextlib.suppress(OSError):  # It has ended, which its first job finds.
                send(self.connection, setup)

    @property
    def usable(self) -> bool:
        """False in a process forked from its owner, and after its end."""
        return self.owner == os.getpid() and self.process.poll() is None

    def stop(self) -> int:
        """Ends the process; returns its status."""
        self.connection.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # with the fork that does its jobs
        return self.process.wait()


class LimitedProcess:
    """Does one job after another. The process starts with the first job. May be used from several threads."""

    def __init__(self, module: str, limits: ProcessLimits, purpose: str, setup: Callable[[], bytes] | None = None) -> None:
        """
        Args:
            module: run by name, it calls ``serve``.
            purpose: what the process does, for an error: "renders ...".
            setup: makes what the process reads by ``read_setup`` before it calls ``serve``.
        """
        self._module = module
        self._setup = setup
        self._limits = limits
        self._purpose = purpose
        self._lock = threading.Lock()
        self._running: _Process | None = None
        self._end: Callable[[], int | None] = lambda: None
        """Ends the process: when it fails, when this object is collected, and at the interpreter's exit."""

    def call(self, job: bytes, admit: Callable[[int], object] = lambda size: None) -> bytearray | EndedProcess:
        """The answer to a job.

        Args:
            admit: called with the answer's size before there is room made for it. What it raises ends the process.

        Raises:
            EngineError: the process could not be started. And whatever ``setup`` raises.
        """
        with self._lock:
            running = self._started()
            answer: bytearray | EndedProcess | None = None
            status: int | None = 0
            try:
                with contextlib.suppress(OSError):
                    send(running.connection, job)
                    answer = receive(running.connection, admit)
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
            setup = None if self._setup is None else self._setup()
            try:
                self._running = _Process(self._module, self._limits, setup)
            except OSError as error:
                raise EngineError(f"the process that {self._purpose} cannot be started: {error}") from error
            self._end = weakref.finalize(self, self._running.stop)
        return self._running


class LimitedProcesses:
    """Does several jobs at once, each in one of so many processes. May be used from several threads."""

    def __init__(
        self, count: int, module: str, limits: ProcessLimits, purpose: str, setup: Callable[[], bytes] | None = None
    ) -> None:
        """As for ``LimitedProcess``."""
        self._count = count
        # The last one used is the next, so that no more of them start than jobs are done at once.
        self._idle: LifoQueue[LimitedProcess] = LifoQueue()
        for _ in range(count):
            self._idle.put(LimitedProcess(module, limits, purpose, setup))

    def call(self, job: bytes, admit: Callable[[int], object] = lambda size: None) -> bytearray | EndedProcess:
        """As ``LimitedProcess.call``, once a process is idle."""
        process = self._idle.get()
        try:
            return process.call(job, admit)
        finally:
            self._idle.put(process)

    def close(self) -> None:
        """Ends the processes, once their jobs are done."""
        processes = [self._idle.get() for _ in range(self._count)]
        for process in processes:
            process.close()
            self._idle.put(process)


def read_setup() -> bytearray:
    """What the owner of this process has for it before the first job."""
    with socket.socket(fileno=os.dup(0)) as connection:
        setup = receive(connection)
    if not isinstance(setup, bytearray):
        os._exit(0)  # Its owner has gone.
    return setup


def serve(answer: Callable[[bytearray, ProcessLimits], bytes]) -> NoReturn:
    """Answers the jobs of this process's owner until it goes; then ends the process. The module's imports are done."""
    limits = ProcessLimits(float(sys.argv[1]), int(sys.argv[2]))
    connection = socket.socket(fileno=0)
    _isolate()
    working = mmap.mmap(-1, 1)
    """Whether the fork is between the reading of a job and the writing of its answer. Shared with the fork."""
    while True:
        working[0] = 0
        if not (fork := os.fork()):
            _answer_jobs(connection, answer, limits, working)
        status = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
        if status >= 0 or not working[0]:
            os._exit(status if status >= 0 else 128 - status)  # Its owner has gone, or it has failed.
        connection.sendall(status.to_bytes(_LENGTH_BYTES, "little", signed=True))


def _answer_jobs(
    connection: socket.socket, answer: Callable[[bytearray, ProcessLimits], bytes], limits: ProcessLimits, working: mmap.mmap
) -> NoReturn:
    _limit_memory(limits.memory)
    while isinstance(job := receive(connection), bytearray):
        working[0] = 1
        signal.setitimer(signal.ITIMER_PROF, limits.seconds)
        data = answer(job, limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        working[0] = 0
        del job
        send(connection, data)
        del data
    os._exit(0)  # at once: nothing is to be written


_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _ALL_THREADS = 1, 1
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
"""Instructions of seccomp's filters: load a word, jump if the word is k or at least k, return k."""
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_OTHER_ABI = 0x40000000
"""System calls from this number on are those of x32."""
_CALLS: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "x86_64": (0xC000003E, 317, (41, 59, 101, 310, 311, 322, 425, 438)),
    "aarch64": (0xC00000B7, 277, (198, 221, 117, 270, 271, 281, 425, 438)),
}
"""Machine -> its number in filters, seccomp, and the refused calls: socket, execve, ptrace, process_vm_readv,
process_vm_writev, execveat, io_uring_setup, pidfd_getfd."""


def _isolate() -> None:
    """Takes the network, programs and other processes from all threads of this process, for good; needs no privilege.

    Files stay within reach: the filter sees no paths. Does nothing where there is no such filter.
    """
    if sys.platform != "linux" or platform.machine() not in _CALLS:
        return
    machine, seccomp, refused = _CALLS[platform.machine()]
    end = len(refused) + 4  # the place of _ALLOW, which _REFUSE follows
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 0, end - 1, machine), (_LOAD, 0, 0, 0), (_AT_LEAST, end - 3, 0, _OTHER_ABI)]
    program += [(_EQUAL, end - place, 0, call) for place, call in enumerate(refused, len(program))]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *instruction) for instruction in program))
    filter_ = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.syscall(seccomp, _SET_MODE_FILTER, _ALL_THREADS, filter_):
        why = os.strerror(ctypes.get_errno())
        sys.stderr.write(f"headrace: a process that reads clients' data keeps the network: seccomp: {why}\n")


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


def receive(connection: socket.socket, admit: Callable[[int], object] = lambda size: None) -> bytearray | EndedProcess | None:
    """None: the other end has closed the connection. ``admit``: as in ``LimitedProcess.call``."""
    head = _read(connection, _LENGTH_BYTES)
    if head is None:
        return None
    size = int.from_bytes(head, "little", signed=True)
    if size < 0:
        return EndedProcess(size)
    admit(size)
    return _read(connection, size)


def _read(connection: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view, read = memoryview(data), 0
    while read < size:
        count = connection.recv_into(view[read:])
        if not count:
            return None
        read += count
    return data
