"""How a launch of paged attention is cut up: tiles of queries, tiles of keys, splits of a row's keys."""

from __future__ import annotations

import dataclasses

from headrace.kernels.support import Resources

MIN_SPLIT = 256
"""Tokens of the longest row for each split: more splits cost more in merging than they gain in company."""
_PROGRAMS = 2
"""For each multiprocessor; below that, rows are split."""
_KEPT_FREE = 24 << 10
"""Bytes of shared memory for reductions and layouts, beside the tiles."""


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
        """Tile rows whose sums and scores still fit in the registers."""
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
    def invariant(self) -> bool:
        """A token's output is bitwise the same in any batch and chunking."""
        return self.split_tokens > 0

    @property
    def merges(self) -> bool:
        """Outputs take the way over the workspace; where they must not depend on the launch, even from a single split."""
        return self.splits > 1 or self.invariant


def choose_tiling(geometry: Geometry, *, num_rows: int, num_tokens: int, max_queries: int, max_seq_len: int) -> Tiling:
    """Tiles for rows of at most ``max_queries`` queries and ``max_seq_len`` tokens: upper bounds will do.

    From measurements on an H200 with 32 query heads, 8 KV heads, heads of 128 in bfloat16. One query a row: 16 tile rows,
    128 keys, 4 warps and 3 stages come within 1 % of the memory's speed, once there are two programs for each
    multiprocessor: splits make up for missing rows. Many queries: 128 tile rows, 64 keys, 8 warps.
    """
    block_m = min(max(16, _power_of_two(max_queries * geometry.group_size)), geometry.max_block_m)
    heads = min(geometry.group_size, block_m)
    block_q = block_m // heads
    tiles = max(num_rows, -(-num_tokens // block_q))
    programs = max(tiles * geometry.num_kv_heads * -(-geometry.group_size // heads), 1)
    splits = max(1, min(_PROGRAMS * geometry.device.multiprocessors // programs, max_seq_len // MIN_SPLIT))
    block_n, num_stages = _keys(geometry, block_m, 128 if block_m <= 32 else 64)
    return Tiling(block_q, heads, block_n, splits, 0, 4 if block_m <= 32 else 8, num_stages)


def workspace_bound(geometry: Geometry) -> int:
    """At least ``partial_size`` of every tiling that ``choose_tiling`` gives, whatever the batch: it splits only while the
    programs do not fill the device, and a program leaves at most one partial output a tile row."""
    programs = _PROGRAMS * geometry.device.multiprocessors
    return programs * geometry.max_block_m * (geometry.v_head_dim + 1)


def invariant_tiling(geometry: Geometry, *, max_seq_len: int, split_tokens: int) -> Tiling:
    """Tiles of one shape for all rows, decode or prefill, for outputs that depend on nothing but a row's own tokens.

    Tile rows do not see each other, tiles of keys begin at multiples of ``block_n``, and keys that a query does not see
    add exact zeros: so only the shape and the splits could make a difference, and here neither depends on the batch.

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
    """Keys at a time, at most ``block_n``, and stages of loads in flight: the most that shared memory holds."""
    if geometry.q_bytes > 2 or max(geometry.head_dim, geometry.v_head_dim) > 256:
        block_n = min(block_n, 32)
    width = geometry.head_dim + geometry.v_head_dim
    room = geometry.device.shared_memory - _KEPT_FREE - block_m * geometry.head_dim * geometry.q_bytes
    # What is stored in a narrower type than q's is converted on its way, and then there twice.
    converted = geometry.q_bytes if geometry.kv_bytes < geometry.q_bytes else 0
    while True:
        for num_stages in (3, 2):
            if block_n * width * (num_stages * geometry.kv_bytes + converted) <= room:
                return block_n, num_stages
        if block_n == 16:
            return block_n, 1
        block_n //= 2


def _power_of_two(number: int) -> int:
    """The smallest one that is not below."""
    return 1 << (number - 1).bit_length()
