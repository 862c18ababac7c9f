"""KVCacheManager: allocates, shares and frees the blocks of sequences over all cache groups."""

from __future__ import annotations

import dataclasses

from headrace.config import CacheConfig
from headrace.errors import EngineError
from headrace.kv.block_pool import NULL_BLOCK
from headrace.kv.block_regions import BlockRegions
from headrace.kv.blocks import SequenceBlocks
from headrace.kv.identity import CacheIdentity, SparseIdentity
from headrace.kv.prefix_cache import Change, Hit, KeyChain, cached_rows, find_hit
from headrace.kv.states import StateBlocks
from headrace.model_spec import CacheGroup

NewBlocks = tuple[tuple[int, ...], ...]
"""Per cache group, the blocks to append to a sequence's block table."""
Move = tuple[int, int, int]
"""(cache group, source block, target block): the content of the source is copied to the target."""


class KVCacheManager:
    """Allocates, shares and frees the blocks of sequences.

    A full block becomes findable by others when the step that computed it has been collected (``advance``), not when it is
    launched: a row can still fail until then, and others must not use the KV of a failed row.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.block_size = config.block_size
        self.groups: tuple[CacheGroup, ...] = config.groups
        self.caching = config.enable_prefix_caching
        self._regions = BlockRegions(config.arena, self._moved, len(config.groups))
        self.pools = self._regions.pools[: len(config.groups)]
        """Pools of the KV groups."""
        self.moves: list[Move] = []
        """Moves of blocks since the last ``take_moves``, in order."""
        self._window_groups = tuple((i, group.window) for i, group in enumerate(self.groups) if group.window is not None)
        self._indexes = tuple(pool.index for pool in self.pools)
        whole = (index for index, group in zip(self._indexes, self.groups, strict=True) if group.window is None)
        self._with_rows = next(whole, self._indexes[0])
        """Index whose keys keep the rows of tokens: of a group without a window, if there is one."""
        self._bytes_per_block = sum(config.arena.block_bytes[: len(config.groups)])
        """Sum over the KV groups of the bytes of one block."""
        self.states: StateBlocks | None = None
        """None: the model has no state layers."""
        if config.states is not None:
            self.states = self._state_blocks(config, config.states.block_bytes)
        self._weight_version = 0
        self._generation = 0
        self._sequences: dict[int, SequenceBlocks] = {}
        self.no_blocks: NewBlocks = tuple(() for _ in config.groups)
        """Table changes of a sequence that has all of its blocks already."""

    def _state_blocks(self, config: CacheConfig, block_bytes: int) -> StateBlocks:
        full = next((index for index, group in zip(self._indexes, self.groups, strict=True) if group.window is None), None)
        most = config.state_snapshot_bytes // block_bytes if self.caching else 0
        return StateBlocks(
            self._regions,
            len(config.groups),
            self.block_size,
            config.state_grid,
            most,
            full,
            lambda blocks: blocks.generation == self._generation,
        )

    # ------------------------------------------------------------------ sequences

    def open(self, seq_id: int, token_ids: list[int], identity: CacheIdentity) -> SequenceBlocks:
        """Creates empty tables for a sequence. The caller may append to ``token_ids`` later.

        The manager fills in the identity's weight version.
        """
        return SequenceBlocks(seq_id, token_ids, identity, len(self.groups))

    def match(self, blocks: SequenceBlocks) -> Hit:
        """Returns the longest cached prefix of the known tokens. Acquires nothing: ``attach`` does.

        The prefix is shorter than the sequence, so that its last token is computed, and never ends inside an atomic item.
        """
        if not self.caching or not blocks.identity.known:
            return self.no_hit()
        keys, identity = self._current_keys(blocks), blocks.identity
        most = (len(blocks.token_ids) - 1) // self.block_size
        if blocks.rows is not None:
            most = len(cached_rows(self._with_rows, keys, most))
        attention, state = -1, NULL_BLOCK
        while True:
            hit = find_hit(self._indexes, self.groups, keys, most, self.block_size)
            boundary = self._uncut_boundary(hit.num_tokens, identity)
            if self.states is not None:
                attention = boundary if attention < 0 else attention
                boundary, state = self.states.nearest(keys, boundary, identity.uncut)
            if boundary == hit.num_tokens:
                return hit if self.states is None else dataclasses.replace(hit, state=state, attention_tokens=attention)
            most = boundary // self.block_size

    def no_hit(self) -> Hit:
        return Hit(0, tuple([] for _ in self.groups))

    def fits(
        self, blocks: SequenceBlocks, hit: Hit | None, num_tokens: int, first_tokens: int, *, copied: bool = False
    ) -> bool:
        """True if all ``num_tokens`` of a sequence that starts from ``hit`` (None: from its tables) can have blocks now.

        A window group frees blocks as the sequence advances: it counts the blocks that the window spans with chunks of
        ``first_tokens``, the smallest possible. ``copied``: the state of the hit is copied, else a snapshot that nothing else
        holds may become the sequence's.
        """
        start = blocks.capacity if hit is None else hit.num_tokens
        new = self._blocks_for(num_tokens) - start // self.block_size
        counts = []
        for group, pool in enumerate(self.pools):
            found = 0 if hit is None else sum(block != NULL_BLOCK and pool.is_free(block) for block in hit.blocks[group])
            window = self.groups[group].window
            needed = new + found
            if window is not None:
                first = self._blocks_for(min(num_tokens, start + first_tokens)) - start // self.block_size
                needed = max(first + found, min(needed, self._most_held(window, first_tokens)))
            counts.append(needed)
        if self.states is None:
            return self._regions.available(counts)
        doubled = copied and hit is not None and hit.state != NULL_BLOCK and self.states.pool.is_free(hit.state)
        return self._regions.available([*counts, 1 + doubled - self.states.num_shadows])

    def start(self, blocks: SequenceBlocks, hit: Hit | None, num_tokens: int, first_tokens: int) -> None:
        """Attaches the hit of a sequence that ``fits``, and gives it a state block. None: it holds blocks already."""
        if self.states is None:
            if hit is not None:
                self.attach(blocks, hit)
            return
        take = False
        if hit is not None:
            free = hit.state != NULL_BLOCK and self.states.pool.is_free(hit.state)
            take = free and not self.fits(blocks, hit, num_tokens, first_tokens, copied=True)
            self.attach(blocks, hit)
        self._sequences[blocks.seq_id] = blocks
        self.states.start(blocks, take=take)

    def attach(self, blocks: SequenceBlocks, hit: Hit) -> None:
        """Starts a sequence's tables, which must be empty, with the blocks of a hit."""
        if blocks.capacity:
            raise EngineError(f"sequence {blocks.seq_id} holds KV blocks already")
        self._sequences[blocks.seq_id] = blocks
        if blocks.identity.known:
            self._current_keys(blocks)
        else:
            blocks.identity = dataclasses.replace(blocks.identity, weight_version=self._weight_version)
            blocks.keys, blocks.generation = None, self._generation
        blocks.num_published = hit.num_tokens // self.block_size
        if blocks.rows is not None and hit.num_tokens and blocks.keys is not None:
            blocks.rows.begin(cached_rows(self._with_rows, blocks.keys, blocks.num_published), hit.num_tokens)
        if self.states is not None:
            self.states.hold(blocks, hit.state)
        self._share(blocks, hit)

    def can_fork(self, parent: SequenceBlocks, boundary: int) -> bool:
        """True if the parent still has every block that a sequence starting at ``boundary`` can see, and its state there."""
        if self.states is not None and not (parent.states.fork and parent.states.fork_count == boundary):
            return False
        return parent.capacity >= boundary and all(
            passed <= self._first_visible(group, boundary) for group, passed in enumerate(parent.num_passed)
        )

    def fork(self, parent: SequenceBlocks, child: SequenceBlocks, boundary: int) -> None:
        """Shares the parent's blocks of the first ``boundary`` tokens (a multiple of the block size) with the child.

        They must have been computed. The parent's ``keep_from`` keeps ``can_fork`` true until then.
        """
        if child.capacity:
            raise EngineError(f"sequence {child.seq_id} holds KV blocks already")
        if not self.can_fork(parent, boundary):
            raise EngineError(f"sequence {parent.seq_id} no longer has the blocks to share with sequence {child.seq_id}")
        count = boundary // self.block_size
        shared = []
        for group, table in enumerate(parent.tables):
            first = self._first_visible(group, boundary)
            shared.append([NULL_BLOCK] * first + table[first:count])
        self._sequences[child.seq_id] = child
        child.generation, child.identity = parent.generation, parent.identity
        child.keys = parent.keys.fork(child.token_ids, count) if parent.keys else None
        child.num_published = min(count, parent.num_published)
        if self.states is not None:
            self.states.fork(parent, child)
        self._share(child, Hit(boundary, tuple(shared)))

    def fork_boundary(self, blocks: SequenceBlocks, num_prompt: int) -> int:
        """Number of prompt tokens that samples can share: full blocks, without the last token, cutting no atomic item."""
        if self.states is not None:
            return self.states.boundary(num_prompt - 1, blocks.identity.uncut)
        return self._uncut_boundary((num_prompt - 1) // self.block_size * self.block_size, blocks.identity)

    def room(self, blocks: SequenceBlocks, start: int, *, pending: bool = False) -> int:
        """Number of tokens from ``start`` that can have blocks now (``pending``: once the launched steps are collected)."""
        spare = 0 if self.states is None else self.states.num_shadows * self._regions.arena.block_bytes[-1]
        return blocks.capacity + self._regions.most_of_each(spare, pending=pending) * self.block_size - start

    def allocate(self, blocks: SequenceBlocks, end: int) -> NewBlocks | None:
        """Allocates blocks for the tokens up to ``end``; returns what to append to the tables, or None if blocks are short.

        The first call after ``attach`` or ``fork`` also returns the shared blocks.
        """
        if end <= blocks.capacity and blocks.unsent * self.block_size == blocks.capacity:
            return self.no_blocks
        count = max(0, self._blocks_for(end) - len(blocks.tables[0]))
        counts = [count] * len(self.pools)
        if not (self._regions.reserve(counts) if self.states is None else self.states.reserve([*counts, 0])):
            return None
        self._sequences[blocks.seq_id] = blocks
        for table, pool in zip(blocks.tables, self.pools, strict=True):
            table.extend(pool.allocate(count, blocks.seq_id))
        new = tuple(tuple(table[blocks.unsent :]) for table in blocks.tables)
        blocks.unsent = len(blocks.tables[0])
        blocks.capacity = blocks.unsent * self.block_size
        return new

    def advance(self, blocks: SequenceBlocks, num_collected: int) -> None:
        """Call when the steps that computed the first ``num_collected`` tokens have been collected and the tokens are known.

        Publishes blocks that have become full. Frees blocks that later tokens of this sequence cannot see; steps in flight
        compute later tokens only.
        """
        full = num_collected // self.block_size
        if full > blocks.num_published and self.caching:
            self._publish(blocks, full)
        due = (full + 1) * self.block_size
        for group, window in self._window_groups:
            seen_from = num_collected if blocks.keep_from is None else min(num_collected, blocks.keep_from)
            passed = self._first_visible(group, seen_from)
            if passed > blocks.num_passed[group]:
                self._pass(blocks, group, passed)
            due = min(due, self.groups[group].unseen_from((passed + 1) * self.block_size, window))
        blocks.due = due

    def free(self, blocks: SequenceBlocks, fence: int | None) -> None:
        """Releases every block and empties the tables.

        Args:
            fence: the last launched step if a step in flight may still write these blocks, else None.
        """
        self._sequences.pop(blocks.seq_id, None)
        for group, (table, pool) in enumerate(zip(blocks.tables, self.pools, strict=True)):
            kept = table[blocks.num_passed[group] :]
            pool.release((block for block in reversed(kept) if block != NULL_BLOCK), blocks.seq_id, fence)
            table.clear()
            blocks.num_passed[group] = 0
        blocks.capacity = blocks.unsent = blocks.num_published = blocks.due = 0
        blocks.keep_from = None
        if self.states is not None:
            self.states.free(blocks, fence)

    def collected(self, step: int) -> None:
        """Call when every step up to ``step`` has been collected."""
        for pool in self._regions.pools:
            pool.collected(step)

    def drop_forks(self) -> bool:
        """Frees state blocks that are kept for samples. Returns whether there were any."""
        return self.states is not None and self.states.drop_forks(self._sequences.values())

    # ------------------------------------------------------------------ the whole cache

    def record_changes(self) -> list[Change]:
        """Returns a list to which every later change of the prefix caches is appended; the caller empties it."""
        changes: list[Change] = []
        for group, pool in enumerate(self._regions.pools):
            pool.index.record(changes, group)
        return changes

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; running sequences publish no more blocks. Returns False if caching is disabled."""
        self._generation += 1
        for pool in self._regions.pools:
            pool.forget()
        return self.caching

    def bump_weight_version(self, number: int = 0) -> int:
        """Separates KV computed from now on from KV computed before. Returns the new version: ``number`` if that is higher than
        the next."""
        self._weight_version = max(number, self._weight_version + 1)
        self.reset_prefix_cache()
        return self._weight_version

    @property
    def num_used(self) -> int:
        """Blocks of all groups that sequences hold or a launched step may still write, in blocks of average size."""
        return -(-self._regions.used_bytes * len(self.groups) // self._bytes_per_block)

    @property
    def num_total(self) -> int:
        """Blocks that fit in the arena, in blocks of average size."""
        return self._regions.arena.capacity * len(self.groups) // self._bytes_per_block

    @property
    def num_pending(self) -> int:
        return sum(pool.num_pending for pool in self._regions.pools)

    def take_moves(self) -> tuple[Move, ...]:
        """Returns the moves since the last call. Copy them in this order before any block allocated since is used."""
        moves = tuple(self.moves)
        self.moves.clear()
        return moves

    def too_small_for(self, num_tokens: int, first_tokens: int) -> str | None:
        """Returns why a sequence of ``num_tokens`` cannot fit in an empty cache, or None if it fits.

        ``first_tokens``: the longest chunk that cannot be split.
        """
        counts = []
        for group in self.groups:
            needed = self._blocks_for(num_tokens)
            if group.window is not None:
                needed = min(needed, self._most_held(group.window, first_tokens))
            counts.append(needed)
        if self.states is not None:
            counts.append(1)
        needed_bytes, capacity = self._regions.bytes_of(counts), self._regions.arena.capacity
        if needed_bytes <= capacity:
            return None
        if len(counts) == 1:
            return (
                f"{num_tokens} tokens need {counts[0]} KV blocks of {self.block_size} tokens "
                f"in the cache group '{self.groups[0].name}', which has {len(self.pools[0].blocks)}"
            )
        where = " and ".join(f"{count} in '{group.name}'" for count, group in zip(counts, self.groups, strict=False))
        if self.states is not None:
            where += f", and one block of state of {self._regions.arena.block_bytes[-1]:,} bytes"
        return (
            f"{num_tokens} tokens need KV blocks of {self.block_size} tokens as follows: {where}; "
            f"these are {needed_bytes:,} bytes, and all groups share {capacity:,}"
        )

    def check_integrity(self) -> None:
        """Raises EngineError unless pools are consistent and their owners match the sequences' tables."""
        self._regions.check_integrity()
        for group, pool in enumerate(self.pools):
            owners: dict[int, set[int]] = {}
            for seq_id, blocks in self._sequences.items():
                for block in blocks.tables[group]:
                    if block != NULL_BLOCK:
                        owners.setdefault(block, set()).add(seq_id)
            if stray := owners.keys() - set(pool.blocks):
                raise EngineError(f"KV blocks {sorted(stray)} of group {group} are in tables, but outside its region")
            for block in pool.blocks:
                if pool.owners(block) != owners.get(block, set()):
                    raise EngineError(
                        f"KV block {block} of group {group} is owned by {sorted(pool.owners(block))}, "
                        f"but is in the tables of {sorted(owners.get(block, ()))}"
                    )
        if self.states is not None:
            known = self.states.owners(self._sequences.values())
            for block in self.states.pool.blocks:
                if self.states.pool.owners(block) != known.get(block, set()):
                    raise EngineError(
                        f"state block {block} is owned by {sorted(self.states.pool.owners(block))}, not by "
                        f"{sorted(known.get(block, ()))}"
                    )
        for blocks in self._sequences.values():
            if len({len(table) for table in blocks.tables}) != 1:
                raise EngineError(f"the block tables of sequence {blocks.seq_id} differ in length")

    # ------------------------------------------------------------------ helpers

    def _moved(self, group: int, source: int, target: int) -> None:
        """Replaces a moved block in every table and records the copy for the runner."""
        if group == len(self.pools) and self.states is not None:
            owners = self.states.pool.owners(target)
            self.states.moved(source, target, [self._sequences[owner] for owner in owners if owner in self._sequences])
            self.moves.append((group, source, target))
            return
        for seq_id in self.pools[group].owners(target):
            table = self._sequences[seq_id].tables[group]
            table[table.index(source)] = target
        self.moves.append((group, source, target))

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _first_visible(self, group: int, position: int) -> int:
        """The first block that the token at ``position`` and later ones can see."""
        return self.groups[group].first_seen(position) // self.block_size

    def _most_held(self, window: int, chunk: int) -> int:
        """Most blocks that ``chunk`` consecutive tokens and the tokens they see can span."""
        return (window - 1 + chunk + self.block_size - 2) // self.block_size + 1

    def _uncut_boundary(self, boundary: int, identity: CacheIdentity) -> int:
        """The last block boundary up to ``boundary`` at which a sequence can start."""
        while not identity.uncut(boundary):
            boundary -= self.block_size
        return boundary

    def _share(self, blocks: SequenceBlocks, hit: Hit) -> None:
        for group, pool in enumerate(self.pools):
            for block in hit.blocks[group]:
                if block != NULL_BLOCK:
                    pool.share(block, blocks.seq_id)
            blocks.tables[group].extend(hit.blocks[group])
            blocks.num_passed[group] = self._first_visible(group, hit.num_tokens)
        blocks.capacity = hit.num_tokens

    def _current_keys(self, blocks: SequenceBlocks) -> KeyChain:
        """Returns the keys of a sequence in the current generation."""
        if blocks.keys is None or blocks.generation != self._generation:
            blocks.identity = dataclasses.replace(blocks.identity, weight_version=self._weight_version)
            blocks.keys = KeyChain(blocks.identity, blocks.token_ids, self.block_size)
            blocks.generation = self._generation
        return blocks.keys

    @property
    def generation(self) -> int:
        """Rises when cached prefixes are forgotten."""
        return self._generation

    def identify(self, blocks: SequenceBlocks, sparse: SparseIdentity) -> None:
        """Completes the identity of the sequence's KV: from here on its blocks have keys."""
        blocks.identity = dataclasses.replace(blocks.identity, sparse=sparse)
        if blocks.generation == self._generation and blocks.capacity:
            blocks.keys = KeyChain(blocks.identity, blocks.token_ids, self.block_size)

    def _publish(self, blocks: SequenceBlocks, full: int) -> None:
        if blocks.generation != self._generation or blocks.keys is None:
            return
        for i in range(blocks.num_published, full):
            for table, pool in zip(blocks.tables, self.pools, strict=True):
                if table[i] != NULL_BLOCK:
                    blocks.keys.adopt(i, pool.publish(table[i], blocks.keys[i]))
            if blocks.rows is not None and (found := self._with_rows.find(blocks.keys[i])) is not None:
                found[1].rows = blocks.rows.part(i * self.block_size, (i + 1) * self.block_size)
        blocks.num_published = full

    def _pass(self, blocks: SequenceBlocks, group: int, passed: int) -> None:
        table = blocks.tables[group]
        start, end = blocks.num_passed[group], min(passed, len(table))
        gone = table[start:end]
        table[start:end] = [NULL_BLOCK] * len(gone)
        # No fence: steps in flight see only tokens at and after the window of the first token not yet collected.
        self.pools[group].release((block for block in reversed(gone) if block != NULL_BLOCK), blocks.seq_id, None)
        blocks.num_passed[group] = end
