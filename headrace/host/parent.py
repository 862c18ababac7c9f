"""The child's side of a child process: it finds the channel to its parent, and ends with it.

    def main(parent: Parent) -> int:                       # the exit status
        while True:
            parent.send(answer_to(parent.receive()))       # EOFError ends the process in order

    if __name__ == "__main__":
        run(main)

``ChildProcess`` is the other end. This is the one place that ends such a process: after ``main``, and once the parent has
closed its end, whatever the process is doing.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from headrace.host.channel import Channel

GRACE_SECONDS = 0.5
"""Time that the main thread has to end by itself once the parent has closed its end."""
_PR_SET_PDEATHSIG = 1


class Parent(Channel):
    """The channel to the process that started this one. A thread writes what ``send`` could not, and watches the other end."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection, on_unsent=self._wake)
        self._woken, self._waking = os.pipe()
        threading.Thread(target=self._watch, name="parent-watch", daemon=True).start()

    def _wake(self) -> None:
        os.write(self._waking, b"1")

    def _watch(self) -> None:
        while True:
            poll = select.poll()
            poll.register(self._woken, select.POLLIN)
            poll.register(self.fileno(), select.POLLOUT if self.unsent else 0)  # Hang-ups are reported in any case.
            for descriptor, event in poll.poll():
                if descriptor == self._woken:
                    os.read(self._woken, 1)
                elif event & (select.POLLHUP | select.POLLERR):
                    time.sleep(GRACE_SECONDS)
                    end(1)
                else:
                    self.flush()


def run(main: Callable[[Parent], int]) -> NoReturn:
    """Runs ``main`` in a process that a ``ChildProcess`` has started; then ends the process.

    Signals of a terminal, or to all processes of a service, do not end it: the parent decides when it ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        connection = socket.socket(fileno=os.dup(0))
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        parent = Parent(connection)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):  # Standard error may be a file on a full disk.
            print(f"a process of headrace has no room to start: {error}", file=sys.stderr, flush=True)
        end(os.EX_TEMPFAIL)
    status = 1
    try:
        if parent.receive() == b"\1":
            die_with_thread_of_parent()
        status = main(parent)
        parent.drain()
    except EOFError:
        status = 1
    except BaseException:
        traceback.print_exc()
    end(status)


def die_with_thread_of_parent() -> None:
    """Lets the system kill this process when the thread that started it ends, also while it is stopped (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end(status: int) -> NoReturn:
    """Ends this process at once: threads of libraries must not hold it up."""
    with contextlib.suppress(Exception):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
