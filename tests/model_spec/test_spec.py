"""Specs: widths, groups and bytes derive from the layer's own numbers; what does not fit is refused by name."""

from __future__ import annotations

import dataclasses

import pytest

from headrace.errors import ConfigError, ContradictionError
from headrace.model_spec import AttentionSpec, MLASpec, ModelFacts, cache_groups, layer_kv
from headrace.model_spec.kv import FP8_KV


def spec(layer: int = 0, **changes: object) -> AttentionSpec:
    numbers: dict = {"layer": layer, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "v_head_dim": 4, "scale": 1.0}
    return AttentionSpec(**{**numbers, **changes})


def test_widths_follow_keys_and_values_apart() -> None:
    one = spec()
    assert (one.q_size, one.k_size, one.v_size, one.out_size, one.group_size) == (48, 16, 8, 24, 3)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(AttentionSpec)])
def test_nothing_of_a_layer_changes(field: str) -> None:
    """Its scale above all: what is set for a call and not restored, as after an exception, is the next call's."""
    one = spec()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(one, field, 3)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"num_kv_heads": 4}, "num_kv_heads"),
        ({"rotary_dim": 10}, "rotary_dim"),
        ({"rotary_dim": 3}, "rotary_dim"),
        ({"window": 0}, "sliding_window"),
    ],
)
def test_misfits_name_the_layer_and_the_parameter(changes: dict, param: str) -> None:
    with pytest.raises(ConfigError, match="layer 5") as caught:
        spec(5, **changes)
    assert caught.value.param == param


def test_bytes_are_the_sum_over_layers_and_planes() -> None:
    layers = [spec(0), spec(1, num_kv_heads=6), spec(2, v_head_dim=8, window=32), spec(3, kv_source=0)]
    assert [layer_kv(one, "bfloat16").bytes_per_token for one in layers] == [48, 144, 64, 0]
    groups = cache_groups(layers, "float32")
    assert [(group.window, group.layers, group.bytes_per_token) for group in groups] == [
        (None, (0, 1), 2 * (48 + 144)),
        (32, (2,), 2 * 64),
    ]


def test_fp8_is_a_byte_a_number_and_two_scales_a_head() -> None:
    layers = [spec(0), spec(1, num_kv_heads=6, v_head_dim=20), spec(2, window=32), spec(3, kv_source=0)]
    planes = layer_kv(layers[1], FP8_KV).planes
    assert [(plane.name, plane.nbytes) for plane in planes] == [("k", 48), ("v", 120), ("k_scale", 24), ("v_scale", 24)]
    assert [layer_kv(one, FP8_KV).bytes_per_token for one in layers] == [24 + 16, 168 + 48, 24 + 16, 0]
    assert [group.bytes_per_token for group in cache_groups(layers, FP8_KV)] == [256, 40]
    mla = spec(4, num_kv_heads=1, v_head_dim=6, rotary_dim=2, mla=MLASpec(head_dim=8, v_head_dim=8))
    with pytest.raises(ConfigError, match="layer 4: compressed KV cannot be kept in FP8") as caught:
        layer_kv(mla, FP8_KV)
    assert caught.value.param == "kv_cache_dtype"


def test_groups_run_from_full_to_the_narrowest_window() -> None:
    layers = [spec(0, window=16), spec(1), spec(2, window=64), spec(3, window=16)]
    assert [(group.index, group.window, group.layers) for group in cache_groups(layers, "float32")] == [
        (0, None, (1,)),
        (1, 64, (2,)),
        (2, 16, (0, 3)),
    ]


MLA = spec(0, num_kv_heads=1, head_dim=12, v_head_dim=8, rotary_dim=4, mla=MLASpec(head_dim=8, v_head_dim=4))


@pytest.mark.parametrize(
    ("source", "reader", "message", "contradicts"),
    [
        (spec(0), spec(1, kv_source=1), "not an earlier layer", True),
        (spec(0), spec(1, kv_source=-1), "not an earlier layer", True),
        (spec(0), spec(1, kv_source=0, num_kv_heads=1), "has num_kv_heads 2, not 1", True),
        (spec(0), spec(1, kv_source=0, head_dim=6), "has head_dim 8, not 6", True),
        (spec(0), spec(1, kv_source=0, v_head_dim=8), "has v_head_dim 4, not 8", True),
        (spec(0, window=4), spec(1, kv_source=0), "too few", False),
        (spec(0, window=4), spec(1, kv_source=0, window=5), "too few", False),
        (MLA, spec(1, kv_source=0, num_kv_heads=1, head_dim=12, v_head_dim=8), "compressed KV", False),
    ],
)
def test_kv_that_cannot_be_read_is_refused(
    source: AttentionSpec, reader: AttentionSpec, message: str, contradicts: bool
) -> None:
    """The error comes as soon as all layers are known, and not when the cache is allocated."""
    with pytest.raises(ConfigError, match=f"layer 1: kv_source .*{message}") as caught:
        facts(source, reader)
    assert caught.value.param == "kv_source" and isinstance(caught.value, ContradictionError) == contradicts


def test_no_chains_of_kv_sources() -> None:
    with pytest.raises(ContradictionError, match="layer 2: kv_source 1 keeps no KV"):
        facts(spec(0), spec(1, kv_source=0), spec(2, kv_source=1))


def facts(*layers: AttentionSpec) -> ModelFacts:
    return ModelFacts(architecture="Test", vocab_size=10, hidden_size=16, layers=layers, max_position=64)
