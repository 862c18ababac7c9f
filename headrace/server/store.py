"""The responses that clients may come back to, in memory: each API key has its own, within its share of the limits."""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from headrace.server.settings import ServerSettings
from headrace.text.transcript import Transcript

_OVERHEAD = 512
"""Bytes of an entry beside its texts."""


class StoredItem(NamedTuple):
    """An item of a conversation, as JSON text."""

    id: str
    text: bytes

    @classmethod
    def of(cls, item: dict[str, Any]) -> StoredItem:
        return cls(item["id"], msgspec.json.encode(item))


class Stored(NamedTuple):
    """A response and what it answers."""

    earlier: tuple[StoredItem, ...]
    """The items of the conversation before this request."""
    input_items: tuple[StoredItem, ...]
    response: bytes = b""
    """JSON text; empty while it is generated."""
    output: tuple[StoredItem, ...] = ()
    transcript: Transcript | None = None

    @property
    def items(self) -> tuple[StoredItem, ...]:
        """The whole conversation."""
        return self.earlier + self.input_items + self.output

    @property
    def size(self) -> int:
        """Counts items that responses of one conversation share for each of them."""
        items = sum(sys.getsizeof(item) + sys.getsizeof(item.id) + sys.getsizeof(item.text) for item in self.items)
        return _OVERHEAD + len(self.response) + items + sum(map(sys.getsizeof, self.transcript or ()))


class _Shelf:
    """The responses of one tenant."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, Stored] = OrderedDict()
        """The one that was not used for longest first."""
        self.sizes: dict[str, int] = {}
        self.used = 0
        self.of_item: dict[str, tuple[str, StoredItem]] = {}
        """Item -> the last response that has it as its own, and the item."""

    def put(self, identity: str, entry: Stored) -> None:
        self.entries[identity] = entry
        self.sizes[identity] = entry.size
        self.used += entry.size
        if entry.response:
            self.of_item |= {item.id: (identity, item) for item in entry.input_items + entry.output}

    def delete(self, identity: str) -> bool:
        """Whether it was there."""
        entry = self.entries.pop(identity, None)
        if entry is None:
            return False
        self.used -= self.sizes.pop(identity)
        for item in entry.input_items + entry.output:
            if self.of_item.get(item.id, ("",))[0] == identity:
                del self.of_item[item.id]
        return True


class ResponseStore:
    """Forgets what is too old, and of a tenant without room what was not used for longest.

    A response is its tenant's: to others it does not exist, nor do its items.
    """

    def __init__(self, settings: ServerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.on = settings.responses_store
        self._most_entries = settings.share(settings.responses_store_entries)
        self._most_bytes = settings.share(settings.responses_store_bytes)
        self._ttl = settings.responses_store_ttl
        self._clock = clock
        self._shelves: dict[str, _Shelf] = {}
        self._ends: OrderedDict[tuple[str, str], float] = OrderedDict()
        """Times at which tenants' entries are forgotten, in that order."""

    def __len__(self) -> int:
        return len(self._ends)

    def used(self, tenant: str) -> int:
        """Bytes of a tenant's responses."""
        shelf = self._shelves.get(tenant)
        return 0 if shelf is None else shelf.used

    def begin(self, tenant: str, identity: str, earlier: tuple[StoredItem, ...], input_items: tuple[StoredItem, ...]) -> None:
        """Keeps what a response answers, within the tenant's share, until ``finish`` or ``abandon``."""
        self._put(tenant, identity, Stored(earlier, input_items))

    def finish(
        self, tenant: str, identity: str, response: bytes, output: tuple[StoredItem, ...], transcript: Transcript | None = None
    ) -> None:
        """Stores a response that was begun, unless it had to make room for others since."""
        shelf = self._shelves.get(tenant)
        begun = None if shelf is None else shelf.entries.get(identity)
        if begun is not None:
            self.delete(tenant, identity)
            self._put(tenant, identity, begun._replace(response=response, output=output, transcript=transcript))

    def abandon(self, tenant: str, identity: str) -> None:
        """Forgets a response that was begun, and nothing if it is finished."""
        shelf = self._shelves.get(tenant)
        if shelf is not None and (entry := shelf.entries.get(identity)) is not None and not entry.response:
            self.delete(tenant, identity)

    def _put(self, tenant: str, identity: str, entry: Stored) -> None:
        self._expire()
        shelf = self._shelves.setdefault(tenant, _Shelf())
        shelf.put(identity, entry)
        self._ends[tenant, identity] = self._clock() + self._ttl
        while len(shelf.entries) > self._most_entries or shelf.used > self._most_bytes:
            self.delete(tenant, next(iter(shelf.entries)))

    def get(self, tenant: str, identity: str) -> Stored | None:
        self._expire()
        shelf = self._shelves.get(tenant)
        entry = None if shelf is None else shelf.entries.get(identity)
        if shelf is None or entry is None or not entry.response:
            return None
        shelf.entries.move_to_end(identity)
        return entry

    def item(self, tenant: str, identity: str) -> StoredItem | None:
        """An item of any of the tenant's responses."""
        self._expire()
        shelf = self._shelves.get(tenant)
        if shelf is None or identity not in shelf.of_item:
            return None
        response, item = shelf.of_item[identity]
        shelf.entries.move_to_end(response)
        return item

    def delete(self, tenant: str, identity: str) -> bool:
        """Whether it was there."""
        self._ends.pop((tenant, identity), None)
        shelf = self._shelves.get(tenant)
        return shelf is not None and shelf.delete(identity)

    def _expire(self) -> None:
        now = self._clock()
        while self._ends and (first := next(iter(self._ends.items())))[1] <= now:
            self.delete(*first[0])
