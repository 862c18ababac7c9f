"""RoutedPrefixes: which replica has which prompt prefix in its cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from headrace.core.request import Request
from headrace.kv import KVCacheManager
from headrace.kv.prefix_cache import Change, KeyChain

STRIDE = 128
"""Prompt tokens between two keys, where the block size divides it."""


def key_stride(block_size: int) -> int:
    """Blocks between two keys."""
    return max(1, STRIDE // block_size)


def prefix_keys(request: Request, block_size: int, grid: int = 0) -> tuple[bytes, ...]:
    """Digests of the keys that the prefix cache of a replica gives to every ``key_stride``-th block of the prompt; of a model
    with state layers, to the blocks that end at multiples of ``grid`` tokens, where snapshots are taken."""
    stride, count = grid // block_size or key_stride(block_size), len(request.prompt_token_ids) // block_size
    chain = KeyChain(request.cache_identity, request.prompt_token_ids, block_size)
    return tuple(chain[index].digest for index in range(stride - 1, count, stride))


class CacheReport(NamedTuple):
    """Changes of a replica's prefix cache among the keys of ``prefix_keys``."""

    cleared: bool
    """Everything was removed, before the rest."""
    stored: list[bytes]
    removed: list[bytes]
    states_stored: list[bytes] = []
    """Keys of the blocks at whose ends there are snapshots of states."""
    states_removed: list[bytes] = []


class CacheReporter:
    """Makes reports of the changes of a replica's prefix cache.

    Of several cache groups, the one that keeps most tokens of a sequence counts, since a hit needs its blocks in any case, and
    the group of states.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        windows = [float("inf") if group.window is None else group.window for group in kv.groups]
        self._group = windows.index(max(windows))
        self._states = len(kv.groups)
        self._stride = key_stride(kv.block_size) if kv.states is None else kv.states.grid // kv.block_size

    def report(self, changes: Sequence[Change]) -> CacheReport | None:
        """None: nothing that concerns routing has changed."""
        cleared, last = False, {self._group: dict[bytes, bool](), self._states: dict[bytes, bool]()}
        for group, key, stored in changes:
            if group not in last:
                continue
            if key is None:
                # All groups are cleared together.
                cleared = True
                last[group].clear()
            elif (key.index + 1) % self._stride == 0:
                last[group][key.digest] = stored
        if not cleared and not any(last.values()):
            return None
        blocks, states = last[self._group], last[self._states]
        return CacheReport(cleared, *_parted(blocks), *_parted(states))


def _parted(changed: dict[bytes, bool]) -> tuple[list[bytes], list[bytes]]:
    """Keys that are there now, and those that are not."""
    return [key for key, there in changed.items() if there], [key for key, there in changed.items() if not there]


class RoutedPrefixes:
    """Keys by replica: those that its cache has, and those of requests that wait for it or whose prompts it computes.

    A replica reports what it has (``changed``). Where it reports nothing, it is taken to have what it has computed, as many
    keys as its cache holds: the least recently used go first, the end of a chain before its beginning.
    """

    def __init__(self, num_replicas: int) -> None:
        self._holders: dict[bytes, int] = {}
        """key -> bit mask of the replicas that have it in any of the following."""
        self._cached: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(num_replicas)]
        """Per replica, least recently used first."""
        self._pending: list[dict[bytes, int]] = [{} for _ in range(num_replicas)]
        """Per replica, key -> number of requests that were added and not computed."""
        self._computing: list[dict[bytes, int]] = [{} for _ in range(num_replicas)]
        """Counts like ``_pending``, of the requests that were sent to the replica."""
        self._limits: list[int | None] = [None] * num_replicas

    def start(self, replica: int, kv_tokens: int | None = None) -> None:
        """The replica's cache is empty. ``kv_tokens``: how much it holds, of a replica that reports nothing."""
        self._drop(replica, len(self._cached[replica]))
        self._limits[replica] = None if kv_tokens is None else kv_tokens // STRIDE

    def resize(self, replica: int, kv_tokens: int) -> None:
        """The cache of a replica that reports nothing holds ``kv_tokens``."""
        self._limits[replica] = kv_tokens // STRIDE
        self._drop(replica, len(self._cached[replica]) - kv_tokens // STRIDE)

    def size(self, replica: int) -> int:
        return len(self._cached[replica])

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

    def add(self, replica: int, keys: Sequence[bytes]) -> None:
        """A request with these keys waits for the replica."""
        pending, bit = self._pending[replica], 1 << replica
        for key in keys:
            pending[key] = pending.get(key, 0) + 1
            self._holders[key] = self._holders.get(key, 0) | bit

    def send(self, replica: int, keys: Sequence[bytes]) -> int:
        """The request is sent. Returns how many leading keys it will find, if nothing is evicted until then."""
        cached, computing, found = self._cached[replica], self._computing[replica], 0
        for place, key in enumerate(keys):
            if found == place and (key in cached or key in computing):
                found += 1
            computing[key] = computing.get(key, 0) + 1
        return found

    def remove(self, replica: int, keys: Sequence[bytes], *, sent: bool, computed: bool = False) -> None:
        """A request ends, waits no more, or has its prompt computed."""
        for key in keys:
            if sent:
                _count_down(self._computing[replica], key)
            _count_down(self._pending[replica], key)
        limit, cached = self._limits[replica], self._cached[replica]
        if computed and limit is not None:
            # The end first, so that the beginning is the most recently used.
            for key in reversed(keys):
                cached[key] = None
                cached.move_to_end(key)
            self._drop(replica, len(cached) - limit)
        for key in keys:
            self._release(replica, key)

    def changed(self, replica: int, report: CacheReport) -> None:
        cached = self._cached[replica]
        if report.cleared:
            self._drop(replica, len(cached))
        for key in report.stored:
            cached[key] = None
            self._holders[key] = self._holders.get(key, 0) | 1 << replica
        for key in report.removed:
            if key in cached:
                del cached[key]
                self._release(replica, key)

    def _drop(self, replica: int, count: int) -> None:
        for _ in range(count):
            self._release(replica, self._cached[replica].popitem(last=False)[0])

    def _release(self, replica: int, key: bytes) -> None:
        """Forgets that the replica has the key, unless it does."""
        if key in self._cached[replica] or key in self._pending[replica]:
            return
        left = self._holders.pop(key, 0) & ~(1 << replica)
        if left:
            self._holders[key] = left


def _count_down(counts: dict[bytes, int], key: bytes) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
