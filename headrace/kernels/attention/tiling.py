"""Tile shapes of paged attention: tiles of queries, tiles of keys, splits of a row's keys."""

from __future__ import annotations

import dataclasses
import sys

import torch

from headrace.kernels.support import Resources, power_of_two

MIN_SPLIT, SMALL_SPLIT = 256, 64
"""Tokens of the longest row for each split, and where tiles are of 16 keys: more splits cost more in merging than they gain
in parallelism."""
KEYS_FIRST = 8
"""Queries of a tile, up to which its keys come first: matrix units take 8 along their second axis, 16 along their first."""
_SIDE_BY_SIDE = 2
_SMALL_SIDE_BY_SIDE = 4
_SMALLEST_SIDE_BY_SIDE = 16
"""Programs for each multiprocessor, below which rows are split: where a tile's queries come first, where its keys do, and where
what it loads is converted besides."""
_WIDE_KEYS = 64
"""Keys of a tile of wide heads, where a multiprocessor has two programs."""
_ALIGNMENT = 2 << 10
"""Bytes of a program's shared memory that tiles of the tensor memory unit leave unused between them."""
_KEPT_FREE = 4 << 10
"""Bytes of a program's shared memory for reductions and layouts, beside the tiles."""
_GRAPH_STEPS = ((64, 8), (256, 16), (512, 32), (sys.maxsize, 128))
"""(decode rows, at most; batch sizes of graphs are multiples of this)."""


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The layer and device properties that tiles depend on."""

    num_kv_heads: int
    group_size: int
    head_dim: int
    v_head_dim: int
    q_bytes: int
    """Bytes of one number of q."""
    kv_bytes: int
    """Bytes of one number in the cache."""
    device: Resources
    aligned: bool = True
    """Whether cache tiles are copied straight to shared memory; see ``aligned``."""

    @property
    def widest(self) -> int:
        return max(self.head_dim, self.v_head_dim)

    @property
    def converts(self) -> bool:
        """Whether stored numbers need a conversion, which takes more registers."""
        return self.kv_bytes < self.q_bytes

    @property
    def max_block_m(self) -> int:
        """Queries times heads of a tile whose sums and scores still fit in the registers. Unconverted keys and values that take
        the detour keep to tiles too small for Hopper's asynchronous products: their descriptors are where ptxas errs
        (see ``cut``)."""
        if self.widest > 256 or self.q_bytes > 2:
            return 16
        if not self.aligned and not self.converts:
            return 32
        return 64 if self.converts or (self.widest > 192 and self.v_head_dim <= 128) else 128


@dataclasses.dataclass(frozen=True)
class Tiling:
    """A program takes ``block_q`` queries of one row, ``heads`` query heads of one KV head, and one split of the keys."""

    block_q: int
    heads: int
    """Query heads that a program serves, at most the group size; where it is less, several programs share a KV head."""
    block_n: int
    """Keys at a time."""
    splits: int
    """Programs that share a row's keys."""
    split_tokens: int
    """0: each row's keys are cut evenly, by its length as the device knows it. Else a multiple of ``block_n``: split i
    holds the keys from ``i * split_tokens`` on, whatever the row's length, so that no row's sums depend on the batch."""
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """Registers of a thread, where fewer let another program run beside; None: as many as the compiler takes."""

    @property
    def keys_first(self) -> bool:
        """Axis of a tile that the keys have."""
        return self.block_q * self.heads <= KEYS_FIRST

    @property
    def batch_invariant(self) -> bool:
        """A token's output is bitwise the same in any batch and chunking."""
        return self.split_tokens > 0

    @property
    def merges(self) -> bool:
        """Outputs take the way over the workspace; where they must not depend on the launch, even from a single split."""
        return self.splits > 1 or self.batch_invariant


def graph_size(num_rows: int) -> int:
    """Returns the smallest batch size of CUDA graphs that holds the decode rows."""
    if num_rows <= 4:
        return num_rows if num_rows <= 2 else 4
    step = next(step for most, step in _GRAPH_STEPS if num_rows <= most)
    return -(-num_rows // step) * step


def choose_tiling(geometry: Geometry, *, num_rows: int, num_tokens: int, max_queries: int, max_seq_len: int) -> Tiling:
    """Tiles for rows of at most ``max_queries`` queries and ``max_seq_len`` tokens: upper bounds will do.

    From measurements on an H200 with 32 query heads and 8 KV heads of 128/128 channels (or of 192/128), caches in bfloat16
    (or FP8).

    One query a row is a matter of memory: what counts is that loads are always under way, from several programs on each
    multiprocessor, as one waits between its tiles. Programs of 2 warps with 64 keys, 4 for each multiprocessor: 64 rows of
    4096 tokens 4.35 TB/s (4 warps, 128 keys: 3.6), 64 of 16384 4.55 (3.6); splits make up for missing rows. Where the rows
    alone leave multiprocessors idle, it matters how long a tile takes, and 4 warps are faster in as many splits: 4 rows of
    5000 tokens 26.8 us (2 warps: 31.7), 8 of 5000 46.5 (51.3), 1 of 300 5.2 (5.3). FP8 waits for more between its loads (block,
    scales, conversion), so that as many programs as possible should: of 1 warp and 16 keys, 16 for each multiprocessor, 64 of
    4096 3.76 TB/s (2 warps and 64 keys: 3.16).

    Many queries are a matter of registers and of what runs beside the softmax. 128 queries and heads go with 4 warps and 32
    keys, so that two programs fit on a multiprocessor: 344 TFLOP/s for 8192 tokens (8 warps and 64 keys: 318; and 128 keys:
    335); where keys are wider than 128, with 8 warps and 128 keys: 361 (4 warps and 32 keys: 325; 64 queries and heads, 8
    warps: 162). Keys and values of 256 (16 query and 4 KV heads) take 8 warps and 64 keys: 475 (32 keys: 332; 64 queries and
    heads: 222). What takes a conversion has registers for 64 queries and heads, with 4 warps and 128 keys: 231 (128, 64 keys
    and 8 warps: 153).

    One query a row of 16 query and 4 KV heads of 256: see ``_few_of_wide_heads``.
    """
    block_m = min(max(KEYS_FIRST, power_of_two(max_queries * geometry.group_size)), geometry.max_block_m)
    heads = min(geometry.group_size, block_m)
    block_q = block_m // heads
    tiles = max(num_rows, -(-num_tokens // block_q))
    programs = max(tiles * geometry.num_kv_heads * -(-geometry.group_size // heads), 1)
    if _few_of_wide_heads(geometry, block_m, programs):
        splits = min(_SIDE_BY_SIDE * geometry.device.multiprocessors // programs, max_seq_len // MIN_SPLIT)
        return Tiling(block_q, heads, _WIDE_KEYS, max(1, splits), 0, 4, 3)
    wanted = _side_by_side(geometry, block_m) * geometry.device.multiprocessors
    block_n, num_warps = _shape(geometry, block_m, programs)
    splits = max(1, min(wanted // programs, max_seq_len // (MIN_SPLIT if block_n > 16 else SMALL_SPLIT)))
    block_n, num_stages = _keys(geometry, block_m, block_n)
    return Tiling(block_q, heads, block_n, splits, 0, num_warps, num_stages)


def _few_of_wide_heads(geometry: Geometry, block_m: int, programs: int) -> bool:
    """Whether few programs have one query each and so wide heads that two on a multiprocessor, of 4 warps and 64 keys, are
    faster than four of 32 keys: on an H200, 64 rows of 400 tokens take 33.0 us (38.4), 64 of 4096 245 (293), 8 of 30000 228
    (236).

    Args:
        programs: before splits. Steps of a single row were slower so.
    """
    device, width = geometry.device, geometry.head_dim + geometry.v_head_dim
    place = _WIDE_KEYS * width * geometry.kv_bytes + _KEPT_FREE + block_m * geometry.head_dim * geometry.q_bytes
    some = device.multiprocessors <= 8 * programs < 16 * device.multiprocessors
    narrow = block_m > KEYS_FIRST or not 192 < geometry.widest <= 256
    return some and not narrow and geometry.kv_bytes == geometry.q_bytes == 2 and 2 * place <= device.shared_memory


def _side_by_side(geometry: Geometry, block_m: int) -> int:
    if block_m > KEYS_FIRST:
        return _SIDE_BY_SIDE
    return _SMALLEST_SIDE_BY_SIDE if geometry.converts else _SMALL_SIDE_BY_SIDE


def _shape(geometry: Geometry, block_m: int, programs: int) -> tuple[int, int]:
    """Keys at a time, and warps, limited by registers and time.

    Args:
        programs: before splits.
    """
    if block_m <= KEYS_FIRST:
        if geometry.converts:
            return 16, 1
        return 64, 4 if programs < 2 * geometry.device.multiprocessors else 2
    if block_m <= 32:
        return 128, 4
    if geometry.v_head_dim > 128:
        return 64, 8
    if block_m <= 64:
        return 128 if geometry.converts and geometry.widest <= 128 else 64, 4
    return (32, 4) if geometry.widest <= 128 else (128, 8)


def partial_size(tiling: Tiling, num_tokens: int, num_heads: int, v_head_dim: int) -> int:
    """Numbers of the float32 workspace that a launch needs: an output and a softmax mass for each token, head and split."""
    return num_tokens * num_heads * tiling.splits * (v_head_dim + 1) if tiling.merges else 0


def workspace_bound(geometry: Geometry) -> int:
    """Returns at least ``partial_size`` of every tiling that ``choose_tiling`` gives, whatever the batch: it splits only while
    the programs do not fill the device, and a program leaves one partial output for each of its queries and heads."""
    most = max(_side_by_side(geometry, m) * m for m in (KEYS_FIRST, geometry.max_block_m))
    return geometry.device.multiprocessors * most * (geometry.v_head_dim + 1)


def batch_invariant_tiling(geometry: Geometry, *, max_seq_len: int, split_tokens: int) -> Tiling:
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


def block_tiling(geometry: Geometry, block: int) -> Tiling:
    """Tiles of one head's queries, where both these and keys come in blocks of ``block``, a power of two from 16 on.

    With a block's number to load besides, what takes a conversion has registers for 64 keys and not for 128.
    """
    block_m = min(block, geometry.max_block_m if geometry.v_head_dim <= 128 else 64)
    block_n, num_warps = _shape(geometry, block_m, sys.maxsize)
    block_n, num_stages = _keys(geometry, block_m, min(block_n, block, 64 if geometry.converts else block))
    return Tiling(block_m, 1, block_n, 1, 0, num_warps, num_stages)


def copies_tiling(geometry: Geometry, block: int) -> Tiling:
    """Returns ``block_tiling`` for keys and values that the tensor memory unit loads. Two groups of warps take turns in the
    matrix units and in the softmax of a tile of 128 queries."""
    block_m = min(block, 128)
    block_n = min(block, 128 if geometry.widest <= 128 else 64 if geometry.widest <= 192 else 32)
    room = geometry.device.shared_memory - _ALIGNMENT - block_m * geometry.head_dim * geometry.q_bytes
    stage = block_n * (geometry.head_dim + geometry.v_head_dim) * geometry.q_bytes
    return Tiling(block_m, 1, block_n, 1, 0, 8 if block_m > 64 else 4, max(1, min(3, room // stage)))


def _keys(geometry: Geometry, block_m: int, block_n: int) -> tuple[int, int]:
    """Keys at a time, at most ``block_n``, and stages of loads in flight: the most that shared memory holds.

    The first stage is the block table's, the next ones are tiles of keys and values. Where keys come first, programs are
    small and wait for memory, so that several must have room side by side.
    """
    width = geometry.head_dim + geometry.v_head_dim
    keys_first = block_m <= KEYS_FIRST
    if geometry.q_bytes > 2 or geometry.widest > 256 or (geometry.converts and geometry.v_head_dim > 128 and not keys_first):
        block_n = min(block_n, 32)
    room = geometry.device.shared_memory // (_SMALL_SIDE_BY_SIDE if keys_first else 1)
    room -= _KEPT_FREE + block_m * geometry.head_dim * geometry.q_bytes
    while True:
        for num_stages in (3,) if keys_first else (3, 2):
            tiles = num_stages - 2 if keys_first else num_stages - 1
            if block_n * width * tiles * geometry.kv_bytes <= room:
                return block_n, num_stages
        if block_n == 16:
            return block_n, 1
        block_n //= 2


def cut(width: int) -> tuple[int, int]:
    """A width as (power of two, rest rounded up to one): 192 -> (128, 64), 80 -> (64, 16), 112 -> (128, 0).

    Both at least 16, which is what a matrix product takes, and never alike: two products in a row with factors at the same
    place of shared memory share their descriptors, of which ptxas 12.8 was seen to leave one uninitialised (values 20 wide,
    as 16 and 16).
    """
    main = max(16, 1 << (width.bit_length() - 1))
    rest = max(16, power_of_two(width - main)) if width > main else 0
    return (2 * main, 0) if rest == main else (main, rest)


def aligned(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether heads begin at multiples of 16 bytes and are multiples of 16 numbers apart. Tiles of others go to shared memory
    number by number, by way of registers."""
    return all(part.data_ptr() % 16 == 0 and all(step % 16 == 0 for step in part.stride()[:3]) for part in (keys, values))
