"""TemplateRenderer: renders chat templates in a process with limits.

A template is a program that comes with the model, over values that come with the request: either may make it loop for ever or
build a string of any size, already while Jinja folds its constants. Jinja's sandbox limits neither. In a thread, nothing can
end one operation of the interpreter (``10 ** (10 ** 9)``, ``"x" * 10 ** 12``), and counting steps in the generated code would
have to know the cost of each filter and method. The kernel limits both for a process, with one timer and one rlimit. The
process imports what its owner would import otherwise, beside it, and a job costs a fraction of a millisecond more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.errors import EngineError, RequestError
from headrace.text.template_messages import Rendered, TemplateJob, receive, send

_STARTUP_SECONDS = 60.0
_WALL_FACTOR = 10.0
"""Seconds that a job may take for each second of processor time that it may use, on a machine that is busy."""


@dataclasses.dataclass(frozen=True)
class TemplateLimits:
    """What rendering one chat template may use."""

    seconds: float = 2.0
    """Processor time."""
    memory: int = 2**29
    """Bytes; the prompt may have an eighth of them."""


class _Worker:
    """One process. It ends with its time limit, with its connection, and so with its owner."""

    def __init__(self, limits: TemplateLimits) -> None:
        self.connection, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "headrace.text.template_worker", str(limits.seconds), str(limits.memory)]
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


class TemplateRenderer:
    """Renders one job after another. The process starts with the first job, and again after a job that ended it.

    May be used from several threads.
    """

    def __init__(self, limits: TemplateLimits | None = None) -> None:
        self._limits = limits or TemplateLimits()
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._end: Callable[[], int | None] = lambda: None
        """Ends the worker: when it fails, when this object is collected, and at the interpreter's exit."""

    def render(self, job: TemplateJob) -> str:
        """The text of the conversation.

        Raises:
            RequestError: the template cannot render these messages, or not within the limits.
            EngineError: the process could not be started.
        """
        try:
            data = msgspec.msgpack.encode(job, enc_hook=_plain)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RequestError(f"the messages cannot be passed to the chat template: {error}", "messages") from error
        with self._lock:
            answer = self._answer(data)
        if answer.error is not None:
            raise RequestError(f"the chat template cannot render these messages: {answer.error}", "messages")
        return answer.text

    def _answer(self, data: bytes) -> Rendered:
        worker = self._running()
        answer: bytes | None = None
        status: int | None = 0
        try:
            with contextlib.suppress(OSError):
                send(worker.connection, data)
                answer = receive(worker.connection)
        finally:
            if answer is None:  # an interrupted job would leave its answer to the next one
                status = self._end()
        if answer is not None:
            return msgspec.msgpack.decode(answer, type=Rendered)
        if status == -signal.SIGPROF:
            return Rendered(error=f"it takes longer than {self._limits.seconds} seconds (max_template_seconds)")
        return Rendered(error=f"its process ended with status {status}")

    def _running(self) -> _Worker:
        if self._worker is not None and not self._worker.usable:
            self._end()
            self._worker = None
        if self._worker is None:
            try:
                self._worker = _Worker(self._limits)
            except OSError as error:
                raise EngineError(f"the process that renders chat templates cannot be started: {error}") from error
            self._end = weakref.finalize(self, self._worker.stop)
        return self._worker


def _plain(value: Any) -> str:
    """What templates see of a value that is no JSON, as in transformers."""
    return f"<{type(value).__name__}>"
