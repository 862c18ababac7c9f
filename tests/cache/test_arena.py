"""The arena's tensors: every layer's view is its own to the byte, aligned, and moves with its block."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cache_config import cache_holding
from support.models.harness import disjoint_blocks

from headrace.cache.blocks import ArenaBlocks
from headrace.cache.layer import LayerCache
from headrace.cache.planes import allocate, write
from headrace.config import CacheConfig
from headrace.kernels.kv_cache import quantize
from headrace.model_spec import AttentionSpec, DenseSpec, ModelSpec, cache_groups
from headrace.model_spec.kv import ALIGNMENT, FP8_KV

DTYPES = {"float32": 4, "bfloat16": 2}


@st.composite
def layer_lists(draw: st.DrawFn) -> list[AttentionSpec]:
    """Any geometry a layer; some read the KV of an earlier one of the same."""
    layers: list[AttentionSpec] = []
    for index in range(draw(st.integers(1, 7))):
        keepers = [spec for spec in layers if spec.kv_source is None]
        if keepers and draw(st.integers(0, 4)) == 0:
            source = draw(st.sampled_from(keepers))
            kv_heads, d, dv, window, read = source.num_kv_heads, source.head_dim, source.v_head_dim, source.window, source.layer
        else:
            kv_heads, read = draw(st.sampled_from([1, 2, 3, 5, 8])), None
            d, dv = draw(st.sampled_from([1, 5, 8, 12, 24, 64])), draw(st.sampled_from([1, 3, 8, 16, 40]))
            window = draw(st.sampled_from([None, None, 6, 9, 40]))
        group_size = draw(st.sampled_from([1, 2, 3, 7]))
        layers.append(
            AttentionSpec(
                layer=index,
                num_heads=kv_heads * group_size,
                num_kv_heads=kv_heads,
                head_dim=d,
                v_head_dim=dv,
                scale=1.0,
                window=window,
                kv_source=read,
            )
        )
    return layers


def model(layers: list[AttentionSpec]) -> ModelSpec:
    return ModelSpec(
        architecture="Test",
        vocab_size=10,
        hidden_size=16,
        layers=tuple(layers),
        mlps=(DenseSpec(16),) * len(layers),
        norm_eps=1e-6,
        max_position=64,
    )


def make(layers: list[AttentionSpec], counts: list[int], block_size: int, dtype: str) -> tuple[CacheConfig, list[LayerCache]]:
    groups = cache_groups(layers, dtype)
    config = cache_holding(counts[: len(groups)], block_size=block_size, groups=groups, enable_prefix_caching=True, dtype=dtype)
    return config, allocate(config, model(layers), "cpu", dtype)


def raw(cache: LayerCache) -> torch.Tensor:
    """All bytes of the memory under a layer's tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(cache.rows.untyped_storage())


@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(
    layer_lists(),
    st.lists(st.integers(1, 5), min_size=5, max_size=5),
    st.sampled_from([1, 2, 4, 16]),
    st.sampled_from(list(DTYPES)),
)
def test_every_layers_blocks_are_bytes_of_its_own(
    layers: list[AttentionSpec], counts: list[int], block_size: int, dtype: str
) -> None:
    """Each token of each block that may be owned at once is written with a number of its own, layer by layer; nobody's
    changes another's, nothing else changes, and the bytes are those of the formula."""
    config, caches = make(layers, counts, block_size, dtype)
    keepers = [spec for spec in layers if spec.kv_source is None]
    per_token = {spec.layer: spec.num_kv_heads * (spec.head_dim + spec.v_head_dim) * DTYPES[dtype] for spec in keepers}
    for group, size in zip(config.groups, config.arena.block_bytes, strict=True):
        exact = block_size * sum(per_token[spec.layer] for spec in keepers if spec.window == group.window)
        mixed = {block_size * per_token[layer] % ALIGNMENT == 0 for layer in group.layers} == {True, False}
        assert exact == block_size * group.bytes_per_token
        assert size == exact or (mixed and len(config.groups) > 1 and exact < size < exact + ALIGNMENT)
    numbers = itertools.count(1)
    expected: dict[tuple[int, int, int], int] = {}
    blocks = disjoint_blocks(config.arena, counts[: len(config.groups)])
    for spec, cache in zip(layers, caches, strict=True):
        if spec.kv_source is not None:
            assert cache.rows.data_ptr() == caches[spec.kv_source].rows.data_ptr()
            continue
        for block, offset in itertools.product(blocks[cache.group], range(block_size)):
            value = expected[spec.layer, block, offset] = next(numbers) % 251 + 1
            k = torch.full((1, spec.num_kv_heads, spec.head_dim), value, dtype=cache.rows.dtype)
            v = torch.full((1, spec.num_kv_heads, spec.v_head_dim), value, dtype=cache.rows.dtype)
            write(cache, k, v, torch.tensor([block * block_size + offset]))
    for (layer, block, offset), value in expected.items():
        assert (caches[layer].rows[block, offset] == value).all()
    storages = {cache.rows.untyped_storage().data_ptr(): raw(cache) for cache in caches}
    assert sum(storage.numel() for storage in storages.values()) == config.nbytes
    # In either dtype a number from 1 to 251 has as many bytes that are not zero wherever it stands.
    touched = sum(
        per_token[layer]
        // DTYPES[dtype]
        * int(torch.tensor([value], dtype=getattr(torch, dtype)).view(torch.uint8).count_nonzero())
        for (layer, _, _), value in expected.items()
    )
    assert sum(int(storage.count_nonzero()) for storage in storages.values()) == touched
    if len(config.groups) > 1:
        assert not storages.popitem()[1][: config.arena.reserved].any()


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(layer_lists(), st.lists(st.integers(1, 4), min_size=5, max_size=5), st.sampled_from([16, 32]))
def test_fp8_planes_are_bytes_of_their_own(layers: list[AttentionSpec], counts: list[int], block_size: int) -> None:
    """Numbers and scales of each token that may be there at once, written layer by layer: all are read back, every block's
    bytes have one owner, and kernels find them aligned."""
    config, caches = make(layers, counts, block_size, FP8_KV)
    start = caches[0].rows.untyped_storage().data_ptr() if len(config.groups) > 1 else None
    blocks = disjoint_blocks(config.arena, counts[: len(config.groups)])
    generator = torch.Generator().manual_seed(0)
    written = {}
    for spec, cache in zip(layers, caches, strict=True):
        assert cache.dirty == (len(config.groups) > 1)
        if spec.kv_source is not None:
            assert cache.rows.data_ptr() == caches[spec.kv_source].rows.data_ptr()
            assert torch.equal(cache.values.view(torch.uint8), caches[spec.kv_source].values.view(torch.uint8))
            continue
        assert cache.rows.shape[1] == block_size * spec.num_kv_heads * (spec.head_dim + spec.v_head_dim + 8)
        for part in (cache.rows, cache.keys, cache.values, cache.k_scale):
            assert part is not None and part.stride(0) * part.itemsize % ALIGNMENT == 0
            assert start is None or (part.data_ptr() - start) % ALIGNMENT == 0
        own = torch.tensor(blocks[cache.group])
        slots = (own[:, None] * block_size + torch.arange(block_size)).flatten()
        k = torch.randn(len(slots), spec.num_kv_heads, spec.head_dim, generator=generator)
        v = torch.randn(len(slots), spec.num_kv_heads, spec.v_head_dim, generator=generator)
        write(cache, k, v, slots)
        written[spec.layer] = (own, k, v)
    for layer, (own, k, v) in written.items():
        cache = caches[layer]
        for new, stored, scale in ((k, cache.keys, cache.k_scale), (v, cache.values, cache.v_scale)):
            wanted, factor = quantize(new)
            assert scale is not None and torch.equal(scale[own].flatten(0, 1), factor)
            assert torch.equal(stored[own].flatten(0, 1).float(), wanted.float())
    assert sum({cache.rows.untyped_storage().data_ptr(): raw(cache).numel() for cache in caches}.values()) == config.nbytes


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(layer_lists(), st.sampled_from([1, 4, 16]))
def test_a_layer_whose_blocks_are_aligned_is_aligned_in_every_block(layers: list[AttentionSpec], block_size: int) -> None:
    config, caches = make(layers, [3] * 5, block_size, "bfloat16")
    start = caches[0].rows.untyped_storage().data_ptr()
    for cache in caches:
        own = cache.rows[0].numel() * 2
        if len(config.groups) > 1 and own % ALIGNMENT == 0:
            assert (cache.rows.data_ptr() - start) % ALIGNMENT == 0 == cache.rows.stride(0) * 2 % ALIGNMENT
            others = {own % 128 for own in (one.rows[0].numel() * 2 for one in caches)}
            if others == {0}:
                assert (cache.rows.data_ptr() - start) % 128 == 0 == cache.rows.stride(0) * 2 % 128


def test_offsets_beyond_32_bits() -> None:
    """An arena of 6 GB, of which nothing is touched: strides and offsets reach its last block."""
    layers = [
        AttentionSpec(
            layer=i, num_heads=8, num_kv_heads=8, head_dim=256, v_head_dim=256, scale=1.0, window=128 if i % 3 else None
        )
        for i in range(6)
    ]
    groups = cache_groups(layers, "bfloat16")
    config = CacheConfig(block_size=16, groups=groups, nbytes=6 << 30, enable_prefix_caching=True, dtype="bfloat16")
    with torch.device("meta"):
        caches = allocate(config, model(layers), "meta", "bfloat16")
    for cache in caches:
        last = cache.rows[-1]
        assert (last.storage_offset() + last.numel()) * 2 <= config.nbytes
        assert last.storage_offset() * 2 >= config.nbytes - 2 * config.arena.block_bytes[cache.group] > 2**32


LAYERS = [
    AttentionSpec(layer=0, num_heads=6, num_kv_heads=3, head_dim=8, v_head_dim=4, scale=1.0),
    AttentionSpec(layer=1, num_heads=4, num_kv_heads=4, head_dim=12, v_head_dim=8, scale=1.0, window=9),
    AttentionSpec(layer=2, num_heads=4, num_kv_heads=1, head_dim=12, v_head_dim=20, scale=1.0, window=9),
]


def test_moves_carry_every_layer_of_the_group_in_their_order() -> None:
    config, caches = make(LAYERS, [6, 6], 4, "float32")
    blocks = ArenaBlocks(config, caches)
    memory = raw(caches[0])
    memory.copy_(torch.randint(256, memory.shape, dtype=torch.uint8))
    chance = random.Random(0)
    moves = [(group, *chance.sample(range(1, config.num_blocks[group]), 2)) for group in (1, 0, 1, 1, 0, 1) for _ in range(3)]
    expected = memory.clone()
    for group, source, target in moves:
        size = config.arena.block_bytes[group]
        expected[target * size : (target + 1) * size] = expected[source * size : (source + 1) * size].clone()
    blocks.move(moves)
    assert torch.equal(memory, expected)
    caches[1].rows[3], caches[2].rows[3] = 1.0, 2.0
    blocks.move([(1, 3, 5)])
    assert (caches[1].rows[5] == 1).all() and (caches[2].rows[5] == 2).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_group_has_a_tensor_a_layer(dtype: str) -> None:
    layers = [dataclasses.replace(spec, layer=index) for index, spec in enumerate(LAYERS[1:])]
    config, caches = make(layers, [6], 4, dtype)
    assert [cache.rows.is_contiguous() for cache in caches] == [True, True]
    assert sum(cache.rows.nbytes for cache in caches) == config.nbytes == 7 * config.arena.block_bytes[0]
