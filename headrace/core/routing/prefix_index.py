"""PrefixIndex: which replica probably has which prompt prefix in its cache."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from headrace.core.request import Request

STRIDE = 128
"""Prompt tokens between two keys."""


def prefix_keys(request: Request) -> tuple[bytes, ...]:
    """Keys of the prompt's prefixes of 128, 256, ... tokens, with everything that their KV depends on."""
    identity, token_ids = request.cache_identity, request.prompt_token_ids
    keys: list[bytes] = []
    digest = identity.root()
    for start in range(0, len(token_ids) - STRIDE + 1, STRIDE):
        payload = digest + identity.block(token_ids, start, start + STRIDE)
        digest = hashlib.blake2b(payload, digest_size=16).digest()
        keys.append(digest)
    return tuple(keys)


class PrefixIndex:
    """Keys by replica, each replica's bounded like its cache: the least recently used go first.

    A key is *pending* until the first token of a request that brought it: the KV is being computed, so that a replica that
    does not find it has not evicted it. A key's parents are always at least as recently used as the key, so the index
    loses the end of a chain before its beginning.
    """

    def __init__(self, num_replicas: int) -> None:
        self._holders: dict[bytes, int] = {}
        """key -> bit mask of replicas."""
        self._used: list[OrderedDict[bytes, int]] = [OrderedDict() for _ in range(num_replicas)]
        """Per replica, key -> when it was last used, negative while it is pending; least recently used first."""
        self._limits = [0] * num_replicas
        self._time = 0

    def start(self, replica: int, kv_tokens: int) -> None:
        """The replica's cache is empty, and holds ``kv_tokens``."""
        self._drop(replica, len(self._used[replica]))
        self._limits[replica] = kv_tokens // STRIDE

    def size(self, replica: int) -> int:
        return len(self._used[replica])

    def hits(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """(replica, number of leading keys that it has) of each replica that has any. Few of the keys are looked up."""
        holders = self._holders
        if not keys or not (first := holders.get(keys[0], 0)):
            return []
        found: list[tuple[int, int]] = []
        pending = [(1, len(keys) + 1, first, 0)]
        while pending:
            # ``low`` keys are held by ``mask``, ``high`` keys by ``beyond``: replicas end somewhere between.
            low, high, mask, beyond = pending.pop()
            if high - low == 1:
                ended = mask & ~beyond
                while ended:
                    bit = ended & -ended
                    found.append((bit.bit_length() - 1, low))
                    ended ^= bit
                continue
            middle = (low + high) // 2
            held = holders.get(keys[middle - 1], 0) & mask | beyond
            if held != mask:
                pending.append((low, middle, mask, held))
            if held != beyond:
                pending.append((middle, high, held, beyond))
        return found

    def add(self, replica: int, keys: Sequence[bytes]) -> tuple[int, list[int]]:
        """A request with these keys is sent to the replica.

        Returns:
            When, and for each leading key that the replica had, when that was last used (negative: pending).
        """
        self._time += 1
        used, now, bit = self._used[replica], self._time, 1 << replica
        before: list[int] = []
        for key in keys:
            if (last := used.get(key)) is None:
                break
            before.append(last)
        # The end first, so that the beginning is the most recently used.
        for place in range(len(keys) - 1, -1, -1):
            key = keys[place]
            last = used.get(key)
            if last is None:
                self._holders[key] = self._holders.get(key, 0) | bit
            used[key] = now if last is not None and last > 0 else -now
            used.move_to_end(key)
        self._drop(replica, len(used) - self._limits[replica])
        return now, before

    def computed(self, replica: int, keys: Sequence[bytes], added: int) -> None:
        """The prompt of the request that was added at that time is computed."""
        used = self._used[replica]
        for key in keys:
            if used.get(key) == -added:
                used[key] = added

    def missed(self, replica: int, last_used: int) -> None:
        """The replica has evicted a key that was last used at that time: everything not used since is gone too."""
        used = self._used[replica]
        count = 0
        for last in used.values():
            if abs(last) > last_used:
                break
            count += 1
        self._drop(replica, count)

    def forget(self, replica: int, keys: Sequence[bytes], added: int) -> None:
        """The request that was added at that time ended before its prompt was computed."""
        used = self._used[replica]
        for key in keys:
            if used.get(key) == -added:
                self._remove(replica, key)
                del used[key]

    def _drop(self, replica: int, count: int) -> None:
        used = self._used[replica]
        for _ in range(count):
            self._remove(replica, used.popitem(last=False)[0])

    def _remove(self, replica: int, key: bytes) -> None:
        left = self._holders[key] & ~(1 << replica)
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]
