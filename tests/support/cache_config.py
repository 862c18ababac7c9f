"""CacheConfigs of a given number of blocks."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.config import CacheConfig
from headrace.model_spec import Arena, CacheGroup, block_sizes


def cache_holding(
    counts: Sequence[int], *, block_size: int, groups: tuple[CacheGroup, ...], enable_prefix_caching: bool, dtype: str
) -> CacheConfig:
    """A cache that holds ``counts[g]`` blocks of each group at once, and the null block."""
    nbytes = Arena.holding(block_sizes(groups, block_size), counts).nbytes
    return CacheConfig(
        block_size=block_size, groups=groups, nbytes=nbytes, enable_prefix_caching=enable_prefix_caching, dtype=dtype
    )
