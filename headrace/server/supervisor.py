"""Keeps a server's process running: a parent that imports little starts it again when it crashes.

What ends the server's process ends neither the listening sockets, which the parent holds open, nor the command. New
connections wait until the next process takes them.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import logging
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, NoReturn

logger = logging.getLogger("headrace.server")

_MOST_DEATHS = 3
"""Deaths in a row, without a process that took requests in between, after which the parent gives up."""
_QUICK_SECONDS = 60.0
"""A process that lived for less makes the pause before the next one twice as long."""
_LONGEST_PAUSE = 8.0
_CHILDREN_SECONDS = 10.0
"""Time in which child processes of a dead server end by themselves."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_KEPT_BYTES = 8192


class KeptBytes:
    """Bytes that outlive the server's process: they are in memory that its parent shares with it.

    There are two places, so that a process that dies while it writes one leaves the other.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1 + 2 * _KEPT_BYTES)

    def read(self) -> bytes:
        """Returns what was written last; nothing: no bytes."""
        start = 1 + self._memory[0] * _KEPT_BYTES
        size = int.from_bytes(self._memory[start : start + 2], "little")
        return self._memory[start + 2 : start + 2 + size]

    def write(self, content: bytes) -> None:
        """Raises: ValueError: there is no room for so many."""
        stored = len(content).to_bytes(2, "little") + content
        if len(stored) > _KEPT_BYTES:
            raise ValueError(f"{len(content)} bytes are more than {_KEPT_BYTES - 2}")
        other = 1 - self._memory[0]
        start = 1 + other * _KEPT_BYTES
        self._memory[start : start + len(stored)] = stored
        self._memory[0] = other


class Supervised(NamedTuple):
    """The server's process, as it sees itself."""

    restarts: int
    """Processes that crashed before it."""
    ready: Callable[[], None]
    """Tells the parent that requests are taken."""
    kept: KeptBytes
    """Bytes that the processes before it have left."""


def supervised() -> Supervised:
    """Forks the server's process and returns in it. The process that calls this stays in here, and ends as the server does.

    A process that a signal ends is followed by another one, and so is one that fails once requests have been taken: its
    options have worked. An ordinary end is the command's: after SIGTERM, SIGINT, SIGHUP or SIGQUIT, which the parent passes
    on, and an error before the first request could be taken.

    Call this while the process has one thread. Where the system is not Linux, the caller is the server, without a parent.
    """
    kept = KeptBytes()
    if sys.platform != "linux":
        return Supervised(0, lambda: None, kept)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    stops: set[signal.Signals] = {signal.SIGTERM, signal.SIGINT}
    stops |= {number for number in (signal.SIGHUP, signal.SIGQUIT) if signal.getsignal(number) != signal.SIG_IGN}
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, {*stops, signal.SIGCHLD})
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the caller may ignore it, and then no end is reported
    deaths = quick = restarts = 0
    served = False
    while True:
        began, parent = time.monotonic(), os.getpid()
        told, tell = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(told)
            _become_server(parent, usual)
            return Supervised(restarts, functools.partial(_tell, tell), kept)
        os.close(tell)
        code, stopped = _outcome(pid, stops)
        was_ready = bool(select.select([told], [], [], 0)[0] and os.read(told, 1))
        os.close(told)
        served |= was_ready
        if code == 0 or stopped or (code > 0 and not served):
            _end(code)
        how = f"died by {signal.Signals(-code).name}" if code < 0 else f"failed with status {code}"
        deaths = 1 if was_ready else deaths + 1
        if deaths >= _MOST_DEATHS:
            logger.error("the server's process %s, %d times without taking requests: it is not started again", how, deaths)
            _end(code)
        quick = quick + 1 if time.monotonic() - began < _QUICK_SECONDS else 1
        pause = min(_LONGEST_PAUSE, 2.0 ** (quick - 1))
        logger.error("the server's process (%d) %s: it is started again in %g s", pid, how, pause)
        _reap_children()
        if (stop := signal.sigtimedwait(stops, pause)) is not None:
            _end(-stop.si_signo)
        restarts += 1


def _become_server(parent: int, mask: Iterable[int]) -> None:
    """Makes the forked process a server: a separate process group gets the terminal's signals once, through the parent."""
    os.setpgid(0, 0)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before it was watched
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if sys.stderr is not None:
        faulthandler.enable(sys.stderr.fileno())


def _tell(descriptor: int) -> None:
    os.write(descriptor, b"1")
    os.close(descriptor)


def _outcome(pid: int, stops: set[signal.Signals]) -> tuple[int, bool]:
    """Waits for the end of a process, to which it passes signals on: its status, negative for a signal, and whether it was
    told to end."""
    stopped = False
    while True:
        number = signal.sigwait({*stops, signal.SIGCHLD})
        if number != signal.SIGCHLD:
            stopped = True
            os.kill(pid, number)
        elif (code := _reaped(pid)) is not None:
            return code, stopped


def _reaped(pid: int | None = None) -> int | None:
    """Reaps the children that have ended. The status of ``pid`` if it is one of them.

    Raises:
        ChildProcessError: there was none left.
    """
    code = None
    while True:
        try:
            found, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            if code is None:
                raise
            return code
        if not found:
            return code
        if found == pid:
            code = os.waitstatus_to_exitcode(status)


def _reap_children() -> None:
    """Waits until the child processes of a dead server have ended, and kills those that do not end: the next engine needs
    their memory.
    """
    deadline = time.monotonic() + _CHILDREN_SECONDS
    while True:
        try:
            _reaped()
        except ChildProcessError:
            return
        if time.monotonic() > deadline:
            for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
        time.sleep(0.02)


def _end(code: int) -> NoReturn:
    """Ends this process as its child has ended."""
    if code < 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code if code >= 0 else 128 - code)  # the first process of a container survives its own signals


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
