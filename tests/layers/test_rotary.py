"""Rotary tables equal transformers', number for number, for every way of scaling."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import Gemma4TextConfig, LlamaConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headrace.errors import ConfigError
from headrace.layers.rotary import RotaryTable, frequencies
from headrace.model_spec import RopeSpec
from headrace.models.families.llama import FAMILY
from headrace.models.hf_config import rope_specs

SCALINGS = {
    "default": {"rope_type": "default", "rope_theta": 123456.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 500000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    },
    "yarn-all": {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 1.3,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
        "rope_theta": 50000.0,
    },
}


def llama(scaling: dict, head_dim: int = 64, length: int = 256) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, max_position_embeddings=length, rope_parameters=dict(scaling)
    )


def theirs(module: LlamaRotaryEmbedding, positions: torch.Tensor, width: int) -> torch.Tensor:
    cos, sin = module(torch.empty(1), positions[None])
    return torch.cat((cos[0, :, : width // 2], sin[0, :, : width // 2]), dim=1)


@pytest.mark.parametrize("head_dim", [64, 80, 6])
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_equal_transformers(name: str, head_dim: int) -> None:
    config = llama(SCALINGS[name], head_dim)
    table = RotaryTable(rope_specs(config)[0], head_dim, "cpu")
    positions = torch.tensor([0, 1, 2, 63, 64, 200, 255])
    table.reserve(256)
    assert torch.equal(table(positions), theirs(LlamaRotaryEmbedding(config), positions, head_dim))


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_proportional_equals_transformers(share: float) -> None:
    """The angles of the whole head, those beyond the share zero: the pairs are half a head apart all the same."""
    sets = {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    types = ["sliding_attention", "full_attention"]
    config = Gemma4TextConfig(num_hidden_layers=2, layer_types=types, head_dim=16, global_head_dim=40, rope_parameters=sets)
    module = Gemma4TextRotaryEmbedding(config)
    positions = torch.tensor([0, 1, 2, 63, 200])
    for kind, width, rope in zip(types, (16, 40), rope_specs(config), strict=True):
        table = RotaryTable(rope, width, "cpu")
        table.reserve(201)
        cos, sin = module(torch.empty(1), positions[None], kind)
        expected = torch.cat((cos[0, :, : width // 2], sin[0, :, : width // 2]), dim=1)
        assert torch.equal(table(positions), expected)


def test_dynamic_grows_as_tokens_come_one_by_one() -> None:
    config = llama(SCALINGS["dynamic"], length=16)
    table = RotaryTable(rope_specs(config)[0], 64, "cpu")
    table.reserve(40)
    module = LlamaRotaryEmbedding(config)
    for position in range(40):
        one = torch.tensor([position])
        torch.testing.assert_close(table(one), theirs(module, one, 64), atol=5e-6, rtol=0)
    assert not torch.equal(table(torch.tensor([39])), theirs(LlamaRotaryEmbedding(llama(SCALINGS["default"])), one, 64))


@pytest.mark.parametrize("changes", [{}, {"factor": 2.0}, {"attention_factor": 1.2}], ids=str)
def test_longrope_equals_transformers_on_either_side_of_the_length_it_was_trained_for(changes: dict[str, float]) -> None:
    lists = {"short_factor": [1.0 + i / 50 for i in range(32)], "long_factor": [2.0 + i for i in range(32)]}
    scaling = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, **lists, **changes}
    config = llama(scaling)
    (spec, *_) = rope_specs(config)
    table = RotaryTable(spec, 64, "cpu")
    table.reserve(64)
    module = LlamaRotaryEmbedding(config)
    positions = torch.arange(64)
    assert torch.equal(table(positions), theirs(module, positions, 64))
    long = RotaryTable(dataclasses.replace(spec, long_factors=True), 64, "cpu")
    long.reserve(65)
    assert torch.equal(long(torch.arange(65)), theirs(module, torch.arange(65), 64))
    assert not torch.equal(long(positions), table(positions))
    assert FAMILY.model_spec(config).max_position == 64


def test_growing_keeps_what_was_there() -> None:
    table = RotaryTable(RopeSpec(10000.0), 8, "cpu")
    table.reserve(10)
    before = table(torch.arange(10))
    table.reserve(5000)
    assert torch.equal(table(torch.arange(10)), before)
    assert table(torch.tensor([4999])).shape == (1, 8)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (RopeSpec(1e4, "bent"), "'bent' is not supported; supported are: default, linear"),
        (RopeSpec(1e4, "longrope"), "short_factor of rope_type 'longrope' must be 4 positive numbers"),
        (RopeSpec(1e4, "longrope", {"short_factor": [1.0, 2.0]}), "short_factor .* must be 4 positive numbers"),
        (RopeSpec(1e4, "longrope", {"short_factor": [1.0, 2.0, 0.0, 1.0]}), "short_factor .* must be 4 positive numbers"),
        (RopeSpec(1e4, "longrope", {"short_factor": [1.0] * 4}), "original_max_position_embeddings .* is missing"),
        (RopeSpec(1e4, "linear"), "factor of rope_type 'linear' is missing"),
        (RopeSpec(1e4, "linear", {"factor": "four"}), "'four', not a positive number"),
        (RopeSpec(1e4, "linear", {"factor": 0}), "0, not a positive number"),
        (RopeSpec(1e4, "llama3", {"factor": 8.0, "low_freq_factor": 1.0}), "high_freq_factor of rope_type 'llama3' is missing"),
        (RopeSpec(1e4, "yarn", {"factor": 8.0}), "original_max_position_embeddings of rope_type 'yarn' is missing"),
        (RopeSpec(1e4, "yarn", {"factor": float("nan")}), "not a positive number|missing"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(rope: RopeSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        frequencies(rope, 8)
    assert caught.value.param == "rope_parameters"
