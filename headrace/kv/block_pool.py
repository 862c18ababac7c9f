"""BlockPool: ownership and eviction order of the blocks of one cache group."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator

from headrace.errors import EngineError
from headrace.kv.free_blocks import FreeBlocks
from headrace.kv.prefix_cache import BlockKey, PrefixIndex

NULL_BLOCK = 0
"""Never allocated and never holds data: block tables name it where a group keeps nothing."""


class BlockPool:
    """A range of block numbers, each in exactly one state:

    * held: owned by one or more sequences;
    * pending: without an owner, but a launched step may still write it (its *fence* is the last such step);
    * cached: free, but still findable by its key; evicted in least-recently-used order;
    * empty: free, without useful content.

    Pending and held blocks may have a key too. Allocation takes empty blocks first. Every operation on a block is O(1)
    except ``shrink``, which is rare.

    Args:
        blocks: the initial block numbers.
        free_blocks: container of the empty blocks, required for ``extend`` and ``shrink``; default: a stack.
        ticks: the clock of ``oldest``; pools whose ages are compared share it.
    """

    def __init__(self, blocks: range, free_blocks: FreeBlocks | None = None, ticks: Iterator[int] | None = None) -> None:
        self.blocks = blocks
        self.index = PrefixIndex()
        self._owners: dict[int, set[int]] = {}
        self._empty: list[int] | FreeBlocks = [] if free_blocks is None else free_blocks
        self._empty.extend(reversed(blocks))
        self._cached: dict[int, int] = {}
        """block -> the tick at which it became free."""
        self._lru: OrderedDict[int, int] = OrderedDict()
        """The inverse of ``_cached``, oldest first."""
        self._ticks = itertools.count() if ticks is None else ticks
        self._pending: dict[int, int] = {}
        self._fences: deque[tuple[int, int]] = deque()

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can return now."""
        return len(self._empty) + len(self._cached)

    @property
    def num_empty(self) -> int:
        return len(self._empty)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_pending(self) -> int:
        """Blocks that become free once the launched steps are collected."""
        return len(self._pending)

    @property
    def num_used(self) -> int:
        """Blocks held or pending."""
        return len(self._owners) + len(self._pending)

    @property
    def oldest(self) -> int | None:
        """The tick at which the next cached block to evict became free."""
        return next(iter(self._lru), None)

    @property
    def newest(self) -> int | None:
        return next(reversed(self._lru), None)

    def owners(self, block: int) -> frozenset[int]:
        return frozenset(self._owners.get(block, ()))

    def is_free(self, block: int) -> bool:
        """True if acquiring this block would reduce ``num_free``."""
        return block not in self._owners and block not in self._pending

    def allocate(self, count: int, owner: int) -> list[int]:
        """Returns ``count`` blocks of undefined content.

        Raises:
            EngineError: fewer than ``count`` blocks are free; check ``num_free`` first.
        """
        if count > self.num_free:
            raise EngineError(f"sequence {owner} needs {count} KV blocks; {self.num_free} of {len(self.blocks)} are free")
        empty, owners, blocks = self._empty, self._owners, []
        for _ in range(count):
            block = empty.pop() if empty else self._evict()
            owners[block] = {owner}
            blocks.append(block)
        return blocks

    def share(self, block: int, owner: int) -> None:
        """Adds ``owner`` to the owners of a block that it found by key or shares with another sequence."""
        owners = self._owners.get(block)
        if owners is not None:
            if owner in owners:
                raise EngineError(f"sequence {owner} already holds KV block {block}")
            owners.add(owner)
            return
        if block in self._pending:
            del self._pending[block]
        elif block in self._cached:
            del self._lru[self._cached.pop(block)]
        else:
            raise EngineError(f"sequence {owner} cannot share KV block {block}, which is empty")
        self._owners[block] = {owner}

    def release(self, blocks: Iterable[int], owner: int, fence: int | None) -> None:
        """Removes ``owner`` from ``blocks``. Blocks released first are evicted first, so pass a sequence's tail first.

        Args:
            fence: the last launched step if a step in flight may still write these blocks, else None. Fences never decrease
                from call to call.
        """
        for block in blocks:
            owners = self._owners.get(block)
            if owners is None or owner not in owners:
                raise EngineError(
                    f"sequence {owner} freed KV block {block}, which is held by {sorted(owners or ()) or 'no sequence'}"
                )
            owners.remove(owner)
            if owners:
                continue
            del self._owners[block]
            if fence is None:
                self._make_free(block)
            else:
                self._pending[block] = fence
                self._fences.append((fence, block))

    def collected(self, step: int) -> None:
        """Frees the blocks fenced by steps up to and including ``step``, which have been collected."""
        while self._fences and self._fences[0][0] <= step:
            fence, block = self._fences.popleft()
            # A block that was shared again meanwhile is no longer pending, or has a later fence.
            if self._pending.get(block) == fence:
                del self._pending[block]
                self._make_free(block)

    def publish(self, block: int, key: BlockKey) -> BlockKey:
        """Makes a held block findable by its key unless a block with an equal key is; returns the key object in use."""
        if block not in self._owners:
            raise EngineError(f"KV block {block} was published, but no sequence holds it")
        return self.index.put(key, block)

    def unpublish(self, block: int) -> None:
        """Drops the key of a block, which can no longer be found."""
        self.index.drop(block)
        if block in self._cached:
            del self._lru[self._cached.pop(block)]
            self._empty.append(block)

    def forget(self) -> None:
        """Drops every key, so that no block computed so far can be found again."""
        self.index.clear()
        self._empty.extend(reversed(self._lru.values()))
        self._cached.clear()
        self._lru.clear()

    def evict(self) -> None:
        """Empties the least recently used cached block; there must be one."""
        self._empty.append(self._evict())

    # ------------------------------------------------------------------ range of block numbers

    def extend(self, side: int, count: int) -> None:
        """Adds empty blocks at the end (``side`` 1) or the beginning (-1) of the range."""
        start, stop = self.blocks.start, self.blocks.stop
        added = range(stop, stop + count) if side > 0 else range(start - count, start)
        self.blocks = range(start, added.stop) if side > 0 else range(added.start, stop)
        self._empty.extend(added)

    def shrink(self, side: int, count: int) -> list[tuple[int, int]]:
        """Removes blocks at the end (``side`` 1) or the beginning (-1) of the range. Those in use move to other empty blocks.

        Returns:
            (source, target) of each move.

        Raises:
            EngineError: too few other blocks are empty.
        """
        start, stop = self.blocks.start, self.blocks.stop
        blocks = range(stop - count, stop) if side > 0 else range(start, start + count)
        kept = range(start, blocks.start) if side > 0 else range(blocks.stop, stop)
        if not isinstance(self._empty, FreeBlocks):
            raise EngineError("a pool without free_blocks cannot shrink")
        in_use = [block for block in blocks if not self._empty.discard(block)]
        if len(in_use) > len(self._empty):
            raise EngineError(f"{len(in_use)} KV blocks cannot move to {len(self._empty)} empty ones")
        self.blocks = kept
        moves = [(block, self._empty.pop()) for block in in_use]
        for source, target in moves:
            self._move(source, target)
        return moves

    def _move(self, source: int, target: int) -> None:
        """Transfers the state of ``source`` to ``target``, which is in no state."""
        if source in self._owners:
            self._owners[target] = self._owners.pop(source)
        elif source in self._cached:
            tick = self._cached.pop(source)
            self._cached[target] = tick
            self._lru[tick] = target
        else:
            fence = self._pending.pop(source)
            self._pending[target] = fence
            renamed = ((at, target if (at, block) == (fence, source) else block) for at, block in self._fences)
            self._fences = deque(renamed)
        self.index.move(source, target)

    def check_integrity(self) -> None:
        """Raises EngineError unless every block is in exactly one state and every key belongs to one block."""
        states = [*self._owners, *self._pending, *self._cached, *self._empty]
        if len(states) != len(self.blocks) or set(states) != set(self.blocks):
            seen: set[int] = set()
            doubled = sorted({block for block in states if block in seen or seen.add(block)})  # type: ignore[func-returns-value]
            lost = sorted(set(self.blocks) - set(states))
            raise EngineError(f"KV blocks in two states: {doubled}; in none: {lost}")
        if {tick: block for block, tick in self._cached.items()} != self._lru or sorted(self._lru) != list(self._lru):
            raise EngineError("the order in which cached KV blocks are evicted is not that in which they became free")
        if unowned := [block for block, owners in self._owners.items() if not owners]:
            raise EngineError(f"KV blocks held by an empty set of owners: {unowned}")
        if stray := [block for block in self._empty if self.index.key_of(block) is not None]:
            raise EngineError(f"empty KV blocks that can still be found by key: {stray}")
        if keyless := [block for block in self._cached if self.index.key_of(block) is None]:
            raise EngineError(f"cached KV blocks without a key: {keyless}")
        if unfenced := set(self._pending.items()) - {(block, fence) for fence, block in self._fences}:
            raise EngineError(f"pending KV blocks that no step will free: {sorted(unfenced)}")
        self.index.check_integrity()

    def _make_free(self, block: int) -> None:
        if self.index.key_of(block) is None:
            self._empty.append(block)
        else:
            self._cached[block] = tick = next(self._ticks)
            self._lru[tick] = block

    def _evict(self) -> int:
        _, block = self._lru.popitem(last=False)
        del self._cached[block]
        self.index.drop(block)
        return block
