"""KVCacheManager: the blocks of every sequence, over all cache groups."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.config import CacheConfig
from headrace.errors import EngineError
from headrace.kv.block_pool import NULL_BLOCK
from headrace.kv.prefix_cache import Hit, KeyChain, find_hit, first_visible_block, root_key
from headrace.kv.strips import Strips
from headrace.spec import CacheGroup, Mode

NewBlocks = tuple[tuple[int, ...], ...]
"""Per cache group, what to append to a sequence's block table."""
Move = tuple[int, int, int]
"""Cache group, and the numbers of two of its blocks: the content of the first is to be copied to the second."""


class SequenceBlocks:
    """The block tables of one sequence. Made by ``KVCacheManager.open``; changed by the manager alone.

    All groups' tables have the same length: entry ``i`` is for tokens ``[i * block_size, (i + 1) * block_size)``, and is
    the null block where the group's window has passed. The runner's copies keep the old number there: no row sees it.
    """

    __slots__ = (
        "capacity",
        "generation",
        "keep_from",
        "keys",
        "num_passed",
        "num_published",
        "salt",
        "seq_id",
        "spans",
        "tables",
        "token_ids",
        "unsent",
    )

    def __init__(
        self, seq_id: int, token_ids: list[int], salt: str | None, spans: Sequence[tuple[int, int]], groups: int
    ) -> None:
        self.seq_id = seq_id
        self.token_ids = token_ids
        """The sequence's own list of known tokens, which grows."""
        self.salt = salt
        self.spans = spans
        self.tables: tuple[list[int], ...] = tuple([] for _ in range(groups))
        self.capacity = 0
        """Tokens that the tables have room for."""
        self.unsent = 0
        """Entries from this one on have not been in a plan yet."""
        self.keys: KeyChain | None = None
        self.generation = -1
        """The cache's generation in which these blocks were computed; only blocks of the current one can be shared."""
        self.num_published = 0
        """Leading blocks that are findable in the prefix cache (or whose equals are)."""
        self.num_passed = [0] * groups
        """Per group, leading entries that the window has passed."""
        self.keep_from: int | None = None
        """A position from which another sequence will fork: windows stay behind it until then."""


class KVCacheManager:
    """Allocates, shares and gives back the blocks of sequences.

    A full block becomes findable by others when the step that computed it has been collected (``advance``), not when
    it is launched: stream order would make the latter safe for its content, but a step can still fail a row, and a row
    that failed must not leave its KV to others.
    """

    def __init__(self, config: CacheConfig, mode: Mode = "dense") -> None:
        self.block_size = config.block_size
        self.groups: tuple[CacheGroup, ...] = config.groups
        self.caching = config.enable_prefix_caching
        self._strips = Strips(config.arena, self._moved)
        self.pools = self._strips.pools
        self.moves: list[Move] = []
        """Blocks that have moved since ``take_moves``, in order."""
        self._windows = tuple(group.window for group in config.groups)
        self._window_groups = tuple((i, window) for i, window in enumerate(self._windows) if window is not None)
        self._indexes = tuple(pool.index for pool in self.pools)
        self._bytes_per_block = sum(config.arena.block_bytes)
        """Of one block in every group."""
        self._mode = mode
        self._weight_version = 0
        self._generation = 0
        self._sequences: dict[int, SequenceBlocks] = {}
        self._nothing: NewBlocks = tuple(() for _ in config.groups)

    # ------------------------------------------------------------------ life of a sequence

    def open(self, seq_id: int, token_ids: list[int], salt: str | None, spans: Sequence[tuple[int, int]]) -> SequenceBlocks:
        """Empty tables for a sequence. ``token_ids`` is its own list: it is read again as it grows."""
        return SequenceBlocks(seq_id, token_ids, salt, spans, len(self.groups))

    def match(self, blocks: SequenceBlocks) -> Hit:
        """The longest usable prefix of the known tokens in the cache. Takes nothing: ``attach`` does.

        Always shorter than the sequence, so that its last token is computed and gives logits; never ends inside a span.
        """
        if not self.caching:
            return self.no_hit()
        keys = self._current_keys(blocks)
        most = (len(blocks.token_ids) - 1) // self.block_size
        while True:
            hit = find_hit(self._indexes, self._windows, keys, most, self.block_size)
            boundary = self._outside_spans(hit.num_tokens, blocks.spans)
            if boundary == hit.num_tokens:
                return hit
            most = boundary // self.block_size

    def no_hit(self) -> Hit:
        return Hit(0, tuple([] for _ in self.groups))

    def fits(self, blocks: SequenceBlocks, hit: Hit | None, num_tokens: int, first_tokens: int) -> bool:
        """True if there is room now for all ``num_tokens`` of a sequence that starts from ``hit`` (None: from its tables).

        A window group gives back as it goes: of it, what the window holds when chunks are no longer than they must be
        (``first_tokens``).
        """
        start = blocks.capacity if hit is None else hit.num_tokens
        new = self._blocks_for(num_tokens) - start // self.block_size
        counts = []
        for group, pool in enumerate(self.pools):
            found = 0 if hit is None else sum(block != NULL_BLOCK and pool.is_free(block) for block in hit.blocks[group])
            window = self._windows[group]
            needed = new + found
            if window is not None:
                first = self._blocks_for(min(num_tokens, start + first_tokens)) - start // self.block_size
                needed = max(first + found, min(needed, self._most_held(window, first_tokens)))
            counts.append(needed)
        return self._strips.bytes_of(counts) <= self._strips.free_bytes

    def attach(self, blocks: SequenceBlocks, hit: Hit) -> None:
        """Makes a hit the beginning of a sequence's tables, which must be empty."""
        if blocks.capacity:
            raise EngineError(f"sequence {blocks.seq_id} holds KV blocks already")
        self._sequences[blocks.seq_id] = blocks
        self._current_keys(blocks)
        blocks.num_published = hit.num_tokens // self.block_size
        self._share(blocks, hit)

    def can_fork(self, parent: SequenceBlocks, boundary: int) -> bool:
        """True if the parent still has what a sequence that starts at ``boundary`` can see."""
        return parent.capacity >= boundary and all(
            passed <= first_visible_block(boundary, window, self.block_size)
            for passed, window in zip(parent.num_passed, self._windows, strict=True)
        )

    def fork(self, parent: SequenceBlocks, child: SequenceBlocks, boundary: int) -> None:
        """The child shares the parent's blocks of the first ``boundary`` tokens (a multiple of the block size).

        They must have been computed. A parent's ``keep_from`` sees to it that ``can_fork`` stays true.
        """
        if child.capacity:
            raise EngineError(f"sequence {child.seq_id} holds KV blocks already")
        if not self.can_fork(parent, boundary):
            raise EngineError(f"sequence {parent.seq_id} no longer has the blocks that sequence {child.seq_id} is to share")
        count = boundary // self.block_size
        shared = []
        for table, window in zip(parent.tables, self._windows, strict=True):
            first = first_visible_block(boundary, window, self.block_size)
            shared.append([NULL_BLOCK] * first + table[first:count])
        self._sequences[child.seq_id] = child
        child.generation = parent.generation
        child.keys = parent.keys.fork(child.token_ids, count) if parent.keys else None
        child.num_published = min(count, parent.num_published)
        self._share(child, Hit(boundary, tuple(shared)))

    def fork_boundary(self, num_prompt: int, spans: Sequence[tuple[int, int]]) -> int:
        """How many tokens of a prompt its samples can share: full blocks, without its last token, cutting no span."""
        return self._outside_spans((num_prompt - 1) // self.block_size * self.block_size, spans)

    def room(self, blocks: SequenceBlocks, start: int, *, pending: bool = False) -> int:
        """How many tokens from ``start`` on could get blocks now (``pending``: once the launched steps are collected)."""
        free = self._strips.free_bytes + (self._strips.pending_bytes if pending else 0)
        return blocks.capacity + free // self._bytes_per_block * self.block_size - start

    def allocate(self, blocks: SequenceBlocks, end: int) -> NewBlocks | None:
        """Room for the tokens up to ``end``; returns what to append to the runner's tables, or None if blocks are short.

        The first call after ``attach`` or ``fork`` returns the shared blocks as well.
        """
        if end <= blocks.capacity and blocks.unsent * self.block_size == blocks.capacity:
            return self._nothing
        count = max(0, self._blocks_for(end) - len(blocks.tables[0]))
        if not self._strips.provide([count] * len(self.pools)):
            return None
        self._sequences[blocks.seq_id] = blocks
        for table, pool in zip(blocks.tables, self.pools, strict=True):
            table.extend(pool.allocate(count, blocks.seq_id))
        new = tuple(tuple(table[blocks.unsent :]) for table in blocks.tables)
        blocks.unsent = len(blocks.tables[0])
        blocks.capacity = blocks.unsent * self.block_size
        return new

    def advance(self, blocks: SequenceBlocks, num_collected: int) -> None:
        """The steps that computed the first ``num_collected`` tokens have been collected, and the tokens are known.

        Publishes blocks that have become full; gives back blocks that neither this sequence's later tokens nor a step in
        flight can see (whose tokens all come after the collected ones).
        """
        full = num_collected // self.block_size
        if full > blocks.num_published and self.caching:
            self._publish(blocks, full)
        for group, window in self._window_groups:
            seen_from = num_collected if blocks.keep_from is None else min(num_collected, blocks.keep_from)
            passed = first_visible_block(seen_from, window, self.block_size)
            if passed > blocks.num_passed[group]:
                self._pass(blocks, group, passed)

    def free(self, blocks: SequenceBlocks, fence: int | None) -> None:
        """Gives every block back and empties the tables.

        Args:
            fence: the last launched step if one in flight may still write these blocks, else None.
        """
        self._sequences.pop(blocks.seq_id, None)
        for group, (table, pool) in enumerate(zip(blocks.tables, self.pools, strict=True)):
            kept = table[blocks.num_passed[group] :]
            pool.release((block for block in reversed(kept) if block != NULL_BLOCK), blocks.seq_id, fence)
            table.clear()
            blocks.num_passed[group] = 0
        blocks.capacity = blocks.unsent = blocks.num_published = 0
        blocks.keep_from = None

    def collected(self, step: int) -> None:
        """Every step up to ``step`` has been collected."""
        for pool in self.pools:
            pool.collected(step)

    # ------------------------------------------------------------------ the whole cache

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; sequences now running publish nothing more. False if there is no prefix cache."""
        self._generation += 1
        for pool in self.pools:
            pool.forget()
        return self.caching

    def bump_weight_version(self) -> int:
        """KV computed from now on is never mixed with KV computed before. Returns the new version."""
        self._weight_version += 1
        self.reset_prefix_cache()
        return self._weight_version

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold or a launched step may still write, over all groups; where groups' blocks differ in
        bytes, as many of average size as have as many bytes."""
        return -(-self._strips.used_bytes * len(self.groups) // self._bytes_per_block)

    @property
    def num_total(self) -> int:
        """Blocks that there is room for, counted likewise."""
        return self._strips.arena.capacity * len(self.groups) // self._bytes_per_block

    @property
    def num_pending(self) -> int:
        return sum(pool.num_pending for pool in self.pools)

    def take_moves(self) -> tuple[Move, ...]:
        """What is to be copied, in this order, before anything that was allocated since is written or read."""
        moves = tuple(self.moves)
        self.moves.clear()
        return moves

    def too_small_for(self, num_tokens: int, first_tokens: int) -> str | None:
        """Why a sequence of ``num_tokens`` cannot fit in an empty cache, or None.

        ``first_tokens`` is the longest chunk that cannot be cut further.
        """
        counts = []
        for group in self.groups:
            needed = self._blocks_for(num_tokens)
            if group.window is not None:
                needed = min(needed, self._most_held(group.window, first_tokens))
            counts.append(needed)
        needed_bytes, capacity = self._strips.bytes_of(counts), self._strips.arena.capacity
        if needed_bytes <= capacity:
            return None
        if len(counts) == 1:
            return (
                f"{num_tokens} tokens need {counts[0]} KV blocks of {self.block_size} tokens "
                f"in the cache group '{self.groups[0].name}', which has {self.pools[0].num_usable}"
            )
        where = " and ".join(f"{count} in '{group.name}'" for count, group in zip(counts, self.groups, strict=True))
        return (
            f"{num_tokens} tokens need KV blocks of {self.block_size} tokens as follows: {where}; "
            f"these are {needed_bytes:,} bytes, and all groups share {capacity:,}"
        )

    def check_integrity(self) -> None:
        """Raises EngineError unless pools are sound and their owners are exactly the sequences' tables."""
        self._strips.check_integrity()
        for group, pool in enumerate(self.pools):
            owners: dict[int, set[int]] = {}
            for seq_id, blocks in self._sequences.items():
                for block in blocks.tables[group]:
                    if block != NULL_BLOCK:
                        owners.setdefault(block, set()).add(seq_id)
            if stray := owners.keys() - set(pool.blocks):
                raise EngineError(f"KV blocks {sorted(stray)} of group {group} stand in tables, and are outside its strip")
            for block in pool.blocks:
                if pool.owners(block) != owners.get(block, set()):
                    raise EngineError(
                        f"KV block {block} of group {group} is owned by {sorted(pool.owners(block))}, "
                        f"but stands in the tables of {sorted(owners.get(block, ()))}"
                    )
        for blocks in self._sequences.values():
            if len({len(table) for table in blocks.tables}) != 1:
                raise EngineError(f"the block tables of sequence {blocks.seq_id} differ in length")

    # ------------------------------------------------------------------ parts

    def _moved(self, group: int, source: int, target: int) -> None:
        """A block has another number now: every table that has the old one gets it, and the runner is told to copy."""
        for seq_id in self.pools[group].owners(target):
            table = self._sequences[seq_id].tables[group]
            table[table.index(source)] = target
        self.moves.append((group, source, target))

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _most_held(self, window: int, chunk: int) -> int:
        """Blocks in which ``chunk`` consecutive tokens and all that they see may lie."""
        return (window - 1 + chunk + self.block_size - 2) // self.block_size + 1

    def _outside_spans(self, boundary: int, spans: Sequence[tuple[int, int]]) -> int:
        """The last block boundary up to ``boundary`` that lies inside no span."""
        for start, end in reversed(spans):
            if start < boundary < end:
                boundary = start // self.block_size * self.block_size
        return boundary

    def _share(self, blocks: SequenceBlocks, hit: Hit) -> None:
        for group, pool in enumerate(self.pools):
            for block in hit.blocks[group]:
                if block != NULL_BLOCK:
                    pool.share(block, blocks.seq_id)
            blocks.tables[group].extend(hit.blocks[group])
            blocks.num_passed[group] = first_visible_block(hit.num_tokens, self._windows[group], self.block_size)
        blocks.capacity = hit.num_tokens

    def _current_keys(self, blocks: SequenceBlocks) -> KeyChain:
        """The keys of a sequence that is about to be computed in this generation."""
        if blocks.keys is None or blocks.generation != self._generation:
            root = root_key(blocks.salt, self._weight_version, self._mode)
            blocks.keys = KeyChain(root, blocks.token_ids, blocks.spans, self.block_size)
            blocks.generation = self._generation
        return blocks.keys

    def _publish(self, blocks: SequenceBlocks, full: int) -> None:
        if blocks.generation != self._generation or blocks.keys is None:
            return
        for i in range(blocks.num_published, full):
            for table, pool in zip(blocks.tables, self.pools, strict=True):
                if table[i] != NULL_BLOCK:
                    blocks.keys.adopt(i, pool.publish(table[i], blocks.keys[i]))
        blocks.num_published = full

    def _pass(self, blocks: SequenceBlocks, group: int, passed: int) -> None:
        table = blocks.tables[group]
        start, end = blocks.num_passed[group], min(passed, len(table))
        gone = table[start:end]
        table[start:end] = [NULL_BLOCK] * len(gone)
        # No fence: steps in flight see only tokens at and after the window of the first token not yet collected.
        self.pools[group].release((block for block in reversed(gone) if block != NULL_BLOCK), blocks.seq_id, None)
        blocks.num_passed[group] = end
