"""WorkerThreads: a fixed number of threads for work that must not hold up an event loop or a step."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from headrace.errors import EngineError

P = ParamSpec("P")
T = TypeVar("T")

_NAME_BYTES = 15
"""Maximum length of a thread's name in Linux."""


def use_no_tokenizer_threads() -> None:
    """Keeps the tokenizers library from starting a thread per core, for processes of headrace's own, unless the environment
    says otherwise. Texts come one by one, and the library would divide only batches."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def switch_threads_often() -> None:
    """Lets a thread that waits for the interpreter's lock have it after half a millisecond, for processes of headrace's own.

    Python's 5 ms would be added to every wait: of an event loop or a step for a thread that compiles a grammar, each time that
    it sends to a socket or launches a kernel, and of a thread that renders a template for a busy event loop.
    """
    sys.setswitchinterval(5e-4)


def done(work: Callable[[], T]) -> T:
    """Returns the result of ``work``. An asyncio future takes no StopIteration: who waits for it would wait for ever."""
    try:
        return work()
    except StopIteration as error:
        raise RuntimeError("a generator's end was not expected") from error


class WorkerThreads:
    """A pool whose threads start together: with ``start`` or the first job. Later jobs start none.

    A process that has started its pools has as many threads from then on, whatever its clients send, and needs no new one
    when the system has none left. May be used from several threads.
    """

    def __init__(self, count: int, name: str, *, initializer: Callable[[], object] | None = None, stack_bytes: int = 0) -> None:
        """``initializer``: called by each thread before its first job. ``stack_bytes``: of each thread; 0: the system's."""
        self._count = count
        self._stack_bytes = stack_bytes
        self._name = name
        self._initializer = initializer
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def start(self) -> None:
        """Raises: EngineError: the system gives this process no more threads; the next call tries again."""
        with self._lock:
            if self._pool is not None:
                return
            pool = ThreadPoolExecutor(self._count, self._name, self._prepare)
            # No thread is idle until all of them are there.
            together = threading.Barrier(self._count)
            others = threading.stack_size(self._stack_bytes)
            try:
                for _ in range(self._count):
                    pool.submit(together.wait)
            except RuntimeError as error:
                together.abort()
                pool.shutdown(wait=False, cancel_futures=True)
                raise EngineError(f"the {self._count} threads of {self._name} cannot be started: {error}") from error
            finally:
                threading.stack_size(others)
            self._pool = pool

    def submit(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Does work in one of the threads, after all work submitted before it has begun. Raises: as ``start``."""
        self.start()
        if self._pool is None:
            raise EngineError(f"the threads of {self._name} were not started")
        return self._pool.submit(done, partial(work, *args, **kwargs))

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Submits work and waits for its result. Work that is cancelled before its turn is never done."""
        return await asyncio.wrap_future(self.submit(work, *args, **kwargs))

    def close(self, *, wait: bool) -> None:
        """Cancels work that has not begun. Another job starts the threads again."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=wait, cancel_futures=True)

    def _prepare(self) -> None:
        """Names the thread for ``top -H``."""
        if sys.platform == "linux":
            with open(f"/proc/self/task/{threading.get_native_id()}/comm", "wb") as name:
                name.write(self._name.encode()[:_NAME_BYTES])
        if self._initializer is not None:
            self._initializer()
