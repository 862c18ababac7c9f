"""StateBlocks: who owns which state block. A block holds all state layers of one sequence at one number of tokens.

A block is *live* (its sequence's steps advance it in place), a *shadow* (a copy of the live one at an earlier number of
tokens), or a *snapshot* in the prefix cache, under the key of the KV block that ends at its number of tokens. A live block is
never published: launched steps may advance it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from headrace.errors import EngineError
from headrace.kv.block_pool import NULL_BLOCK
from headrace.kv.block_regions import BlockRegions
from headrace.kv.blocks import SequenceBlocks, SequenceStates
from headrace.kv.prefix_cache import BlockKey, KeyChain, PrefixIndex

_SAVES = -1
"""Owner of the snapshots that launched steps take."""


class StateOp(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A change of a state block, in the order of a step's others."""

    kind: Literal["zero", "copy"]
    source: int
    """Block that is copied; 0 for ``zero``."""
    target: int


StateOps = tuple[tuple[StateOp, ...], tuple[StateOp, ...]]
"""Operations before and behind the rows of a step."""


@dataclasses.dataclass(slots=True, eq=False)
class Save:
    """A snapshot that a step takes of a sequence's state after ``count`` tokens. It is published when the step is collected."""

    blocks: SequenceBlocks
    count: int
    block: int


@dataclasses.dataclass(slots=True)
class _Op:
    """An operation of the next plan, with the blocks' current numbers."""

    kind: Literal["zero", "copy"]
    source: int
    target: int

    def rename(self, source: int, target: int) -> None:
        self.source = target if self.source == source else self.source
        self.target = target if self.target == source else self.target


class StateBlocks:
    """Allocates and frees state blocks, and makes the operations of plans.

    Args:
        group: index of the states among the arena's groups.
        grid: a multiple of the block size, at whose multiples snapshots are taken.
        most: number of state blocks that may be findable, or may become so, at a time.
        kv: index of the full KV group: a snapshot is findable as long as the KV block that ends there is; None: there is none.
        current: whether blocks of a sequence may be shared still.
    """

    def __init__(
        self,
        regions: BlockRegions,
        group: int,
        block_size: int,
        grid: int,
        most: int,
        kv: PrefixIndex | None,
        current: Callable[[SequenceBlocks], bool],
    ) -> None:
        self.pool = regions.pools[group]
        self.grid = grid
        self.most = most
        self.skipped: dict[str, int] = {}
        """Reason -> snapshots that were not taken for it."""
        self.num_saved: dict[str, int] = {}
        """Reason -> snapshots that were taken for it."""
        self._regions, self._block_size, self._kv, self._current = regions, block_size, kv, current
        self._one = [0] * (len(regions.pools) - 1) + [1]
        self._before: list[_Op] = []
        self._after: list[_Op] = []
        self._saves: list[Save] = []
        self._shadows: dict[int, SequenceBlocks] = {}
        """seq_id -> a sequence with a shadow, that with the oldest one first."""
        self._started: list[SequenceBlocks] = []
        """Sequences whose source is held for the next plan."""
        if kv is not None:
            kv.dropped = self._forget

    @property
    def num_live(self) -> int:
        """Blocks that sequences hold, shadows among them."""
        return self.pool.num_used - len(self._saves)

    @property
    def num_findable(self) -> int:
        """Blocks that the prefix cache can find, or will when the launched steps are collected."""
        return len(self.pool.index) + len(self._saves)

    def nearest(self, keys: KeyChain, boundary: int, uncut: Callable[[int], bool]) -> tuple[int, int]:
        """Returns the largest number of tokens up to ``boundary`` with a snapshot, and its block; (0, null block): there is
        none."""
        index, size = self.pool.index, self._block_size
        if len(index):
            for count in range(boundary - boundary % self.grid, 0, -self.grid):
                found = index.find(keys[count // size - 1])
                if found is not None and uncut(count):
                    return count, found[0]
        return 0, NULL_BLOCK

    def boundary(self, num_tokens: int, uncut: Callable[[int], bool]) -> int:
        """The largest number of tokens up to ``num_tokens`` at which a snapshot can be taken; 0: there is none."""
        count = num_tokens - num_tokens % self.grid
        while count > 0 and not uncut(count):
            count -= self.grid
        return count

    # ------------------------------------------------------------------ a sequence

    def hold(self, blocks: SequenceBlocks, source: int) -> None:
        """Lets the sequence start from a snapshot, or from the state of another sequence."""
        if source != NULL_BLOCK:
            self.pool.share(source, blocks.seq_id)
            blocks.states.source = source

    def start(self, blocks: SequenceBlocks, *, take: bool) -> None:
        """Gives a sequence its live block: zeros, or a copy of its source.

        ``take``: the source, which nothing else holds, becomes the live block, since there is no room for a copy.

        Raises:
            EngineError: there is no block.
        """
        own = blocks.states
        if take:
            self.pool.unpublish(own.source)
            own.live, own.source = own.source, NULL_BLOCK
            return
        own.live = self._allocate(blocks.seq_id)
        if own.live == NULL_BLOCK:
            raise EngineError(f"sequence {blocks.seq_id} was admitted without a block for its state")
        self._before.append(_Op("copy" if own.source else "zero", own.source, own.live))
        if own.source != NULL_BLOCK:
            self._started.append(blocks)

    def expect_fork(self, blocks: SequenceBlocks, start: int, count: int) -> None:
        """Other samples are to start from the state after ``count`` tokens of a sequence that has just started at ``start``."""
        own = blocks.states
        own.fork_count = count
        if count == start and own.source != NULL_BLOCK:
            # The snapshot that the sequence starts from is that state.
            own.fork, own.source = own.source, NULL_BLOCK
            self._started.remove(blocks)

    def fork(self, parent: SequenceBlocks, child: SequenceBlocks) -> None:
        """Lets a sample start from the state that its parent keeps for it."""
        self.hold(child, parent.states.fork)
        child.states.fork_count = 0

    def end_fork(self, blocks: SequenceBlocks) -> None:
        """The samples have taken the state that was kept for them: the prefix cache takes it, too."""
        own = blocks.states
        if own.fork == NULL_BLOCK:
            return
        self._publish(blocks, own.fork, own.fork_count, "samples")
        self.pool.release([own.fork], blocks.seq_id, None)
        own.fork = NULL_BLOCK

    def free(self, blocks: SequenceBlocks, fence: int | None) -> None:
        """Releases the sequence's blocks. ``fence``: as for ``BlockPool.release``."""
        own = blocks.states
        held = [block for block in (own.live, own.source, own.fork, own.shadow) if block != NULL_BLOCK]
        self._shadows.pop(blocks.seq_id, None)
        self.pool.release(held, blocks.seq_id, fence)
        blocks.states = SequenceStates()

    # ------------------------------------------------------------------ copies of a live state

    def save(self, blocks: SequenceBlocks, count: int) -> Save | None:
        """Makes the next plan copy the live state behind the row that ends at ``count`` tokens.

        Returns the snapshot, which is to be passed to ``saved``; None: the copy is for samples, or there is no room.
        """
        own = blocks.states
        if count == own.fork_count:
            own.fork = self._allocate(blocks.seq_id)
            if own.fork != NULL_BLOCK:
                self._after.append(_Op("copy", own.live, own.fork))
                return None
        if not self._make_room():
            self._skip("budget")
            return None
        block = self._allocate(_SAVES)
        if block == NULL_BLOCK:
            self._skip("memory")
            return None
        self._after.append(_Op("copy", own.live, block))
        save = Save(blocks, count, block)
        self._saves.append(save)
        return save

    def saved(self, save: Save, *, fine: bool) -> None:
        """Publishes a snapshot whose step has been collected, or drops it: ``fine`` is False where its sequence failed."""
        self._saves.remove(save)
        point = save.blocks.states.points.get(save.count, "prompt")
        if not (fine and self._publish(save.blocks, save.block, save.count, point)):
            self._skip("ended")
        self.pool.release([save.block], _SAVES, None)
        if point == "period":
            self._renew(save.blocks)

    def shade(self, blocks: SequenceBlocks, count: int) -> None:
        """Makes the next plan copy the live state, of ``count`` tokens, to the sequence's shadow before its row runs."""
        own = blocks.states
        if own.shadow == NULL_BLOCK and self.most:
            own.shadow = self._allocate(blocks.seq_id)
        if own.shadow != NULL_BLOCK:
            self._shadows[blocks.seq_id] = blocks
            own.shadow_count = count
            self._before.append(_Op("copy", own.live, own.shadow))

    def publish_shadow(self, blocks: SequenceBlocks, num_collected: int) -> None:
        """Lets the prefix cache have the shadow of a sequence that is about to release its blocks."""
        own = blocks.states
        if own.shadow != NULL_BLOCK and own.shadow_count <= num_collected:
            self._publish(blocks, own.shadow, own.shadow_count, "end")

    @property
    def num_shadows(self) -> int:
        """Blocks of shadows, which ``drop_shadow`` frees one by one."""
        return len(self._shadows)

    def drop_shadow(self) -> bool:
        """Frees the block of a shadow; returns False if there is none."""
        if not self._shadows:
            return False
        blocks = self._shadows.pop(next(iter(self._shadows)))
        self._drop(blocks, blocks.states.shadow)
        blocks.states.shadow = NULL_BLOCK
        return True

    def drop_forks(self, sequences: Iterable[SequenceBlocks]) -> bool:
        """Frees what is kept for samples that have not started; returns whether there was any."""
        holders = [blocks for blocks in sequences if blocks.states.fork != NULL_BLOCK]
        for blocks in holders:
            self._drop(blocks, blocks.states.fork)
            blocks.states.fork = NULL_BLOCK
        return bool(holders)

    def _drop(self, blocks: SequenceBlocks, block: int) -> None:
        """Releases a copy, and takes its copying out of the next plan: the block may be another's there."""
        # No fence: what is launched before writes it before a later plan does.
        self.pool.release([block], blocks.seq_id, None)
        for ops in (self._before, self._after):
            ops[:] = [op for op in ops if op.target != block]

    # ------------------------------------------------------------------ plans

    def take_ops(self) -> StateOps:
        """Returns the operations before and behind the model of the next plan, in order. Releases what they were held for."""
        for blocks in self._started:
            self.pool.release([blocks.states.source], blocks.seq_id, None)
            blocks.states.source = NULL_BLOCK
            self._renew(blocks)
        self._started.clear()
        before, after = (tuple(StateOp(op.kind, op.source, op.target) for op in ops) for ops in (self._before, self._after))
        self._before.clear()
        self._after.clear()
        return before, after

    def moved(self, source: int, target: int, sequences: Iterable[SequenceBlocks]) -> None:
        """Renames a block that has moved."""
        for op in (*self._before, *self._after):
            op.rename(source, target)
        for save in self._saves:
            save.block = target if save.block == source else save.block
        for blocks in sequences:
            own = blocks.states
            for name in ("live", "source", "fork", "shadow"):
                if getattr(own, name) == source:
                    setattr(own, name, target)

    def owners(self, sequences: Iterable[SequenceBlocks]) -> dict[int, set[int]]:
        """block -> its owners, as sequences and snapshots under way name them."""
        owners: dict[int, set[int]] = {save.block: {_SAVES} for save in self._saves}
        for blocks in sequences:
            own = blocks.states
            for block in (own.live, own.source, own.fork, own.shadow):
                if block != NULL_BLOCK:
                    owners.setdefault(block, set()).add(blocks.seq_id)
        return owners

    # ------------------------------------------------------------------ helpers

    def _allocate(self, owner: int) -> int:
        """Returns a block, or the null block if there is none."""
        return self.pool.allocate(1, owner)[0] if self.reserve(self._one) else NULL_BLOCK

    def reserve(self, counts: list[int]) -> bool:
        """``BlockRegions.reserve``, which shadows make room for."""
        while not self._regions.reserve(counts):
            if not self.drop_shadow():
                return False
        return True

    def _make_room(self) -> bool:
        """Makes room for one findable block more within the limit; returns False if there is none."""
        while self.num_findable >= self.most:
            if not self.pool.num_cached:
                return False
            self.pool.evict()
        return True

    def _publish(self, blocks: SequenceBlocks, block: int, count: int, point: str) -> bool:
        """Makes a held block findable, if its KV is and its tokens are still those of the current weights."""
        if not self.most or blocks.keys is None or not self._current(blocks) or count > len(blocks.token_ids):
            return False
        key = blocks.keys[count // self._block_size - 1]
        if self._kv is not None and self._kv.find(key) is None:
            return False
        if self.pool.index.find(key) is None:
            if not self._make_room():
                return False
            self.pool.publish(block, key)
            self.num_saved[point] = self.num_saved.get(point, 0) + 1
        return True

    def _renew(self, blocks: SequenceBlocks) -> None:
        """Lets the snapshots of the sequence's turns be evicted after those that have been used until now."""
        if blocks.keys is None or not self._current(blocks):
            return
        for count in blocks.states.turns:
            found = self.pool.index.find(blocks.keys[count // self._block_size - 1])
            if found is not None and self.pool.is_free(found[0]):
                self.pool.share(found[0], blocks.seq_id)
                self.pool.release([found[0]], blocks.seq_id, None)

    def _skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def _forget(self, key: BlockKey) -> None:
        """The KV block with this key can no longer be found: neither can the state at its end."""
        found = self.pool.index.find(key)
        if found is not None:
            self.pool.unpublish(found[0])
