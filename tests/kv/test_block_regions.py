"""BlockRegions of one arena: whatever is taken, freed, found again and moved, no byte has two owners and no content is lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.errors import EngineError
from headrace.kv.block_pool import BlockPool
from headrace.kv.block_regions import BlockRegions
from headrace.kv.free_blocks import FreeBlocks
from headrace.kv.prefix_cache import BlockKey
from headrace.model_spec import Arena

SIZES = [(3,), (1, 1), (5, 2), (7, 7), (2, 9), (13, 8), (3, 1, 5), (4, 6, 9), (2, 2, 3, 11)]


class RegionMachine(RuleBasedStateMachine):
    """The oracle is a run of bytes: every block that is held, pending or cached has a pattern of its own in its bytes.

    The patterns are copied as a runner copies blocks, and must be found whole wherever the block is now.
    """

    @initialize(sizes=st.sampled_from(SIZES), counts=st.integers(1, 9))
    def start(self, sizes: tuple[int, ...], counts: int) -> None:
        self.arena = Arena.holding(sizes, [counts] * len(sizes))
        self.memory: list[object] = [None] * self.arena.nbytes
        self.patterns: dict[tuple[int, int], str] = {}
        """(group, block) -> the pattern it was given when it was taken."""
        self.held: dict[tuple[int, int], set[int]] = {}
        self.names = self.step = self.done = 0
        self.regions = BlockRegions(self.arena, self.moved)
        self.pools = self.regions.pools

    def bytes_of(self, group: int, block: int) -> range:
        size = self.arena.block_bytes[group]
        return range(block * size, (block + 1) * size)

    def moved(self, group: int, source: int, target: int) -> None:
        old, new = self.bytes_of(group, source), self.bytes_of(group, target)
        assert new.start >= self.arena.reserved and new.stop <= self.arena.nbytes
        self.memory[new.start : new.stop] = self.memory[old.start : old.stop]
        self.patterns[group, target] = self.patterns.pop((group, source))
        if (group, source) in self.held:
            self.held[group, target] = self.held.pop((group, source))

    @rule(data=st.data(), owner=st.integers(1, 3))
    def take(self, data: st.DataObject, owner: int) -> None:
        counts = [data.draw(st.integers(0, 4)) for _ in self.pools]
        needed = sum(count * size for count, size in zip(counts, self.arena.block_bytes, strict=True))
        fits = self.regions.available(counts)
        assert fits == (needed <= self.regions.free_bytes)
        before = [(set(pool._owners), pool.blocks) for pool in self.pools]
        assert self.regions.reserve(counts) == fits
        if not fits:
            assert before == [(set(pool._owners), pool.blocks) for pool in self.pools]
            return
        for group, count in enumerate(counts):
            for block in self.pools[group].allocate(count, owner):
                self.names += 1
                self.patterns[group, block] = name = f"block {self.names}"
                self.held[group, block] = {owner}
                for place, byte in enumerate(self.bytes_of(group, block)):
                    self.memory[byte] = name, place

    @precondition(lambda self: self.held)
    @rule(data=st.data(), fenced=st.booleans(), named=st.booleans())
    def let_go(self, data: st.DataObject, fenced: bool, named: bool) -> None:
        group, block = data.draw(st.sampled_from(sorted(self.held)))
        if named and self.pools[group].index.key_of(block) is None:
            self.pools[group].publish(block, BlockKey(None, self.patterns[group, block].encode()))
        for owner in sorted(self.held.pop((group, block))):
            self.pools[group].release([block], owner, self.step if fenced and self.step > self.done else None)

    @rule(data=st.data(), owner=st.integers(1, 3))
    def find_again(self, data: st.DataObject, owner: int) -> None:
        known = [
            (group, block)
            for group, pool in enumerate(self.pools)
            for block in pool.blocks
            if pool.index.key_of(block) is not None and owner not in self.held.get((group, block), ())
        ]
        if known:
            group, block = data.draw(st.sampled_from(known))
            assert self.pools[group].index.key_of(block).payload.decode() == self.patterns[group, block]
            self.pools[group].share(block, owner)
            self.held.setdefault((group, block), set()).add(owner)

    @rule()
    def launch(self) -> None:
        self.step += 1

    @rule()
    def collect(self) -> None:
        self.done = min(self.step, self.done + 1)
        for pool in self.pools:
            pool.collected(self.done)

    @rule()
    def forget(self) -> None:
        for pool in self.pools:
            pool.forget()

    @invariant()
    def sound(self) -> None:
        self.regions.check_integrity()
        used = 0
        for group, pool in enumerate(self.pools):
            assert {block for of, block in self.held if of == group} == set(pool._owners)
            for block in (*pool._owners, *pool._pending, *pool._cached):
                expected = [(self.patterns[group, block], place) for place in range(self.arena.block_bytes[group])]
                at = self.bytes_of(group, block)
                assert self.memory[at.start : at.stop] == expected
            used += self.arena.block_bytes[group] * (len(pool._owners) + len(pool._pending))
        assert self.regions.used_bytes == used and self.regions.free_bytes == self.arena.capacity - used
        assert self.memory[: self.arena.reserved] == [None] * self.arena.reserved

    def teardown(self) -> None:
        if not hasattr(self, "regions"):
            return
        for (group, block), owners in sorted(self.held.items()):
            for owner in sorted(owners):
                self.pools[group].release([block], owner, None)
        for pool in self.pools:
            pool.collected(self.step)
        self.regions.check_integrity()
        assert self.regions.free_bytes == self.arena.capacity
        # All of it is any single group's to take, up to less than a block; then there is none for another.
        for group, size in enumerate(self.arena.block_bytes):
            counts = [0] * len(self.pools)
            counts[group] = self.arena.capacity // size
            self.patterns.clear()
            self.held.clear()
            self.regions._moved = lambda *move: None
            for pool in self.pools:
                pool.forget()
            assert self.regions.reserve(counts)
            blocks = self.pools[group].allocate(counts[group], 1)
            self.regions.check_integrity()
            assert self.regions.free_bytes < size
            self.pools[group].release(blocks, 1, None)


RegionMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, derandomize=True, deadline=None, database=None
)
TestRegionMachine = RegionMachine.TestCase


def test_a_single_group_has_all_of_it_and_never_moves() -> None:
    regions = BlockRegions(Arena.holding((8,), (5,)), lambda *move: pytest.fail("moved"))
    assert regions.pools[0].blocks == range(1, 6) and regions.arena.nbytes == 48
    assert regions.reserve([5]) and not regions.reserve([6])
    assert regions.pools[0].allocate(5, 1) == [1, 2, 3, 4, 5]


def test_what_one_group_frees_another_takes_and_the_living_move() -> None:
    moves: list[tuple[int, int, int]] = []
    regions = BlockRegions(Arena.holding((2, 3), (6, 0)), lambda *move: moves.append(move))
    full, window = regions.pools
    # 12 bytes and the null block's 3: four blocks of the group that lies first, in its place.
    assert regions.arena.order == (1, 0) and regions.arena.capacity >= 12
    assert regions.reserve([6, 0])
    held = full.allocate(6, 1)
    full.release(held[::2], 1, None)
    assert regions.reserve([0, 2])
    assert window.allocate(2, 2) == [1, 2]
    regions.check_integrity()
    assert {group for group, _, _ in moves} == {0} and len(moves) >= 1
    assert all(source * 2 < 9 <= target * 2 for _, source, target in moves)
    assert not regions.reserve([1, 1])


def test_three_groups_push_one_another() -> None:
    regions = BlockRegions(Arena.holding((4, 4, 4), (2, 2, 2)), lambda *move: None)
    for group, pool in enumerate(regions.pools):
        counts = [0, 0, 0]
        counts[group] = 2
        assert regions.reserve(counts)
        pool.allocate(2, group)
    regions.check_integrity()
    regions.pools[2].release(sorted(regions.pools[2]._owners), 2, None)
    assert regions.reserve([2, 0, 0])
    regions.pools[0].allocate(2, 0)
    regions.check_integrity()


def test_what_three_groups_keep_free_is_never_handed_out() -> None:
    regions = BlockRegions(Arena.holding((4, 4, 4), (2, 2, 2)), lambda *move: None)
    for group, count in ((1, 3), (0, 3)):
        counts = [0, 0, 0]
        counts[group] = count
        assert regions.reserve(counts)
        regions.pools[group].allocate(count, 1)
    # An empty block is there, and its bytes are those that let regions slide.
    counts = [min(1, pool.num_empty) for pool in regions.pools]
    assert sum(counts) == 1 and regions.free_bytes == 0
    assert not regions.reserve(counts)
    regions.check_integrity()


def test_the_oldest_of_all_groups_is_evicted_first() -> None:
    regions = BlockRegions(Arena.holding((4, 4), (4, 4)), lambda *move: None)
    for group, pool in enumerate(regions.pools):
        counts = [0, 0]
        counts[group] = 4
        assert regions.reserve(counts)
        blocks = pool.allocate(4, 1)
        for block in blocks:
            pool.publish(block, BlockKey(None, b"%d %d" % (group, block)))
        pool.release(blocks, 1, None)
    # The second group needs four: the first one's are older, all of them.
    assert regions.reserve([0, 4])
    assert [pool.num_cached for pool in regions.pools] == [0, 4]


def test_a_run_is_lengthened_and_shortened_at_either_end() -> None:
    with pytest.raises(EngineError, match="a pool without free_blocks cannot shrink"):
        BlockPool(range(1, 5)).shrink(1, 2)
    pool = BlockPool(range(2, 6), FreeBlocks())
    assert pool.allocate(3, 1) == [2, 3, 4]
    with pytest.raises(EngineError, match="2 KV blocks cannot move to 0 empty ones"):
        pool.shrink(1, 3)
    pool = BlockPool(range(2, 6), FreeBlocks())
    pool.allocate(3, 1)
    pool.extend(1, 2)
    pool.extend(-1, 1)
    assert pool.blocks == range(1, 8) and pool.num_empty == 4
    assert pool.shrink(-1, 3) == [(2, 5), (3, 6)]
    pool.check_integrity()
    pool.release([4, 5, 6], 1, None)
    assert pool.shrink(1, 4) == [] and pool.blocks == range(4, 4)
    pool.check_integrity()


@pytest.mark.parametrize("highest", [False, True])
def test_holes_nearest_to_the_fixed_end_come_first(highest: bool) -> None:
    free_blocks = FreeBlocks(highest_first=highest)
    free_blocks.extend([5, 2, 9])
    free_blocks.append(7)
    assert free_blocks.discard(9) and not free_blocks.discard(9) and 9 not in free_blocks
    free_blocks.append(9)
    assert sorted(free_blocks) == [2, 5, 7, 9] and len(free_blocks) == 4
    assert [free_blocks.pop() for _ in range(4)] == sorted([2, 5, 7, 9], reverse=highest)
    with pytest.raises(IndexError):
        free_blocks.pop()


def test_holes_forget_what_was_discarded() -> None:
    free_blocks = FreeBlocks()
    for turn in range(2000):
        free_blocks.append(turn)
        free_blocks.discard(turn)
    assert len(free_blocks._heap) <= 64 and not free_blocks
