"""The FP8 cache: every byte of a block belongs to one number, and a block is all that must be moved."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headrace.cache.fp8 import Fp8LayerCache, check_alignment
from headrace.errors import ConfigError
from headrace.kernels.kv_cache import reshape_and_cache
from headrace.model_spec import AttentionSpec, layer_kv
from headrace.model_spec.kv import FP8_KV


def spec(**changes: int) -> AttentionSpec:
    values = {"layer": 3, "num_heads": 6, "num_kv_heads": 2, "head_dim": 24, "v_head_dim": 16, "scale": 1.0}
    return AttentionSpec(**{**values, **changes})


def zeros(spec: AttentionSpec, num_blocks: int, block_size: int) -> Fp8LayerCache:
    rows = torch.zeros(num_blocks, block_size * layer_kv(spec, FP8_KV).bytes_per_token, dtype=torch.uint8)
    return Fp8LayerCache(spec, 1, rows, tokens=block_size)


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 3, "head_dim": 40, "v_head_dim": 80}], ids=str)
def test_every_byte_has_one_owner(changes: dict[str, int]) -> None:
    cache = zeros(spec(**changes), 3, 8)
    assert cache.block_size == 8
    parts = [cache.keys, cache.values, cache.k_scale, cache.v_scale]
    assert [part.shape for part in parts[2:]] == [cache.keys.shape[:3]] * 2
    for part in parts:
        before = cache.rows.clone()
        part.copy_(torch.full(part.shape, 3.0))
        changed = (cache.rows != before).sum()
        # 3.0 is 0x44 in e4m3, and 0x40400000 in float32, of which two bytes are 0.
        assert changed == part.numel() * (1 if part.itemsize == 1 else 2)
    assert sum(part.numel() * part.itemsize for part in parts) == cache.rows.numel()
    assert all((part.float() == 3).all() for part in parts)


def test_what_lies_side_by_side() -> None:
    cache = zeros(spec(), 2, 16)
    assert cache.keys.stride(3) == 1 and cache.values.stride(1) == 1
    assert cache.k_scale.stride() == cache.v_scale.stride() and cache.k_scale.stride(1) == 1


def test_a_block_can_be_moved_as_bytes() -> None:
    cache = zeros(spec(), 4, 8)
    key, value = torch.randn(8, 2, 24), torch.randn(8, 2, 16)
    reshape_and_cache(key, value, cache.keys, cache.values, torch.arange(8, 16), cache.k_scale, cache.v_scale)
    cache.rows[3] = cache.rows[1]
    for stored, scale, new in ((cache.keys, cache.k_scale, key), (cache.values, cache.v_scale, value)):
        restored = stored[3].float() * scale[3].unsqueeze(-1)
        torch.testing.assert_close(restored, new, rtol=1 / 16, atol=0.01)
        assert (stored[0].float() == 0).all() and (stored[2].float() == 0).all()


def test_blocks_of_an_arena_lie_apart() -> None:
    """Blocks at an offset and a stride that are other layers' bytes hold the same numbers, and change no others."""
    alone = zeros(spec(), 4, 8)
    arena = torch.full((4, alone.rows.shape[1] + 48), 7, dtype=torch.uint8)
    inside = dataclasses.replace(alone, rows=arena[:, 32:-16].zero_())
    key, value, slots = torch.randn(8, 2, 24), torch.randn(8, 2, 16), torch.arange(12, 20)
    for cache in (alone, inside):
        reshape_and_cache(key, value, cache.keys, cache.values, slots, cache.k_scale, cache.v_scale)
    assert torch.equal(inside.rows, alone.rows) and alone.rows.any()
    assert (arena[:, :32] == 7).all() and (arena[:, -16:] == 7).all()


def test_unaligned_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"layer 3: .* block_size .* 40, 32 and 88") as caught:
        check_alignment(spec(head_dim=20), 1)
    assert caught.value.param == "block_size"
