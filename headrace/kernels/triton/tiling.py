"""How a launch of paged attention is cut up: tiles of queries, tiles of keys, splits of a row's keys."""

from __future__ import annotations

import dataclasses

from headrace.kernels.support import Resources

MIN_SPLIT = 256
"""Tokens of the longest row for each split: more splits cost more in merging than they gain in company."""
KEYS_FIRST = 8
"""Queries of a tile, up to which its keys come first: matrix units take 8 along their second axis, 16 along their first."""
_PROGRAMS = 2
"""For each multiprocessor; below that, rows are split."""
_KEPT_FREE = 8 << 10
"""Bytes of a program's shared memory for reductions and layouts, beside the tiles."""


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What tiles depend on, of a layer and its device."""

    num_kv_heads: int
    group_size: int
    head_dim: int
    v_head_dim: int
    q_bytes: int
    """Of one number of q."""
    kv_bytes: int
    """Of one number in the cache."""
    device: Resources

    @property
    def max_block_m(self) -> int:
        """Queries times heads of a tile whose sums and scores still fit in the registers."""
        widest = max(self.head_dim, self.v_head_dim)
        return 16 if widest > 256 or self.q_bytes > 2 else 64 if widest > 128 else 128


@dataclasses.dataclass(frozen=True)
class Tiling:
    """A program takes ``block_q`` queries of one row, ``heads`` query heads of one KV head, and one split of the keys."""

    block_q: int
    heads: int
    """At most the group size; where it is less, several programs share a KV head."""
    block_n: int
    """Keys at a time."""
    splits: int
    """Programs that share a row's keys."""
    split_tokens: int
    """0: each row's keys are cut evenly, by its length as the device knows it. Else a multiple of ``block_n``: split i
    holds the keys from ``i * split_tokens`` on, whatever the row's length, so that no row's sums depend on its company."""
    num_warps: int
    num_stages: int

    @property
    def keys_first(self) -> bool:
        """Which axis of a tile the keys have."""
        return self.block_q * self.heads <= KEYS_FIRST

    @property
    def invariant(self) -> bool:
        """A token's output is bitwise the same in any batch and chunking."""
        return self.split_tokens > 0

    @property
    def merges(self) -> bool:
        """Outputs take the way over the workspace; where they must not depend on the launch, even from a single split."""
        return self.splits > 1 or self.invariant


def choose_tiling(geometry: Geometry, *, num_rows: int, num_tokens: int, max_queries: int, max_seq_len: int) -> Tiling:
    """Tiles for rows of at most ``max_queries`` queries and ``max_seq_len`` tokens: upper bounds will do.

    From measurements on an H200 with 32 query heads, 8 KV heads, heads of 128 in bfloat16. One query a row: 128 keys, 4
    warps and 3 stages come within 1 % of the memory's speed, once there are two programs for each multiprocessor: splits
    make up for missing rows. Many queries: 128 queries and heads, 64 keys, 8 warps.
    """
    block_m = min(max(KEYS_FIRST, _power_of_two(max_queries * geometry.group_size)), geometry.max_block_m)
    heads = min(geometry.group_size, block_m)
    block_q = block_m // heads
    tiles = max(num_rows, -(-num_tokens // block_q))
    programs = max(tiles * geometry.num_kv_heads * -(-geometry.group_size // heads), 1)
    splits = max(1, min(_PROGRAMS * geometry.device.multiprocessors // programs, max_seq_len // MIN_SPLIT))
    block_n, num_stages = _keys(geometry, block_m, 128 if block_m <= 32 else 64)
    return Tiling(block_q, heads, block_n, splits, 0, 4 if block_m <= 32 else 8, num_stages)


def partial_size(tiling: Tiling, num_tokens: int, num_heads: int, v_head_dim: int) -> int:
    """Numbers of the float32 workspace that a launch needs: an output and a softmax mass for each token, head and split."""
    return num_tokens * num_heads * tiling.splits * (v_head_dim + 1) if tiling.merges else 0


def workspace_bound(geometry: Geometry) -> int:
    """At least ``partial_size`` of every tiling that ``choose_tiling`` gives, whatever the batch: it splits only while the
    programs do not fill the device, and a program leaves one partial output for each of its queries and heads."""
    programs = _PROGRAMS * geometry.device.multiprocessors
    return programs * geometry.max_block_m * (geometry.v_head_dim + 1)


def invariant_tiling(geometry: Geometry, *, max_seq_len: int, split_tokens: int) -> Tiling:
    """Tiles of one shape for all rows, decode or prefill, for outputs that depend on nothing but a row's own tokens.

    The queries of a tile do not see each other, tiles of keys begin at multiples of ``block_n``, and keys that a query does
    not see add exact zeros: so only the shape and the splits could make a difference, and here neither depends on the batch.

    Args:
        max_seq_len: of the launch; splits past a row's end add exact zeros too.
        split_tokens: must be the same in all launches that are to agree.
    """
    block_m = min(64, geometry.max_block_m)
    heads = min(geometry.group_size, block_m)
    block_n, num_stages = _keys(geometry, block_m, 64)
    split_tokens = -(-split_tokens // block_n) * block_n
    return Tiling(block_m // heads, heads, block_n, max(1, -(-max_seq_len // split_tokens)), split_tokens, 4, num_stages)


def _keys(geometry: Geometry, block_m: int, block_n: int) -> tuple[int, int]:
    """Keys at a time, at most ``block_n``, and stages of loads in flight: the most that shared memory holds.

    The first stage is the block table's, the next ones are tiles of keys and values; where queries come first, one more.
    Where keys do, programs are small and wait for memory, so that several must have room side by side.
    """
    widest, width = max(geometry.head_dim, geometry.v_head_dim), geometry.head_dim + geometry.v_head_dim
    keys_first = block_m <= KEYS_FIRST
    # What is stored in a narrower type than q's is converted on its way; where queries come first, it is then there twice.
    converted = geometry.q_bytes if geometry.kv_bytes < geometry.q_bytes and not keys_first else 0
    if geometry.q_bytes > 2 or widest > 256 or (converted and widest > 128):
        block_n = min(block_n, 32)
    room = geometry.device.shared_memory // (_PROGRAMS if keys_first else 1)
    room -= _KEPT_FREE + block_m * geometry.head_dim * geometry.q_bytes
    while True:
        for num_stages in (3,) if keys_first else (3, 2):
            tiles = num_stages - 2 if keys_first else num_stages
            if block_n * width * (tiles * geometry.kv_bytes + converted) <= room:
                return block_n, num_stages
        if block_n == 16:
            return block_n, 1
        block_n //= 2


def _power_of_two(number: int) -> int:
    """The smallest one that is not below."""
    return 1 << (number - 1).bit_length()
