"""ChildProcess: a process that this one starts, speaks with over an inherited socket pair, and ends.

The child ends when this end of the socket pair is closed, and so with this process, however it ends. This process learns of the
child's end from the same socket, once it has read all that the child has sent. Nothing is on disk, and no port is open.
Imports next to nothing, so that a command can start a child before it imports its own part.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import headrace
from headrace.errors import EngineError
from headrace.host.channel import MOST_BYTES, Channel

END_SECONDS = 3.0
"""Time that a child has to end by itself once its parent's end is closed; then it is killed."""
_FAULTS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS)
"""Signals by which a process ends because of what it did itself."""


class ChildProcess(Channel):
    """A child and the channel to it. Its module calls ``headrace.host.parent.run``."""

    def __init__(
        self,
        command: Sequence[str],
        purpose: str,
        *,
        environment: Mapping[str, str] | None = None,
        descriptors: Collection[int] = (),
        quiet: bool = False,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """
        Args:
            purpose: for an error: "the process that renders ...".
            environment: the child's; None: ``child_environment()``.
            descriptors: files that it inherits, under the same numbers.
            quiet: its standard output goes nowhere.

        Raises:
            EngineError: the system has no room for it: no descriptor or memory is left.
        """
        try:
            ours, theirs = socket.socketpair()
            with theirs, contextlib.ExitStack() as on_error:
                on_error.callback(ours.close)
                self.process: subprocess.Popen[bytes] = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL if quiet else None,
                    pass_fds=tuple(descriptors),
                    env=child_environment() if environment is None else environment,
                    start_new_session=True,
                )
                on_error.pop_all()
        except OSError as error:
            raise EngineError(f"{purpose} cannot be started: {error}") from error
        super().__init__(ours, most_bytes=most_bytes)
        self._owner = os.getpid()
        # The main thread lives as long as this process; another thread may end before.
        self.send(b"\1" if threading.current_thread() is threading.main_thread() else b"\0")

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def usable(self) -> bool:
        """False after its end, and in a process forked from the one that started it."""
        return self._owner == os.getpid() and self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        if self.process.returncode is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """Kills it, and the processes that it has forked."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def end(self, seconds: float = END_SECONDS) -> int:
        """Closes the channel and so ends the child, by force if it has not ended after ``seconds``. Returns its status."""
        super().close()
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.process.wait()


def python(module: str) -> tuple[str, ...]:
    """The command that runs a module of headrace's."""
    return (sys.executable, "-P", "-m", module)


def crashed(status: int) -> bool:
    """Whether a process with this exit status ended by its own fault. Other signals come from outside: SIGKILL from an operator
    or from a system that is short of memory."""
    return status >= 0 or -status in _FAULTS


def child_environment() -> dict[str, str]:
    """Ours, so that the child finds the same headrace; without the keys of clients, which the server alone needs."""
    home = str(Path(headrace.__file__).resolve().parent.parent)
    path = os.environ.get("PYTHONPATH")
    own = {name: value for name, value in os.environ.items() if name != "HEADRACE_API_KEY"}
    return own | {"PYTHONPATH": home if not path else os.pathsep.join((home, path))}
