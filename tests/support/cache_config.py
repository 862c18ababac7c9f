"""CacheConfigs of a given number of blocks."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.config import CacheConfig
from headrace.model_spec import Arena, CacheGroup, StateGroup, block_sizes


def cache_holding(
    counts: Sequence[int],
    *,
    block_size: int,
    groups: tuple[CacheGroup, ...],
    enable_prefix_caching: bool,
    dtype: str,
    states: StateGroup | None = None,
    snapshots: int = 0,
    state_grid: int = 0,
) -> CacheConfig:
    """A cache that holds ``counts[g]`` blocks of each group of the arena at once, and the null block.

    ``snapshots``: number of them that ``state_snapshot_bytes`` is for.
    """
    state_bytes = 0 if states is None else states.block_bytes
    nbytes = Arena.holding(block_sizes(groups, block_size, state_bytes), counts).nbytes
    return CacheConfig(
        block_size=block_size,
        groups=groups,
        nbytes=nbytes,
        enable_prefix_caching=enable_prefix_caching,
        dtype=dtype,
        states=states,
        state_snapshot_bytes=snapshots * state_bytes,
        state_grid=state_grid,
    )
