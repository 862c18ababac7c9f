"""BlockRegions: divides the bytes of the arena among cache groups, and moves the borders on demand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from headrace.errors import EngineError
from headrace.kv.block_pool import BlockPool
from headrace.kv.free_blocks import FreeBlocks
from headrace.model_spec import Arena

_SPARE = 256
"""A region that grows into unused bytes takes up to 1/256 of the arena more than it needs now."""
_LENIENCE = 8
"""Another group evicts before the group that needs blocks only if its oldest block is older by 1/8 of the span of ages."""


class BlockRegions:
    """One region of the arena for each cache group: a range of its block numbers, aligned to the group's block size.

    The regions lie side by side in ``arena.order``. The first begins at the first usable byte, the last ends at the arena's
    end, and bytes between two regions are unused. A region grows into unused bytes; then it pushes back its neighbour, whose
    blocks at the edge move to empty blocks of the neighbour, which may push back the next region. So blocks of different
    sizes share one arena without fragmentation: as long as the bytes of all owned blocks are within ``arena.capacity``, a
    block can be allocated, whichever blocks were freed.

    Cached blocks count as free; eviction is least recently used over all groups.

    Args:
        moved: called with (group, source, target) for each block that moves.
        num_kv: number of groups that hold KV, the first ones.
    """

    def __init__(self, arena: Arena, moved: Callable[[int, int, int], None], num_kv: int | None = None) -> None:
        self.arena = arena
        self._sizes = arena.block_bytes
        self._order = arena.order
        self._place = {group: place for place, group in enumerate(arena.order)}
        self._moved = moved
        self._kv_sizes = self._sizes[:num_kv]
        self.shared = len(self._sizes) > 1
        ticks = itertools.count()
        if self.shared:
            last = arena.order[-1]
            first = self._first_numbers()
            self.pools = tuple(
                BlockPool(range(start, start), FreeBlocks(highest_first=group == last), ticks)
                for group, start in enumerate(first)
            )
        else:
            self.pools = (BlockPool(range(1, arena.num_blocks[0]), None, ticks),)

    def _first_numbers(self) -> list[int]:
        """The first block number of each region, all of which are empty."""
        numbers = list(self.arena.num_blocks)
        end = self.arena.reserved
        for group in self._order[:-1]:
            numbers[group] = -(-end // self._sizes[group])
            end = numbers[group] * self._sizes[group]
        return numbers

    # ------------------------------------------------------------------ free space

    def bytes_of(self, counts: Sequence[int]) -> int:
        """Bytes of ``counts[g]`` blocks of each group g."""
        return sum(map(int.__mul__, counts, self._sizes))

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks held or pending."""
        return self.bytes_of([pool.num_used for pool in self.pools])

    @property
    def pending_bytes(self) -> int:
        return self.bytes_of([pool.num_pending for pool in self.pools])

    @property
    def free_bytes(self) -> int:
        """Bytes of the blocks that can be allocated now, in any mix of groups."""
        return self.arena.capacity - self.used_bytes

    def available(self, counts: Sequence[int], *, pending: bool = False) -> bool:
        """Whether ``counts[g]`` blocks of each group can be allocated now (``pending``: once launched steps are collected)."""
        free = self.free_bytes + (self.pending_bytes if pending else 0)
        return self.bytes_of(counts) <= free

    def most_of_each(self, spare: int = 0, *, pending: bool = False) -> int:
        """The largest n such that n blocks of every group of KV are ``available``, once ``spare`` bytes are freed."""
        free = self.free_bytes + spare + (self.pending_bytes if pending else 0)
        return free // sum(self._kv_sizes)

    # ------------------------------------------------------------------ growth

    def reserve(self, counts: Sequence[int]) -> bool:
        """Makes room in each pool for ``counts[g]`` blocks; returns False, without changes, if there is too little."""
        if not self.shared:
            return counts[0] <= self.pools[0].num_free
        if not self.available(counts):
            return False
        if all(count <= pool.num_empty for count, pool in zip(counts, self.pools, strict=True)):
            return True
        if self._excess(counts) > 0:
            self._evict(counts)
        for group, pool in enumerate(self.pools):
            if counts[group] > pool.num_empty:
                self._grow(group, counts)
        return True

    def _excess(self, counts: Sequence[int]) -> int:
        """Bytes by which the blocks in use, the cached ones and ``counts`` more exceed the capacity."""
        kept = [pool.num_used + pool.num_cached + count for pool, count in zip(self.pools, counts, strict=True)]
        return self.bytes_of(kept) - self.arena.capacity

    def _evict(self, counts: Sequence[int]) -> None:
        """Evicts cached blocks until ``counts`` more blocks fit within the capacity."""
        # group -> tick of its next block to evict, for groups with cached blocks.
        heads = self._heads()
        newest = max(pool.newest or 0 for pool in self.pools)
        lenience = (newest - min(heads.values())) // _LENIENCE
        needy = {group for group in heads if counts[group] > self.pools[group].num_empty}
        while self._excess(counts) > 0:
            group = min(heads, key=heads.__getitem__)
            # Prefer a block of a group that needs one if it is about as old: then no block has to move.
            if needy and group not in needy:
                preferred = min(needy, key=heads.__getitem__)
                if heads[preferred] - heads[group] <= lenience:
                    group = preferred
            pool = self.pools[group]
            pool.evict()
            # A block of KV may have taken a state with it.
            heads = self._heads()
            needy = {other for other in needy if other in heads and counts[other] > self.pools[other].num_empty}

    def _heads(self) -> dict[int, int]:
        return {group: oldest for group, pool in enumerate(self.pools) if (oldest := pool.oldest) is not None}

    # ------------------------------------------------------------------ edges of regions

    def _grow(self, group: int, counts: Sequence[int]) -> None:
        """Extends a region until it has ``counts[group]`` empty blocks. The other groups keep at least their ``counts``."""
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
        """Extra blocks by which to push back a neighbour, so that it is not pushed again soon: half of the unused bytes behind
        it."""
        if not 0 <= place + side < len(self._order):
            return 0
        behind = self._room(place + side, side) * self._sizes[self._order[place + side]]
        return behind // (2 * self._sizes[self._order[place]])

    def _advance(self, place: int, side: int, count: int, counts: Sequence[int]) -> int:
        """Moves a region's edge outwards by up to ``count`` blocks; returns by how many."""
        if self._room(place, side) < count and 0 <= place + side < len(self._order):
            group = self._order[place]
            blocks, size = self.pools[group].blocks, self._sizes[group]
            edge = (blocks.stop + count) * size if side > 0 else (blocks.start - count) * size
            self._retreat(place + side, -side, edge, counts)
        gained = min(count, self._room(place, side))
        self._extend(place, side, gained)
        return gained

    def _retreat(self, place: int, side: int, edge: int, counts: Sequence[int]) -> None:
        """Moves a region's edge inwards to byte ``edge``, or as far as its ``counts`` blocks allow."""
        group = self._order[place]
        pool, size = self.pools[group], self._sizes[group]
        count = pool.blocks.stop - edge // size if side > 0 else -(-edge // size) - pool.blocks.start
        lacking = count - max(0, pool.num_empty - counts[group])
        if lacking > 0:
            count -= lacking - self._advance(place, -side, lacking, counts)
        if count <= 0:
            return
        for source, target in pool.shrink(side, count):
            self._moved(group, source, target)

    def _room(self, place: int, side: int) -> int:
        """Blocks by which a region can grow on one side without moving its neighbour."""
        group = self._order[place]
        blocks, size = self.pools[group].blocks, self._sizes[group]
        if not 0 <= place + side < len(self._order):
            return 0
        other = self._order[place + side]
        neighbour, neighbour_size = self.pools[other].blocks, self._sizes[other]
        if side > 0:
            return neighbour.start * neighbour_size // size - blocks.stop
        return blocks.start + -neighbour.stop * neighbour_size // size

    def _extend(self, place: int, side: int, count: int) -> None:
        if count > 0:
            self.pools[self._order[place]].extend(side, count)

    # ------------------------------------------------------------------ integrity

    def check_integrity(self) -> None:
        """Raises EngineError unless the regions are disjoint, in order and inside the arena, and every pool is consistent."""
        end = self.arena.reserved
        for group in self._order:
            pool, size = self.pools[group], self._sizes[group]
            pool.check_integrity()
            if pool.blocks.start * size < end or pool.blocks.stop > self.arena.num_blocks[group]:
                raise EngineError(f"the region {pool.blocks} of cache group {group} begins before byte {end}, or ends too late")
            end = pool.blocks.stop * size
        if self.free_bytes < 0:
            raise EngineError(f"KV blocks of {self.used_bytes} bytes are in use, of {self.arena.capacity}")
