"""BoundedCache: values by key, of which those that were not used for longest are dropped."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """Holds a limited number of entries and bytes. Safe to use from several threads."""

    def __init__(
        self, max_entries: float = float("inf"), max_bytes: float = float("inf"), size: Callable[[K, V], int] | None = None
    ) -> None:
        """``size``: bytes of an entry; None: ``max_bytes`` is not used."""
        self._max_entries, self._max_bytes, self._size = max_entries, max_bytes, size or (lambda key, value: 0)
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
            return found

    def items(self) -> list[tuple[K, V]]:
        """The entries, those first that were not used for longest."""
        with self._lock:
            return list(self._entries.items())

    def put(self, key: K, value: V) -> None:
        """Replaces an earlier value. A value that is larger than the whole cache is not kept."""
        with self._lock:
            if (earlier := self._entries.pop(key, None)) is not None:
                self._nbytes -= self._size(key, earlier)
            self._entries[key] = value
            self._nbytes += self._size(key, value)
            while len(self._entries) > self._max_entries or self._nbytes > self._max_bytes:
                self._nbytes -= self._size(*self._entries.popitem(last=False))
