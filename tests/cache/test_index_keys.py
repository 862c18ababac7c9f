"""Index keys in the cache: beside the KV of their layer, alone or in an arena with other cache groups."""

from __future__ import annotations

import pytest
import torch
from support.cache_config import cache_holding
from support.models.harness import model_spec

from headrace.cache.planes import allocate, write_index_keys
from headrace.model_spec import AttentionSpec, IndexerSpec, cache_groups


def layer(number: int, window: int | None = None) -> AttentionSpec:
    indexer = IndexerSpec(top_k=3, num_heads=2, head_dim=6, weighted=True) if window is None else None
    heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "v_head_dim": 8, "scale": 1.0}
    return AttentionSpec(layer=number, window=window, indexer=indexer, **heads)


@pytest.mark.parametrize("layers", [[layer(0), layer(1)], [layer(0), layer(1, 8), layer(2)]], ids=["alone", "in an arena"])
def test_every_number_of_a_block_is_a_place_of_its_own(layers: list[AttentionSpec]) -> None:
    groups = cache_groups(layers, "float32")
    counts = [3 + group.index for group in groups]
    config = cache_holding(counts, block_size=4, groups=groups, enable_prefix_caching=False, dtype="float32")
    caches = allocate(config, model_spec(layers), "cpu", "float32")
    held = [cache for cache in caches if cache.index_keys is not None]
    assert len(held) == 2 and all(cache.group == 0 for cache in held)
    keys = torch.arange(1.0, 19).view(3, 6)
    for number, cache in enumerate(held):
        write_index_keys(cache, keys * (number + 1), torch.tensor([4, -1, 11]))
        cache.rows[1:3] = -1.0
    for number, cache in enumerate(held):
        assert cache.index_keys is not None
        written = cache.index_keys[1:3].flatten(0, 1)
        assert torch.equal(written[[0, 7]], keys[[0, 2]] * (number + 1)) and not written[1:7].any()
        assert (cache.rows[1:3] == -1.0).all()
    block = sum(cache.rows[0].nbytes + cache.index_keys[0].nbytes for cache in held if cache.index_keys is not None)
    assert config.arena.block_bytes[0] == block == groups[0].block_bytes(4)
