"""Strips of one arena: whatever is taken, freed, found again and moved, no byte has two owners and no content is lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.errors import EngineError
from headrace.kv.block_pool import BlockPool
from headrace.kv.holes import Holes
from headrace.kv.prefix_cache import BlockKey
from headrace.kv.strips import Strips
from headrace.spec import Arena

SIZES = [(3,), (1, 1), (5, 2), (7, 7), (2, 9), (13, 8), (3, 1, 5), (4, 6, 9), (2, 2, 3, 11)]


class StripMachine(RuleBasedStateMachine):
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
        self.strips = Strips(self.arena, self.moved)
        self.pools = self.strips.pools

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
        fits = needed <= self.strips.free_bytes
        before = [(set(pool._owners), pool.blocks) for pool in self.pools]
        assert self.strips.provide(counts) == fits
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
        self.strips.check_integrity()
        used = 0
        for group, pool in enumerate(self.pools):
            assert {block for of, block in self.held if of == group} == set(pool._owners)
            for block in (*pool._owners, *pool._pending, *pool._cached):
                expected = [(self.patterns[group, block], place) for place in range(self.arena.block_bytes[group])]
                at = self.bytes_of(group, block)
                assert self.memory[at.start : at.stop] == expected
            used += self.arena.block_bytes[group] * (len(pool._owners) + len(pool._pending))
        assert self.strips.used_bytes == used and self.strips.free_bytes == self.arena.capacity - used
        assert self.memory[: self.arena.reserved] == [None] * self.arena.reserved

    def teardown(self) -> None:
        if not hasattr(self, "strips"):
            return
        for (group, block), owners in sorted(self.held.items()):
            for owner in sorted(owners):
                self.pools[group].release([block], owner, None)
        for pool in self.pools:
            pool.collected(self.step)
        self.strips.check_integrity()
        assert self.strips.free_bytes == self.arena.capacity
        # All of it is any single group's to take, up to less than a block; then there is none for another.
        for group, size in enumerate(self.arena.block_bytes):
            counts = [0] * len(self.pools)
            counts[group] = self.arena.capacity // size
            self.patterns.clear()
            self.held.clear()
            self.strips._moved = lambda *move: None
            for pool in self.pools:
                pool.forget()
            assert self.strips.provide(counts)
            blocks = self.pools[group].allocate(counts[group], 1)
            self.strips.check_integrity()
            assert self.strips.free_bytes < size
            self.pools[group].release(blocks, 1, None)


StripMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, derandomize=True, deadline=None, database=None
)
TestStripMachine = StripMachine.TestCase


def test_a_single_group_has_all_of_it_and_never_moves() -> None:
    strips = Strips(Arena.holding((8,), (5,)), lambda *move: pytest.fail("moved"))
    assert strips.pools[0].blocks == range(1, 6) and strips.arena.nbytes == 48
    assert strips.provide([5]) and not strips.provide([6])
    assert strips.pools[0].allocate(5, 1) == [1, 2, 3, 4, 5]


def test_what_one_group_frees_another_takes_and_the_living_move() -> None:
    moves: list[tuple[int, int, int]] = []
    strips = Strips(Arena.holding((2, 3), (6, 0)), lambda *move: moves.append(move))
    full, window = strips.pools
    # 12 bytes and the null block's 3: four blocks of the group that lies first, in its place.
    assert strips.arena.order == (1, 0) and strips.arena.capacity >= 12
    assert strips.provide([6, 0])
    held = full.allocate(6, 1)
    full.release(held[::2], 1, None)
    assert strips.provide([0, 2])
    assert window.allocate(2, 2) == [1, 2]
    strips.check_integrity()
    assert {group for group, _, _ in moves} == {0} and len(moves) >= 1
    assert all(source * 2 < 9 <= target * 2 for _, source, target in moves)
    assert not strips.provide([1, 1])


def test_three_groups_push_one_another() -> None:
    strips = Strips(Arena.holding((4, 4, 4), (2, 2, 2)), lambda *move: None)
    for group, pool in enumerate(strips.pools):
        counts = [0, 0, 0]
        counts[group] = 2
        assert strips.provide(counts)
        pool.allocate(2, group)
    strips.check_integrity()
    strips.pools[2].release(sorted(strips.pools[2]._owners), 2, None)
    assert strips.provide([2, 0, 0])
    strips.pools[0].allocate(2, 0)
    strips.check_integrity()


def test_what_three_groups_keep_free_is_never_handed_out() -> None:
    strips = Strips(Arena.holding((4, 4, 4), (2, 2, 2)), lambda *move: None)
    for group, count in ((1, 3), (0, 3)):
        counts = [0, 0, 0]
        counts[group] = count
        assert strips.provide(counts)
        strips.pools[group].allocate(count, 1)
    # An empty block is there, and its bytes are those that let strips slide.
    counts = [min(1, pool.num_empty) for pool in strips.pools]
    assert sum(counts) == 1 and strips.free_bytes == 0
    assert not strips.provide(counts)
    strips.check_integrity()


def test_the_oldest_of_all_groups_is_evicted_first() -> None:
    strips = Strips(Arena.holding((4, 4), (4, 4)), lambda *move: None)
    for group, pool in enumerate(strips.pools):
        counts = [0, 0]
        counts[group] = 4
        assert strips.provide(counts)
        blocks = pool.allocate(4, 1)
        for block in blocks:
            pool.publish(block, BlockKey(None, b"%d %d" % (group, block)))
        pool.release(blocks, 1, None)
    # The second group needs four: the first one's are older, all of them.
    assert strips.provide([0, 4])
    assert [pool.num_cached for pool in strips.pools] == [0, 4]


def test_a_run_is_lengthened_and_shortened_at_either_end() -> None:
    with pytest.raises(EngineError, match="its own for good"):
        BlockPool(range(1, 5)).cede(1, 2)
    pool = BlockPool(range(2, 6), Holes())
    assert pool.allocate(3, 1) == [2, 3, 4]
    with pytest.raises(EngineError, match="2 KV blocks are to move to 0 empty ones"):
        pool.cede(1, 3)
    pool = BlockPool(range(2, 6), Holes())
    pool.allocate(3, 1)
    pool.extend(1, 2)
    pool.extend(-1, 1)
    assert pool.blocks == range(1, 8) and pool.num_empty == 4
    assert pool.cede(-1, 3) == [(2, 5), (3, 6)]
    pool.check_integrity()
    pool.release([4, 5, 6], 1, None)
    assert pool.cede(1, 4) == [] and pool.blocks == range(4, 4)
    pool.check_integrity()


@pytest.mark.parametrize("highest", [False, True])
def test_holes_nearest_to_the_fixed_end_come_first(highest: bool) -> None:
    holes = Holes(highest_first=highest)
    holes.extend([5, 2, 9])
    holes.append(7)
    assert holes.discard(9) and not holes.discard(9) and 9 not in holes
    holes.append(9)
    assert sorted(holes) == [2, 5, 7, 9] and len(holes) == 4
    assert [holes.pop() for _ in range(4)] == sorted([2, 5, 7, 9], reverse=highest)
    with pytest.raises(IndexError):
        holes.pop()


def test_holes_forget_what_was_discarded() -> None:
    holes = Holes()
    for turn in range(2000):
        holes.append(turn)
        holes.discard(turn)
    assert len(holes._heap) <= 64 and not holes
