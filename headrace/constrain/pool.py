"""CompilePools: threads that compile constraints."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from headrace.host.turns import TenantThreads

T = TypeVar("T")


class CompilePools:
    """Threads for quick work, and one for slow work, which so holds up no other. Tenants take turns in both."""

    def __init__(self, threads: int, stack_bytes: int = 0) -> None:
        """``stack_bytes``: as for ``TenantThreads``."""
        self._quick = TenantThreads(threads, "grammar", stack_bytes=stack_bytes)
        self._slow = TenantThreads(1, "grammar", stack_bytes=stack_bytes)

    def start(self) -> None:
        self._quick.start()
        self._slow.start()

    def submit(self, tenant: str, work: Callable[[], T], *, slow: bool) -> Future[T]:
        return (self._slow if slow else self._quick).submit(tenant, work)

    def share(self, tenant: str, future: Future[Any]) -> None:
        self._quick.share(tenant, future)
        self._slow.share(tenant, future)

    def cancel(self, future: Future[Any]) -> None:
        self._quick.cancel(future)
        self._slow.cancel(future)

    def close(self) -> None:
        self._quick.close()
        self._slow.close()
