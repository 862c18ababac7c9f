"""EncoderCache: features of items on the device, while a sequence needs them and after that within a byte budget."""

from __future__ import annotations

from collections import OrderedDict

from headrace.models.vision.interface import EncodedItem


class EncoderCache:
    """Cache of encoded items by content hash. Its content depends only on the stream of plans."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: dict[str, EncodedItem] = {}
        self._users: dict[str, int] = {}
        """Content hash -> items of slots that are to be computed with it."""
        self._unused: OrderedDict[str, None] = OrderedDict()
        self._unused_bytes = 0

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __getitem__(self, key: str) -> EncodedItem:
        return self._entries[key]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self._entries.values())

    @property
    def num_used(self) -> int:
        return len(self._users)

    def acquire(self, key: str) -> None:
        """A slot has an item with these features to compute."""
        self._users[key] = self._users.get(key, 0) + 1
        if key in self._unused:
            del self._unused[key]
            self._unused_bytes -= self._entries[key].nbytes

    def put(self, key: str, entry: EncodedItem) -> None:
        """Adds the features of an acquired item."""
        self._entries[key] = entry

    def release(self, key: str) -> None:
        """A slot has computed such an item, or has left."""
        self._users[key] -= 1
        if self._users[key]:
            return
        del self._users[key]
        if key not in self._entries:
            return
        self._unused[key] = None
        self._unused_bytes += self._entries[key].nbytes
        while self._unused_bytes > self._max_bytes:
            oldest, _ = self._unused.popitem(last=False)
            self._unused_bytes -= self._entries.pop(oldest).nbytes
