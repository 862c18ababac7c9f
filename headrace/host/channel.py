"""Channel: one end of a socket pair over which two processes send messages.

A message is its length, four bytes (little-endian), then its bytes, which are msgpack as a rule. Nothing is read ahead of a
message, so that a process and its fork may read in turns.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from headrace.errors import EngineError

MOST_BYTES = 2**32 - 1
"""Largest message."""
_LENGTH_BYTES = 4
_PARTS = 16
"""Lengths and messages that are written at once."""

Data = bytes | bytearray | memoryview


class MessageTooLongError(EngineError):
    """A message is longer than its sender or receiver allows. Nothing of it was sent, or it was not read."""


class Channel:
    """``send`` never waits: what the other end has no room for is kept, and written by ``flush``.

    ``flush`` is called by ``receive`` and ``wait``, and by whoever ``on_unsent`` told. One thread reads; any may send.
    """

    def __init__(
        self, connection: socket.socket, *, most_bytes: int = MOST_BYTES, on_unsent: Callable[[], object] = lambda: None
    ) -> None:
        """
        Args:
            most_bytes: of a message, in both directions.
            on_unsent: called when a message could not be written at once, with nothing unsent before it.
        """
        self.connection = connection
        self._most_bytes = most_bytes
        self.on_unsent = on_unsent
        self._lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._part = bytearray(_LENGTH_BYTES)
        """The length of the next message, or its bytes, of which ``_filled`` were read."""
        self._filled = 0
        self._in_message = False

    def fileno(self) -> int:
        """-1 once it is closed."""
        return self.connection.fileno()

    @property
    def unsent(self) -> bool:
        """Whether ``flush`` has something to write."""
        return bool(self._unsent)

    def send(self, data: Data) -> None:
        """Sends a message. It is lost if the other end is closed, which whoever receives learns.

        ``data`` is not copied, and must not change before it is sent.

        Raises:
            MessageTooLongError: nothing was sent.
        """
        view = memoryview(data).cast("B")
        if len(view) > self._most_bytes:
            raise MessageTooLongError(f"a message of {len(view)} bytes is longer than {self._most_bytes}")
        with self._lock:
            idle = not self._unsent
            self._unsent.append(memoryview(len(view).to_bytes(_LENGTH_BYTES, "little")))
            self._unsent.append(view)
            if idle:
                self._write()
            blocked = idle and bool(self._unsent)
        if blocked:
            self.on_unsent()

    def flush(self) -> bool:
        """Writes what there is room for. Returns whether all is written."""
        with self._lock:
            self._write()
            return not self._unsent

    def _write(self) -> None:
        while self._unsent:
            try:
                sent = self.connection.sendmsg(itertools.islice(self._unsent, _PARTS), [], socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:  # The other end is closed, or this one.
                self._unsent.clear()
                return
            while self._unsent and sent >= len(self._unsent[0]):
                sent -= len(self._unsent.popleft())
            if sent:
                self._unsent[0] = self._unsent[0][sent:]

    def poll(self, admit: Callable[[int], object] = lambda size: None) -> bytearray | None:
        """The next message if all of it is there.

        Args:
            admit: called with the message's size before there is room made for it. The channel cannot be used further if it
                raises.

        Raises:
            EOFError: the other end is closed, perhaps inside a message.
            MessageTooLongError: the channel cannot be used further.
        """
        while True:
            while self._filled < len(self._part):
                try:
                    count = self.connection.recv_into(memoryview(self._part)[self._filled :], 0, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return None
                except OSError:
                    count = 0
                if not count:
                    raise EOFError("the other process has closed its end")
                self._filled += count
            part, self._filled = self._part, 0
            if self._in_message:
                self._part, self._in_message = bytearray(_LENGTH_BYTES), False
                return part
            size = int.from_bytes(part, "little")
            if size > self._most_bytes:
                raise MessageTooLongError(f"a message of {size} bytes is longer than {self._most_bytes}")
            admit(size)
            self._part, self._in_message = bytearray(size), True

    def receive(self, timeout: float | None = None, admit: Callable[[int], object] = lambda size: None) -> bytearray:
        """Waits for the next message, and writes meanwhile what is unsent.

        Raises:
            TimeoutError: it has not come within ``timeout`` seconds; None: there is no limit. And as ``poll``.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (message := self.poll(admit)) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"no message came for {timeout} s")
            self.wait(left)
        return message

    def wait(self, timeout: float | None = None, others: Sequence[int] = ()) -> None:
        """Waits until something can be read here or from another file descriptor, or for ``timeout`` seconds."""
        wait((self,), timeout, others)

    def drain(self) -> None:
        """Waits until all is written, or the other end is closed."""
        while not self.flush():
            select.select([], [self.connection], [])

    def close(self) -> None:
        """Closes the connection; unsent messages are lost."""
        with self._lock:
            self._unsent.clear()
            with contextlib.suppress(OSError):
                self.connection.close()


def wait(channels: Sequence[Channel], timeout: float | None = None, others: Sequence[int] = ()) -> list[Channel]:
    """Waits until a channel or another file descriptor can be read, or a channel's other end is closed; at most for
    ``timeout`` seconds. What channels have unsent is written meanwhile.

    Returns:
        The channels that have something to read; their messages may be incomplete.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        poll = select.poll()
        by_descriptor = {channel.fileno(): channel for channel in channels}
        for descriptor, channel in by_descriptor.items():
            poll.register(descriptor, select.POLLIN | (select.POLLOUT if channel.unsent else 0))
        for descriptor in others:
            poll.register(descriptor, select.POLLIN)
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        events = poll.poll(None if left is None else left * 1e3)
        readable = False
        ready = []
        for descriptor, event in events:
            one = by_descriptor.get(descriptor)
            if one is not None and event & select.POLLOUT:
                one.flush()
            if event & ~select.POLLOUT:
                readable = True
                if one is not None:
                    ready.append(one)
        if readable or not events:
            return ready
