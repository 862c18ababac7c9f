from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.errors import EngineError
from headrace.kv.block_pool import NULL_BLOCK, BlockPool
from headrace.kv.prefix_cache import BlockKey

ROOT = BlockKey(None, b"root")


def key(name: str) -> BlockKey:
    return BlockKey(ROOT, name.encode())


def test_null_block_is_never_handed_out() -> None:
    pool = BlockPool(range(1, 5))
    assert sorted(pool.allocate(4, owner=1)) == [1, 2, 3, 4]
    assert NULL_BLOCK not in pool.allocate(0, owner=1)
    with pytest.raises(EngineError, match="sequence 2 needs 1"):
        pool.allocate(1, owner=2)


def test_a_block_is_free_when_its_last_owner_lets_go() -> None:
    pool = BlockPool(range(1, 3))
    (block,) = pool.allocate(1, owner=1)
    pool.share(block, owner=2)
    assert pool.owners(block) == {1, 2}
    pool.release([block], 1, None)
    assert pool.num_free == 1
    pool.release([block], 2, None)
    assert pool.num_free == 2
    pool.check_integrity()


def test_freeing_what_one_does_not_hold_is_an_error_that_names_the_owners() -> None:
    pool = BlockPool(range(1, 3))
    (block,) = pool.allocate(1, owner=7)
    with pytest.raises(EngineError, match=r"sequence 8 freed KV block \d+, which is held by \[7\]"):
        pool.release([block], 8, None)
    pool.release([block], 7, None)
    with pytest.raises(EngineError, match="held by no sequence"):
        pool.release([block], 7, None)


def test_sharing_needs_content_and_happens_once() -> None:
    pool = BlockPool(range(1, 3))
    with pytest.raises(EngineError, match="cannot share KV block"):
        pool.share(1, owner=1)
    (block,) = pool.allocate(1, owner=1)
    with pytest.raises(EngineError, match="already holds"):
        pool.share(block, owner=1)


def test_eviction_is_least_recently_used_and_takes_tails_first() -> None:
    pool = BlockPool(range(1, 5))
    old = pool.allocate(2, owner=1)
    young = pool.allocate(2, owner=2)
    keys = {block: key(str(block)) for block in old + young}
    for block in old + young:
        pool.publish(block, keys[block])
    pool.release(reversed(old), 1, None)
    pool.release(reversed(young), 2, None)
    pool.share(old[0], owner=3)
    pool.release([old[0]], 3, None)
    assert pool.allocate(4, owner=4) == [old[1], young[1], young[0], old[0]]
    assert all(pool.index.find(k) is None for k in keys.values())


def test_cached_blocks_survive_while_empty_ones_are_left() -> None:
    pool = BlockPool(range(1, 4))
    cached, other = pool.allocate(2, owner=1)
    pool.publish(cached, key("a"))
    pool.release([cached, other], 1, None)
    assert cached not in pool.allocate(2, owner=2)
    assert pool.index.find(key("a")) is not None
    assert pool.allocate(1, owner=2) == [cached]
    assert pool.index.find(key("a")) is None


def test_a_fenced_block_waits_for_its_step() -> None:
    pool = BlockPool(range(1, 3))
    first, second = pool.allocate(2, owner=1)
    pool.release([first], 1, fence=4)
    pool.release([second], 1, fence=5)
    assert (pool.num_free, pool.num_pending) == (0, 2)
    pool.collected(3)
    assert pool.num_free == 0
    pool.collected(4)
    assert pool.allocate(1, owner=2) == [first]
    pool.collected(5)
    assert pool.num_free == 1
    pool.check_integrity()


@pytest.mark.parametrize("again", [4, 6])
def test_a_fenced_block_that_is_shared_again_waits_for_its_last_fence(again: int) -> None:
    pool = BlockPool(range(1, 2))
    (block,) = pool.allocate(1, owner=1)
    pool.publish(block, key("a"))
    pool.release([block], 1, fence=4)
    pool.share(block, owner=2)
    pool.collected(3)
    assert pool.owners(block) == {2}
    pool.release([block], 2, fence=again)
    pool.collected(again - 1)
    assert pool.num_free == 0
    pool.collected(again)
    assert pool.num_free == 1
    pool.check_integrity()


def test_forget_drops_keys_and_nothing_else() -> None:
    pool = BlockPool(range(1, 4))
    held, cached = pool.allocate(2, owner=1)
    for block in (held, cached):
        pool.publish(block, key(str(block)))
    pool.release([cached], 1, None)
    pool.forget()
    pool.check_integrity()
    assert len(pool.index) == 0
    assert pool.owners(held) == {1}
    assert pool.num_free == 2


@pytest.mark.parametrize("damage", ["lost", "doubled", "stale key", "unfenced"])
def test_integrity_check_finds_damage(damage: str) -> None:
    pool = BlockPool(range(1, 4))
    (block,) = pool.allocate(1, owner=1)
    if damage == "lost":
        del pool._owners[block]
    elif damage == "doubled":
        pool._empty.append(block)
    elif damage == "stale key":
        pool.index.put(key("a"), pool._empty[0])
    else:
        pool.release([block], 1, fence=3)
        pool._fences.clear()
    with pytest.raises(EngineError):
        pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """The pool against a plain model: sets of holders, and the steps each block must wait for."""

    @initialize(size=st.integers(2, 8))
    def start(self, size: int) -> None:
        self.pool = BlockPool(range(1, size))
        self.held: dict[int, set[int]] = {}
        self.fences: dict[int, int] = {}
        self.step = self.done = 0
        self.names = 0

    @rule(owner=st.integers(1, 3), count=st.integers(0, 3))
    def allocate(self, owner: int, count: int) -> None:
        if count > self.pool.num_free:
            with pytest.raises(EngineError):
                self.pool.allocate(count, owner)
            return
        for block in self.pool.allocate(count, owner):
            assert block not in self.held
            assert self.fences.get(block, 0) <= self.done
            self.held[block] = {owner}

    @precondition(lambda self: self.held)
    @rule(data=st.data(), fenced=st.booleans())
    def release(self, data: st.DataObject, fenced: bool) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        owner = data.draw(st.sampled_from(sorted(self.held[block])))
        fenced = fenced and self.step > self.done
        self.pool.release([block], owner, self.step if fenced else None)
        self.held[block].remove(owner)
        if not self.held[block]:
            del self.held[block]
            self.fences[block] = self.step if fenced else 0

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        if self.pool.index.key_of(block) is None:
            self.names += 1
            self.pool.publish(block, key(str(self.names)))

    @rule(data=st.data(), owner=st.integers(1, 3))
    def share_cached(self, data: st.DataObject, owner: int) -> None:
        known = [b for b in self.pool.blocks if self.pool.index.key_of(b) and owner not in self.held.get(b, ())]
        if known:
            block = data.draw(st.sampled_from(known))
            self.pool.share(block, owner)
            self.held.setdefault(block, set()).add(owner)

    @rule()
    def launch(self) -> None:
        self.step += 1

    @rule()
    def collect(self) -> None:
        self.done = min(self.step, self.done + 1)
        self.pool.collected(self.done)

    @rule()
    def forget(self) -> None:
        self.pool.forget()

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        for block in self.pool.blocks:
            assert self.pool.owners(block) == self.held.get(block, set())
        waiting = sum(1 for b, fence in self.fences.items() if b not in self.held and fence > self.done)
        assert self.pool.num_free >= len(self.pool.blocks) - len(self.held) - waiting
        assert self.pool.num_free + self.pool.num_pending + len(self.held) == len(self.pool.blocks)


PoolMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, derandomize=True, deadline=None, database=None
)
TestPoolMachine = PoolMachine.TestCase
