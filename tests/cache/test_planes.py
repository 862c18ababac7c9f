"""The KV cache: exact bytes, zeroes, sharing, and writes that touch nothing else."""

from __future__ import annotations

import pytest
import torch
from support.cache_config import cache_holding

from headrace.cache.layer import LayerCache
from headrace.cache.planes import allocate, write
from headrace.config import CacheConfig
from headrace.errors import ConfigError
from headrace.model_spec import AttentionSpec, DenseSpec, ModelSpec, cache_groups


def layer(index: int, **changes: object) -> AttentionSpec:
    values: dict = {"layer": index, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "v_head_dim": 4, "scale": 1.0}
    return AttentionSpec(**{**values, **changes})


def model(*layers: AttentionSpec) -> ModelSpec:
    return ModelSpec(
        architecture="Test",
        vocab_size=10,
        hidden_size=16,
        layers=layers,
        mlps=(DenseSpec(16),) * len(layers),
        norm_eps=1e-6,
        max_position=64,
    )


def config(spec: ModelSpec, dtype: str = "float32", block_size: int = 4) -> CacheConfig:
    groups = cache_groups(spec.layers, dtype)
    counts = [4 + 2 * group.index for group in groups]
    return cache_holding(counts, block_size=block_size, groups=groups, enable_prefix_caching=True, dtype=dtype)


MIXED = model(layer(0), layer(1, num_kv_heads=1), layer(2, num_kv_heads=3, v_head_dim=11, window=8), layer(3, kv_source=0))


ALONE = model(layer(0), layer(1, num_kv_heads=1), layer(2, num_kv_heads=3, v_head_dim=11), layer(3, kv_source=0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", [ALONE, MIXED])
def test_bytes_are_exactly_the_tensors(spec: ModelSpec, dtype: str) -> None:
    sized = config(spec, dtype)
    storages = {
        cache.rows.untyped_storage().data_ptr(): cache.rows.untyped_storage() for cache in allocate(sized, spec, "cpu", dtype)
    }
    assert len(storages) == (3 if spec is ALONE else 1)
    assert sum(storage.nbytes() for storage in storages.values()) == sized.nbytes


def test_shapes_follow_each_layer() -> None:
    caches = allocate(config(ALONE), ALONE, "cpu", torch.float32)
    assert [tuple(cache.rows.shape) for cache in caches] == [(5, 4, 2, 12), (5, 4, 1, 12), (5, 4, 3, 19), (5, 4, 2, 12)]
    assert all(cache.rows.is_contiguous() and not cache.rows.any() for cache in caches)
    caches = allocate(config(MIXED), MIXED, "cpu", torch.float32)
    # Blocks of 576 and 912 bytes: 912 for the null block, 4 * 576 + 6 * 912 of others, and not quite another 576.
    assert [tuple(cache.rows.shape) for cache in caches] == [(16, 4, 2, 12), (16, 4, 1, 12), (10, 4, 3, 19), (16, 4, 2, 12)]
    assert [cache.group for cache in caches] == [0, 0, 1, 0]
    assert caches[2].keys.shape == (10, 4, 3, 8) and caches[2].values.shape == (10, 4, 3, 11)
    assert all(not cache.rows.any() for cache in caches)


def test_a_layer_can_read_anothers_kv() -> None:
    caches = allocate(config(MIXED), MIXED, "cpu", "float32")
    assert caches[3].rows.data_ptr() == caches[0].rows.data_ptr()
    assert caches[3].spec.layer == 3


def test_a_narrower_window_may_read_full_kv() -> None:
    spec = model(layer(0), layer(1, kv_source=0, window=4))
    caches = allocate(config(spec), spec, "cpu", "float32")
    assert caches[1].group == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_dtype_that_was_not_accounted_for_is_refused(dtype: str) -> None:
    with pytest.raises(ConfigError) as caught:
        allocate(config(MIXED), MIXED, "cpu", dtype)
    assert caught.value.param == "dtype"


def fresh(spec: AttentionSpec, dtype: torch.dtype = torch.float32) -> LayerCache:
    rows = torch.full((6, 4, spec.num_kv_heads, spec.head_dim + spec.v_head_dim), 7.0, dtype=dtype)
    return LayerCache(spec, 0, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("widths", [(8, 8), (8, 4), (5, 13)])
def test_writes_go_where_they_should_and_nowhere_else(widths: tuple[int, int], dtype: torch.dtype) -> None:
    spec = layer(0, head_dim=widths[0], v_head_dim=widths[1])
    cache = fresh(spec, dtype)
    slots = [9, -1, 22, 0, -1, 23]
    # K and V as views of one projection's output, as in a model.
    kv = torch.randn(6, 2 * sum(widths)).to(dtype)
    k, v = (part.view(6, 2, -1) for part in kv.split([2 * width for width in widths], dim=1))
    write(cache, k, v, torch.tensor(slots))
    expected = torch.full_like(cache.rows, 7.0)
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // 4, slot % 4] = torch.cat((k[token], v[token]), dim=-1)
    assert torch.equal(cache.rows, expected)


def test_padding_alone_writes_nothing() -> None:
    cache = fresh(layer(0))
    write(cache, torch.randn(3, 2, 8), torch.randn(3, 2, 4), torch.full((3,), -1))
    assert (cache.rows == 7).all()
