"""BoundedCache: values by key, of which those that were not used for longest are dropped, tenant by tenant."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


@dataclasses.dataclass
class _Entry(Generic[V]):
    value: V
    nbytes: int
    tenants: set[str] = dataclasses.field(default_factory=set)
    """Tenants that keep it."""


@dataclasses.dataclass
class _Account(Generic[K]):
    """The entries that one tenant keeps."""

    keys: OrderedDict[K, None] = dataclasses.field(default_factory=OrderedDict)
    nbytes: int = 0


class BoundedCache(Generic[K, V]):
    """Holds a limited number of entries and bytes. Safe to use from several threads.

    An entry is kept by each tenant that has used it, and dropped when none keeps it. Where there is no more room, the tenant
    that keeps the most gives up the entry that it did not use for longest: one that keeps no more than its equal part loses
    nothing, whatever others store.
    """

    def __init__(
        self, max_entries: float = float("inf"), max_bytes: float = float("inf"), size: Callable[[K, V], int] | None = None
    ) -> None:
        """``size``: bytes of an entry; None: ``max_bytes`` is not used."""
        self._max_entries, self._max_bytes, self._size = max_entries, max_bytes, size or (lambda key, value: 0)
        self._entries: OrderedDict[K, _Entry[V]] = OrderedDict()
        self._accounts: OrderedDict[str, _Account[K]] = OrderedDict()
        """Accounts by tenant, those first that were not used for longest; none is empty."""
        self._nbytes = 0
        self._lock = threading.Lock()

    def get(self, key: K, tenant: str = "") -> V | None:
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                return None
            self._use(key, found, tenant)
            return found.value

    def items(self) -> list[tuple[K, V]]:
        """The entries, those first that were not used for longest."""
        with self._lock:
            return [(key, entry.value) for key, entry in self._entries.items()]

    def put(self, key: K, value: V, tenant: str = "") -> None:
        """Replaces an earlier value. A value that is larger than the whole cache is not kept."""
        with self._lock:
            if (earlier := self._entries.get(key)) is not None:
                for each in [*earlier.tenants]:
                    self._give_up(key, each)
            entry = self._entries[key] = _Entry(value, self._size(key, value))
            self._nbytes += entry.nbytes
            self._use(key, entry, tenant)
            while len(self._entries) > self._max_entries:
                self._give_up_oldest(max(self._accounts, key=lambda each: len(self._accounts[each].keys)))
            while self._nbytes > self._max_bytes:
                self._give_up_oldest(max(self._accounts, key=lambda each: self._accounts[each].nbytes))

    def _use(self, key: K, entry: _Entry[V], tenant: str) -> None:
        account = self._accounts.setdefault(tenant, _Account())
        if tenant not in entry.tenants:
            entry.tenants.add(tenant)
            account.keys[key] = None
            account.nbytes += entry.nbytes
        account.keys.move_to_end(key)
        self._accounts.move_to_end(tenant)
        self._entries.move_to_end(key)

    def _give_up_oldest(self, tenant: str) -> None:
        self._give_up(next(iter(self._accounts[tenant].keys)), tenant)

    def _give_up(self, key: K, tenant: str) -> None:
        entry, account = self._entries[key], self._accounts[tenant]
        del account.keys[key]
        account.nbytes -= entry.nbytes
        if not account.keys:
            del self._accounts[tenant]
        entry.tenants.remove(tenant)
        if not entry.tenants:
            del self._entries[key]
            self._nbytes -= entry.nbytes
