"""Strips: which bytes of the arena each cache group has now, and how they pass from one group to another."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from headrace.errors import EngineError
from headrace.kv.block_pool import BlockPool
from headrace.kv.holes import Holes
from headrace.spec import Arena

_SPARE = 256
"""A strip that needs more takes up to the arena's this part beyond its need, of what is nobody's: it needs more soon."""
_LENIENCE = 8
"""A group gives way to another only for a block older than its own oldest one by this part of all cached blocks' ages."""


class Strips:
    """One strip of the arena a cache group: a run of its block numbers, which lie on the group's own grid.

    The strips lie side by side in ``arena.order``. The first begins at the first byte that is usable, the last ends at the
    arena's end, and what is between two strips is nobody's. A strip grows into that; where it ends, into its neighbour,
    whose living blocks at the edge move into its empty ones, which may push the neighbour's neighbour. So blocks of any
    sizes share one arena and nothing is lost to their ratio: as long as the bytes of all owned blocks are within
    ``arena.capacity``, a block can be had, whatever was freed where.

    Cached blocks count as free; the least recently used of all groups are evicted first.

    Args:
        moved: told of each block that moves: group, from, to.
    """

    def __init__(self, arena: Arena, moved: Callable[[int, int, int], None]) -> None:
        self.arena = arena
        self._sizes = arena.block_bytes
        self._order = arena.order
        self._place = {group: place for place, group in enumerate(arena.order)}
        self._moved = moved
        self.shared = len(self._sizes) > 1
        ticks = itertools.count()
        if self.shared:
            last = arena.order[-1]
            first = self._first_numbers()
            self.pools = tuple(
                BlockPool(range(start, start), Holes(highest_first=group == last), ticks) for group, start in enumerate(first)
            )
        else:
            self.pools = (BlockPool(range(1, arena.num_blocks[0]), None, ticks),)

    def _first_numbers(self) -> list[int]:
        """Where each strip, which is empty, begins."""
        numbers = list(self.arena.num_blocks)
        end = self.arena.reserved
        for group in self._order[:-1]:
            numbers[group] = -(-end // self._sizes[group])
            end = numbers[group] * self._sizes[group]
        return numbers

    # ------------------------------------------------------------------ how much there is

    def bytes_of(self, counts: Sequence[int]) -> int:
        """Of ``counts[g]`` blocks of each group."""
        return sum(map(int.__mul__, counts, self._sizes))

    @property
    def used_bytes(self) -> int:
        """Of blocks held or pending."""
        return self.bytes_of([pool.num_used for pool in self.pools])

    @property
    def pending_bytes(self) -> int:
        return self.bytes_of([pool.num_pending for pool in self.pools])

    @property
    def free_bytes(self) -> int:
        """Of blocks that could be had now, in any mix."""
        return self.arena.capacity - self.used_bytes

    # ------------------------------------------------------------------ getting more

    def provide(self, counts: Sequence[int]) -> bool:
        """Sees to it that each group's pool can hand out ``counts[g]`` blocks; False, and nothing changes, if it cannot."""
        if not self.shared:
            return counts[0] <= self.pools[0].num_free
        if self.bytes_of(counts) > self.free_bytes:
            return False
        if all(count <= pool.num_empty for count, pool in zip(counts, self.pools, strict=True)):
            return True
        self._evict(counts)
        for group, pool in enumerate(self.pools):
            if counts[group] > pool.num_empty:
                self._grow(group, counts)
        return True

    def _evict(self, counts: Sequence[int]) -> None:
        """Empties cached blocks until, with ``counts`` more, all groups together are within the capacity."""
        kept = [pool.num_used + pool.num_cached + count for pool, count in zip(self.pools, counts, strict=True)]
        excess = self.bytes_of(kept) - self.arena.capacity
        if excess <= 0:
            return
        # By group, as far as it has any: the tick of the block that is its next to go.
        heads = {group: oldest for group, pool in enumerate(self.pools) if (oldest := pool.oldest) is not None}
        newest = max(pool.newest or 0 for pool in self.pools)
        lenience = (newest - min(heads.values())) // _LENIENCE
        needy = {group for group in heads if counts[group] > self.pools[group].num_empty}
        while excess > 0:
            group = min(heads, key=heads.__getitem__)
            # A block of a group that needs one goes first, if it is about as old: then none has to move.
            if needy and group not in needy:
                own = min(needy, key=heads.__getitem__)
                if heads[own] - heads[group] <= lenience:
                    group = own
            pool = self.pools[group]
            pool.evict()
            excess -= self._sizes[group]
            if counts[group] <= pool.num_empty:
                needy.discard(group)
            oldest = pool.oldest
            if oldest is None:
                del heads[group]
                needy.discard(group)
            else:
                heads[group] = oldest

    # ------------------------------------------------------------------ edges of strips

    def _grow(self, group: int, counts: Sequence[int]) -> None:
        """Lengthens a strip until it has ``counts[group]`` empty blocks. Others keep ``counts`` of theirs."""
        place, pool = self._place[group], self.pools[group]
        short = counts[group] - pool.num_empty
        spare = self.arena.capacity // (_SPARE * self._sizes[group])
        for side in (1, -1):
            gained = min(short + spare, self._room(place, side))
            self._extend(place, side, gained)
            short -= gained
            if short <= 0:
                return
        for side in (1, -1):
            short -= self._advance(place, side, short + self._slide(place, side), counts)
            if short <= 0:
                return
        raise EngineError(f"cache group {group} lacks {short} KV blocks, though their bytes are free")

    def _slide(self, place: int, side: int) -> int:
        """Blocks by which to push a neighbour further than need be: half of what it has free behind it, lest it be pushed
        again and again."""
        if not 0 <= place + side < len(self._order):
            return 0
        behind = self._room(place + side, side) * self._sizes[self._order[place + side]]
        return behind // (2 * self._sizes[self._order[place]])

    def _advance(self, place: int, side: int, count: int, counts: Sequence[int]) -> int:
        """Moves a strip's edge outwards by up to ``count`` blocks; returns by how many."""
        if self._room(place, side) < count and 0 <= place + side < len(self._order):
            group = self._order[place]
            blocks, size = self.pools[group].blocks, self._sizes[group]
            edge = (blocks.stop + count) * size if side > 0 else (blocks.start - count) * size
            self._retreat(place + side, -side, edge, counts)
        gained = min(count, self._room(place, side))
        self._extend(place, side, gained)
        return gained

    def _retreat(self, place: int, side: int, edge: int, counts: Sequence[int]) -> None:
        """Moves a strip's edge inwards until it is clear of byte ``edge``, or as far as its ``counts`` blocks allow."""
        group = self._order[place]
        pool, size = self.pools[group], self._sizes[group]
        count = pool.blocks.stop - edge // size if side > 0 else -(-edge // size) - pool.blocks.start
        lacking = count - max(0, pool.num_empty - counts[group])
        if lacking > 0:
            count -= lacking - self._advance(place, -side, lacking, counts)
        if count <= 0:
            return
        for source, target in pool.cede(side, count):
            self._moved(group, source, target)

    def _room(self, place: int, side: int) -> int:
        """Blocks for which a strip has room on one side without pushing anybody."""
        group = self._order[place]
        blocks, size = self.pools[group].blocks, self._sizes[group]
        if not 0 <= place + side < len(self._order):
            return 0
        other = self._order[place + side]
        theirs, their_size = self.pools[other].blocks, self._sizes[other]
        if side > 0:
            return theirs.start * their_size // size - blocks.stop
        return blocks.start + -theirs.stop * their_size // size

    def _extend(self, place: int, side: int, count: int) -> None:
        if count > 0:
            self.pools[self._order[place]].extend(side, count)

    # ------------------------------------------------------------------ soundness

    def check_integrity(self) -> None:
        """Raises EngineError unless the strips are disjoint, in order and inside the arena, and every pool is sound."""
        end = self.arena.reserved
        for group in self._order:
            pool, size = self.pools[group], self._sizes[group]
            pool.check_integrity()
            if pool.blocks.start * size < end or pool.blocks.stop > self.arena.num_blocks[group]:
                raise EngineError(f"the strip {pool.blocks} of cache group {group} begins before byte {end}, or ends too late")
            end = pool.blocks.stop * size
        if self.free_bytes < 0:
            raise EngineError(f"KV blocks of {self.used_bytes} bytes are in use, of {self.arena.capacity}")
