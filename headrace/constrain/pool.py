"""CompilePool: threads that compile constraints, for one client after another."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from headrace.host.worker_threads import WorkerThreads

T = TypeVar("T")


class CompilePool:
    """Clients take turns: however much work one has queued, a thread does one piece of it before the next client's.

    The threads keep the priority of the process: one with a lower priority that holds the interpreter's lock while other
    programs use all cores would hold up the event loop or the engine's steps for as long.
    """

    def __init__(self, threads: int, stack_bytes: int = 0) -> None:
        """``stack_bytes``: as for ``WorkerThreads``."""
        self._threads = WorkerThreads(threads, "grammar", stack_bytes=stack_bytes)
        self._lock = threading.Lock()
        self._work: dict[Future[Any], Callable[[], Any]] = {}
        """Work that no thread has begun."""
        self._queues: OrderedDict[str, dict[Future[Any], None]] = OrderedDict()
        """Queued work by tenant, the one whose turn is next first; none is empty."""

    def start(self) -> None:
        """Starts the threads, which the first work does otherwise. Raises: as ``WorkerThreads.start``."""
        self._threads.start()

    def submit(self, tenant: str, work: Callable[[], T]) -> Future[T]:
        """Queues work for a tenant. Nothing cancels it."""
        future: Future[T] = Future()
        self._work[future] = work
        self.share(tenant, future)
        return future

    def share(self, tenant: str, future: Future[Any]) -> None:
        """Queues work of another tenant for this one too, unless it has begun: whose turn comes first has it done."""
        with self._lock:
            if future in self._work and future not in (queue := self._queues.setdefault(tenant, {})):
                queue[future] = None
                self._threads.submit(self._next)

    def close(self) -> None:
        self._threads.close(wait=False)

    def _next(self) -> None:
        """Does the oldest work of the tenant whose turn it is."""
        with self._lock:
            tenant, queue = self._queues.popitem(last=False)
            future = next(iter(queue))
            del queue[future]
            if queue:
                self._queues[tenant] = queue
            work = self._work.pop(future, None)
        if work is None:
            return  # Another tenant's turn came first.
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)


class CompilePools:
    """A CompilePool for quick work, and one with one thread for slow work, which so holds up no other."""

    def __init__(self, threads: int, stack_bytes: int = 0) -> None:
        """Starts a pool for quick and one for slow work; the parameters are those of ``CompilePool``."""
        self._quick, self._slow = CompilePool(threads, stack_bytes), CompilePool(1, stack_bytes)

    def start(self) -> None:
        self._quick.start()
        self._slow.start()

    def submit(self, tenant: str, work: Callable[[], T], *, slow: bool) -> Future[T]:
        return (self._slow if slow else self._quick).submit(tenant, work)

    def share(self, tenant: str, future: Future[Any]) -> None:
        self._quick.share(tenant, future)
        self._slow.share(tenant, future)

    def close(self) -> None:
        self._quick.close()
        self._slow.close()
