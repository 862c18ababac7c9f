"""Prefix cache: finds the block that holds the KV of a token history.

A block's key is a hash over its parent's digest and its own payload, which the sequence's ``CacheIdentity`` derives from its
tokens and items; the first parent (the root) covers salt, weights, adapter and attention mode. A digest only finds a
candidate: a hit requires that the payloads of the block and of all its parents are equal.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.errors import EngineError
from headrace.kv.identity import CacheIdentity
from headrace.model_spec import CacheGroup


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


class BlockKey:
    """The token history of one full block: its own part and a link to its parent.

    ``payload`` is the block's part of the history in full: two keys are equal if the payloads of their chains are.
    ``index`` is the block's place in its sequence, and -1 for a root. ``rows``: of its tokens, if the sequence that
    computed the block had them (``TokenRows``), and while it is cached.
    """

    __slots__ = ("digest", "index", "parent", "payload", "rows")

    def __init__(self, parent: BlockKey | None, payload: bytes) -> None:
        self.parent = parent
        self.payload = payload
        self.rows = b""
        self.index: int = parent.index + 1 if parent else -1
        self.digest: bytes = _digest((parent.digest if parent else b"") + payload)

    def same_history(self, other: BlockKey) -> bool:
        """Compares payloads, back to the first parent object that both chains share."""
        a: BlockKey | None = self
        b: BlockKey | None = other
        while a is not b:
            if a is None or b is None or a.payload != b.payload:
                return False
            a, b = a.parent, b.parent
        return True


class Change(NamedTuple):
    """A block that was stored in the prefix cache of a group or removed from it."""

    group: int
    key: BlockKey | None
    """None: the group's cache was cleared."""
    stored: bool = False


class PrefixIndex:
    """Maps keys to blocks and blocks to keys, for one cache group."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, BlockKey] = {}
        self._changes: list[Change] | None = None
        self._group = 0
        self.dropped: Callable[[BlockKey], None] | None = None
        """Called with each key that is dropped, unless all are."""

    def __len__(self) -> int:
        return len(self._keys)

    def record(self, changes: list[Change], group: int) -> None:
        """Appends every later change to ``changes``."""
        self._changes, self._group = changes, group

    def find(self, key: BlockKey) -> tuple[int, BlockKey] | None:
        """Returns the block with this token history and the equal key stored with it."""
        block = self._blocks.get(key.digest)
        if block is None:
            return None
        known = self._keys[block]
        return (block, known) if known.same_history(key) else None

    def put(self, key: BlockKey, block: int) -> BlockKey:
        """Adds ``block`` unless the digest is taken; returns the equal key stored before, else ``key``."""
        if key.digest in self._blocks:
            found = self.find(key)
            return found[1] if found else key
        if block in self._keys:
            raise EngineError(f"KV block {block} already has a key")
        self._blocks[key.digest] = block
        self._keys[block] = key
        if self._changes is not None:
            self._changes.append(Change(self._group, key, True))
        return key

    def key_of(self, block: int) -> BlockKey | None:
        return self._keys.get(block)

    def drop(self, block: int) -> None:
        key = self._keys.pop(block)
        key.rows = b""
        del self._blocks[key.digest]
        if self._changes is not None:
            self._changes.append(Change(self._group, key))
        if self.dropped is not None:
            self.dropped(key)

    def move(self, source: int, target: int) -> None:
        """Moves the key of ``source``, if it has one, to ``target``."""
        key = self._keys.pop(source, None)
        if key is not None:
            self._keys[target] = key
            self._blocks[key.digest] = target

    def clear(self) -> None:
        self._blocks.clear()
        self._keys.clear()
        if self._changes is not None:
            self._changes.append(Change(self._group, None))

    def check_integrity(self) -> None:
        if {key.digest: block for block, key in self._keys.items()} != self._blocks:
            raise EngineError("the prefix cache's keys and blocks do not match")


class KeyChain:
    """The keys of one sequence's full blocks, computed on demand.

    Args:
        token_ids: the sequence's list of known tokens, which may grow.
    """

    def __init__(self, identity: CacheIdentity, token_ids: list[int], block_size: int) -> None:
        self._identity = identity
        self._keys: list[BlockKey] = []
        self._root = BlockKey(None, identity.root())
        self._token_ids = token_ids
        self._block_size = block_size

    def __getitem__(self, index: int) -> BlockKey:
        """The key of block ``index``, all of whose tokens must be known."""
        while len(self._keys) <= index:
            self._keys.append(self._make(len(self._keys)))
        return self._keys[index]

    def adopt(self, index: int, key: BlockKey) -> None:
        """Replaces a key by the equal object of the cache, so that later comparisons end there at once."""
        self._keys[index] = key
        if index + 1 < len(self._keys):
            self._keys[index + 1].parent = key

    def fork(self, token_ids: list[int], count: int) -> KeyChain:
        """The chain of a sequence of the same identity that shares the first ``count`` blocks."""
        chain = KeyChain(self._identity, token_ids, self._block_size)
        chain._keys = self._keys[:count]
        return chain

    def _make(self, index: int) -> BlockKey:
        start, end = index * self._block_size, (index + 1) * self._block_size
        if end > len(self._token_ids):
            raise EngineError(
                f"block {index} of {self._block_size} tokens has no key yet: {len(self._token_ids)} tokens are known"
            )
        return BlockKey(self._keys[-1] if self._keys else self._root, self._identity.block(self._token_ids, start, end))


@dataclasses.dataclass(frozen=True)
class Hit:
    """A cached prefix: per group, the blocks that hold its ``num_tokens`` tokens.

    ``blocks[g]`` has the null block where group g's window no longer sees the block from ``num_tokens`` on.
    """

    num_tokens: int
    blocks: tuple[list[int], ...]
    state: int = 0
    """The snapshot of the state after these tokens; the null block: the model has no state layers, or there are no tokens."""
    attention_tokens: int = 0
    """Tokens whose KV is cached; without a snapshot, a model with state layers cannot use all of it."""


def find_hit(
    indexes: Sequence[PrefixIndex], groups: Sequence[CacheGroup], keys: KeyChain, max_blocks: int, block_size: int
) -> Hit:
    """Finds the longest prefix of at most ``max_blocks`` blocks from which every group can continue.

    Groups without a window need every block; a window group needs the blocks that its window sees at the boundary.
    """
    num_blocks = max_blocks
    found: list[dict[int, int]] = [{} for _ in indexes]
    for group, index in enumerate(indexes):
        if groups[group].window is None:
            num_blocks = _walk_forward(index, keys, num_blocks, found[group])
    settled = False
    while not settled:
        settled = True
        for group, index in enumerate(indexes):
            if groups[group].window is not None:
                shorter = _walk_back(index, keys, num_blocks, groups[group], block_size, found[group])
                settled = settled and shorter == num_blocks
                num_blocks = shorter
    blocks = []
    for kind, known in zip(groups, found, strict=True):
        first = kind.first_seen(num_blocks * block_size) // block_size
        blocks.append([0] * first + [known[i] for i in range(first, num_blocks)])
    return Hit(num_blocks * block_size, tuple(blocks))


def cached_rows(index: PrefixIndex, keys: KeyChain, max_blocks: int) -> list[bytes]:
    """Returns the rows of leading blocks, of at most ``max_blocks``, up to the first that is not cached or has none."""
    rows = list[bytes]()
    for position in range(max_blocks):
        found = index.find(keys[position])
        if found is None or not found[1].rows:
            break
        keys.adopt(position, found[1])
        rows.append(found[1].rows)
    return rows


def _lookup(index: PrefixIndex, keys: KeyChain, position: int, found: dict[int, int]) -> bool:
    if position not in found:
        hit = index.find(keys[position])
        if hit is None:
            return False
        found[position] = hit[0]
        keys.adopt(position, hit[1])
    return True


def _walk_forward(index: PrefixIndex, keys: KeyChain, num_blocks: int, found: dict[int, int]) -> int:
    for i in range(num_blocks):
        if not _lookup(index, keys, i, found):
            return i
    return num_blocks


def _walk_back(
    index: PrefixIndex, keys: KeyChain, num_blocks: int, group: CacheGroup, block_size: int, found: dict[int, int]
) -> int:
    """The largest boundary up to ``num_blocks`` whose visible blocks are all cached. Looks up each block once."""
    boundary = i = num_blocks
    while i > group.first_seen(boundary * block_size) // block_size:
        i -= 1
        if not _lookup(index, keys, i, found):
            boundary = i
    return boundary
