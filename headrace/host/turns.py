"""TenantThreads: threads that work for one tenant after another."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from headrace.host.worker_threads import WorkerThreads, done

T = TypeVar("T")


class TenantThreads:
    """Tenants take turns: however much work one has queued, a thread does one piece of it before the next tenant's.

    The threads keep the priority of the process: one with a lower priority that holds the interpreter's lock while other
    programs use all cores would hold up the event loop or the engine's steps for as long.
    """

    def __init__(self, count: int, name: str, *, initializer: Callable[[], object] | None = None, stack_bytes: int = 0) -> None:
        """The parameters are those of ``WorkerThreads``."""
        self._threads = WorkerThreads(count, name, initializer=initializer, stack_bytes=stack_bytes)
        self._lock = threading.Lock()
        self._work: dict[Future[Any], Callable[[], Any]] = {}
        """Work that no thread has begun."""
        self._queues: OrderedDict[str, dict[Future[Any], None]] = OrderedDict()
        """Queued work by tenant, the one whose turn is next first; none is empty."""

    def start(self) -> None:
        """Starts the threads, which the first work does otherwise. Raises: as ``WorkerThreads.start``."""
        self._threads.start()

    def submit(self, tenant: str, work: Callable[[], T]) -> Future[T]:
        """Queues work for a tenant. ``cancel`` takes it out again; cancelling the future would leave it in the queue."""
        future: Future[T] = Future()
        self._work[future] = work
        self.share(tenant, future)
        return future

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """Submits work and waits for its result. Cancelled before its turn, the work is never done."""
        future = self.submit(tenant, work)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        finally:
            self.cancel(future)
            del future  # an error, which it has, has this frame in its traceback

    def share(self, tenant: str, future: Future[Any]) -> None:
        """Queues work of another tenant for this one too, unless it has begun: whose turn comes first has it done."""
        with self._lock:
            if future in self._work and future not in (queue := self._queues.setdefault(tenant, {})):
                queue[future] = None
                self._threads.submit(self._next)

    def cancel(self, future: Future[Any]) -> None:
        """Takes work out of the queues, with what it holds, unless a thread has begun it."""
        with self._lock:
            if self._work.pop(future, None) is None:
                return
            for tenant in [tenant for tenant, queue in self._queues.items() if future in queue]:
                del self._queues[tenant][future]
                if not self._queues[tenant]:
                    del self._queues[tenant]
        future.cancel()

    def close(self, *, wait: bool = False) -> None:
        """``wait``: until work that has begun is done."""
        self._threads.close(wait=wait)

    def _next(self) -> None:
        """Does the oldest work of the tenant whose turn it is."""
        with self._lock:
            if not self._queues:
                return  # It was cancelled.
            tenant, queue = self._queues.popitem(last=False)
            future = next(iter(queue))
            del queue[future]
            if queue:
                self._queues[tenant] = queue
            work = self._work.pop(future, None)
        if work is None:
            return  # Another tenant's turn came first.
        try:
            future.set_result(done(work))
        except BaseException as error:
            future.set_exception(error)
        finally:
            del future, work  # an error, which the future has, has this frame in its traceback
