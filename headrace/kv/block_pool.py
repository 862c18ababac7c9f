"""BlockPool: the blocks of one cache group, who holds them, and in which order free ones are taken."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator

from headrace.errors import EngineError
from headrace.kv.holes import Holes
from headrace.kv.prefix_cache import BlockKey, PrefixIndex

NULL_BLOCK = 0
"""Holds no data and is never handed out: it stands in block tables where a group keeps nothing."""


class BlockPool:
    """A run of block numbers, each in exactly one state:

    * held: owned by one or more sequences;
    * pending: owned by nobody, but a launched step may still write it (a *fence* says which);
    * cached: free, yet its content can be found by its key; evicted in least-recently-used order;
    * empty: free, and holds nothing of use.

    Pending and held blocks may have a key as well. Allocation takes empty blocks first. Every operation on a
    block is O(1), but for ``cede``, which is rare.

    Args:
        blocks: its block numbers at first.
        holes: to keep the empty ones in, if ``extend`` and ``cede`` are to be used; else they are a simple stack.
        ticks: the clock of ``oldest``; pools that are to be compared share it.
    """

    def __init__(self, blocks: range, holes: Holes | None = None, ticks: Iterator[int] | None = None) -> None:
        self.blocks = blocks
        self.index = PrefixIndex()
        self._owners: dict[int, set[int]] = {}
        self._empty: list[int] | Holes = [] if holes is None else holes
        self._empty.extend(reversed(blocks))
        self._cached: dict[int, int] = {}
        """block -> the tick at which it became free."""
        self._lru: OrderedDict[int, int] = OrderedDict()
        """The other way round, oldest first."""
        self._ticks = itertools.count() if ticks is None else ticks
        self._pending: dict[int, int] = {}
        self._fences: deque[tuple[int, int]] = deque()

    @property
    def num_usable(self) -> int:
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can hand out now."""
        return len(self._empty) + len(self._cached)

    @property
    def num_empty(self) -> int:
        return len(self._empty)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_pending(self) -> int:
        """Blocks that become free once the steps already launched have been collected."""
        return len(self._pending)

    @property
    def num_used(self) -> int:
        """Blocks held or pending."""
        return len(self._owners) + len(self._pending)

    @property
    def oldest(self) -> int | None:
        """The tick at which the cached block became free that would be evicted first."""
        return next(iter(self._lru), None)

    @property
    def newest(self) -> int | None:
        return next(reversed(self._lru), None)

    def owners(self, block: int) -> frozenset[int]:
        return frozenset(self._owners.get(block, ()))

    def is_free(self, block: int) -> bool:
        """True if holding this block would lessen ``num_free``."""
        return block not in self._owners and block not in self._pending

    def allocate(self, count: int, owner: int) -> list[int]:
        """Hands out ``count`` blocks of undefined content.

        Raises:
            EngineError: fewer are free; ask ``num_free`` first.
        """
        if count > self.num_free:
            raise EngineError(f"sequence {owner} asked for {count} KV blocks; {self.num_free} of {self.num_usable} are free")
        empty, owners, blocks = self._empty, self._owners, []
        for _ in range(count):
            block = empty.pop() if empty else self._evict()
            owners[block] = {owner}
            blocks.append(block)
        return blocks

    def share(self, block: int, owner: int) -> None:
        """Makes ``owner`` one more holder of a block whose content it found by key or takes over from another sequence."""
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
            raise EngineError(f"KV block {block} holds nothing that sequence {owner} could share")
        self._owners[block] = {owner}

    def release(self, blocks: Iterable[int], owner: int, fence: int | None) -> None:
        """``owner`` lets go of ``blocks``; those released first are evicted first, so pass a sequence's tail first.

        Args:
            fence: the last launched step, if one of the steps in flight may still write these blocks; None if none does.
                Fences never decrease from call to call.
        """
        for block in blocks:
            owners = self._owners.get(block)
            if owners is None or owner not in owners:
                held = sorted(owners) if owners else "nobody"
                raise EngineError(f"sequence {owner} freed KV block {block}, which is held by {held}")
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
        """Every step up to and including ``step`` has been collected: blocks fenced by them become free."""
        while self._fences and self._fences[0][0] <= step:
            fence, block = self._fences.popleft()
            # A block that was shared again meanwhile is no longer pending, or waits behind a later fence of its own.
            if self._pending.get(block) == fence:
                del self._pending[block]
                self._make_free(block)

    def publish(self, block: int, key: BlockKey) -> BlockKey:
        """Makes a held block findable by its key, unless an equal one is already; returns the key object in use."""
        if block not in self._owners:
            raise EngineError(f"KV block {block} was published by nobody that holds it")
        return self.index.put(key, block)

    def forget(self) -> None:
        """Drops every key: nothing computed so far can be found again."""
        self.index.clear()
        self._empty.extend(reversed(self._lru.values()))
        self._cached.clear()
        self._lru.clear()

    def evict(self) -> None:
        """Empties the least recently used cached block. There must be one."""
        self._empty.append(self._evict())

    # ------------------------------------------------------------------ the run of numbers

    def extend(self, side: int, count: int) -> None:
        """Adds empty blocks at the run's end (``side`` 1) or beginning (-1)."""
        start, stop = self.blocks.start, self.blocks.stop
        added = range(stop, stop + count) if side > 0 else range(start - count, start)
        self.blocks = range(start, added.stop) if side > 0 else range(added.start, stop)
        self._empty.extend(added)

    def cede(self, side: int, count: int) -> list[tuple[int, int]]:
        """Gives up blocks at the run's end (``side`` 1) or beginning (-1); what lives there moves to empty blocks, of which
        there must be enough.

        Returns:
            ``(from, to)`` of each that moved.
        """
        start, stop = self.blocks.start, self.blocks.stop
        blocks = range(stop - count, stop) if side > 0 else range(start, start + count)
        kept = range(start, blocks.start) if side > 0 else range(blocks.stop, stop)
        if not isinstance(self._empty, Holes):
            raise EngineError("this pool's blocks are its own for good")
        living = [block for block in blocks if not self._empty.discard(block)]
        if len(living) > len(self._empty):
            raise EngineError(f"{len(living)} KV blocks are to move to {len(self._empty)} empty ones")
        self.blocks = kept
        moves = [(block, self._empty.pop()) for block in living]
        for source, target in moves:
            self._move(source, target)
        return moves

    def _move(self, source: int, target: int) -> None:
        """``target``, which is nothing yet, becomes what ``source`` was."""
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
        if len(states) != self.num_usable or set(states) != set(self.blocks):
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
