"""The responses that clients may come back to, in memory and within limits."""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.server.settings import ServerSettings
from headrace.server.transcript import Transcript

_OVERHEAD = 512
"""Bytes of an entry beside its JSON text."""


class Stored(NamedTuple):
    """A response, as JSON text, and its transcript."""

    response: bytes
    input_items: bytes
    """Of this request alone."""
    history: bytes
    """The items of the whole conversation, the response's own included."""
    item_ids: tuple[str, ...]
    transcript: Transcript | None = None

    @property
    def size(self) -> int:
        return _OVERHEAD + sum(map(len, (*self[:3], *self.item_ids))) + sum(map(sys.getsizeof, self.transcript or ()))

    def items(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = msgspec.json.decode(self.history)
        return found


class ResponseStore:
    """Forgets what is too old, and what was not used for longest when there is no room."""

    def __init__(self, settings: ServerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.on = settings.responses_store
        self.used = 0
        self._settings = settings
        self._clock = clock
        self._entries: OrderedDict[str, Stored] = OrderedDict()
        """The one that was not used for longest first."""
        self._ends: OrderedDict[str, float] = OrderedDict()
        """When each entry is forgotten, in that order."""
        self._of_item: dict[str, str] = {}
        """Item -> the last response that has it."""

    def __len__(self) -> int:
        return len(self._entries)

    def put(
        self, response: dict[str, Any], input_items: Sequence[Any], history: Sequence[Any], transcript: Transcript | None = None
    ) -> None:
        encode = msgspec.json.encode
        ids = tuple(item["id"] for item in (*input_items, *response["output"]))
        entry = Stored(encode(response), encode(input_items), encode(history), ids, transcript)
        identity = response["id"]
        self._entries[identity] = entry
        self._ends[identity] = self._clock() + self._settings.responses_store_ttl
        self.used += entry.size
        self._of_item |= dict.fromkeys(ids, identity)
        self._expire()
        while len(self) > self._settings.responses_store_entries or self.used > self._settings.responses_store_bytes:
            self.delete(next(iter(self._entries)))

    def get(self, identity: str) -> Stored | None:
        self._expire()
        entry = self._entries.get(identity)
        if entry is not None:
            self._entries.move_to_end(identity)
        return entry

    def item(self, identity: str) -> dict[str, Any] | None:
        """An item of any stored response."""
        entry = self.get(self._of_item.get(identity, ""))
        return entry and next((item for item in entry.items() if item["id"] == identity), None)

    def delete(self, identity: str) -> bool:
        """Whether it was there."""
        entry = self._entries.pop(identity, None)
        if entry is None:
            return False
        del self._ends[identity]
        self.used -= entry.size
        for item in entry.item_ids:
            if self._of_item.get(item) == identity:
                del self._of_item[item]
        return True

    def _expire(self) -> None:
        now = self._clock()
        while self._ends and (first := next(iter(self._ends.items())))[1] <= now:
            self.delete(first[0])
