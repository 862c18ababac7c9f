"""MiMo-V2-Flash's config.json as it is published, read as a user's: from a folder, through the choice of an implementation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MiMoV2FlashConfig, MiMoV2FlashForCausalLM

from headrace import LLM, SamplingParams
from headrace.config import EngineArgs
from headrace.errors import ConfigError
from headrace.model_spec import MoeSpec
from headrace.models.implementation import choose
from headrace.sources.files import find_model
from models.saved_config import native_spec

COMMON = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "dtype": "bfloat16",
    "vocab_size": 89,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "v_head_dim": 16,
    "attention_value_scale": 0.707,
    "attention_bias": False,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
PUBLISHED = COMMON | {
    "layernorm_epsilon": 0.01,
    "rope_theta": 2_000_000,
    "swa_rope_theta": 5_000,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "hybrid_block_size": None,
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "moe_layer_freq": [0, 1, 0, 1],
    "sliding_window": 15,
    "sliding_window_size": 15,
    "attention_chunk_size": 15,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 24,
    "swa_v_head_dim": 16,
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_shared_experts": None,
    "routed_scaling_factor": None,
}
TRANSFORMERS = COMMON | {
    "rms_norm_eps": 0.01,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 2e6, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.5},
    },
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
    "sliding_window": 16,
}


def test_the_published_words_and_those_of_transformers_are_the_same_model(tmp_path: Path) -> None:
    spec = native_spec(tmp_path, PUBLISHED)
    assert spec == native_spec(tmp_path, TRANSFORMERS) == native_spec(tmp_path, PUBLISHED | TRANSFORMERS)
    assert spec.norm_eps == 0.01
    assert [(one.num_kv_heads, one.window, one.sinks) for one in spec.layers] == [
        (2, None, False),
        (4, 16, True),
        (4, 16, True),
        (2, None, False),
    ]
    assert [(one.rope and one.rope.theta, one.rotary_dim) for one in spec.layers[:2]] == [(2e6, 12), (5e3, 12)]
    assert [isinstance(mlp, MoeSpec) for mlp in spec.mlps] == [False, True, False, True]


def test_a_published_config_is_served_natively_by_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    args = EngineArgs(model=str(tmp_path), load_format="dummy")
    assert choose(args, find_model(args)).decisions[0].value == "native"


def test_published_sinks_are_as_they_say(tmp_path: Path) -> None:
    changed = {"add_full_attention_sink_bias": True, "add_swa_attention_sink_bias": False}
    assert [one.sinks for one in native_spec(tmp_path, PUBLISHED | changed).layers] == [True, False, False, True]


def test_a_scaling_is_that_of_both_kinds_each_with_its_theta(tmp_path: Path) -> None:
    spec = native_spec(tmp_path, PUBLISHED | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert [one.rope and (one.rope.kind, one.rope.theta) for one in spec.layers[:2]] == [("linear", 2e6), ("linear", 5e3)]


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({}, [2, 4, 4, 2]),
        ({"swa_num_key_value_heads": 8}, [2, 8, 8, 2]),
        ({"num_key_value_heads_list": [2, 4, 4, 2]}, [2, 4, 4, 2]),
        ({"num_key_value_heads_list": [4, 2, 8, 1]}, [4, 2, 8, 1]),
        ({"num_key_value_heads_list": [2, 4, 4, 2], "swa_num_key_value_heads": 4}, [2, 4, 4, 2]),
        ({"per_layer_config": {"1": {"num_key_value_heads": 4}, "2": {"num_key_value_heads": 8}}}, [2, 4, 8, 2]),
        ({"per_layer_config": {"2": {"num_key_value_heads": 8}}, "swa_num_key_value_heads": 4}, "contradicts"),
        ({"per_layer_config": {"3": {"num_key_value_heads": 1}}, "swa_num_key_value_heads": 4}, [2, 4, 4, 1]),
        ({"per_layer_config": {"2": {"num_key_value_heads": 8}}}, "layer 1: per_layer_config does not tell"),
        ({"num_key_value_heads_list": [2, 4, 8, 2], "swa_num_key_value_heads": 4}, "layer 2: .* contradicts"),
    ],
)
def test_only_the_number_for_all_layers_is_doubled_where_there_is_a_window(
    changes: dict[str, Any], counts: list[int] | str, tmp_path: Path
) -> None:
    config = TRANSFORMERS | changes
    if isinstance(counts, str):
        with pytest.raises(ConfigError, match=counts):
            native_spec(tmp_path, config)
    else:
        assert [one.num_kv_heads for one in native_spec(tmp_path, config).layers] == counts


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"swa_num_key_value_heads": "8"}, "swa_num_key_value_heads", "layer 1: .* not '8'"),
        ({"swa_num_key_value_heads": 0}, "swa_num_key_value_heads", "layer 1: .* not 0"),
        ({"swa_num_attention_heads": 4}, "swa_num_attention_heads", "layer 1: swa_num_attention_heads 4 is not the 8"),
        ({"swa_head_dim": 32}, "swa_head_dim", "layer 1: swa_head_dim 32"),
        ({"add_swa_attention_sink_bias": "no"}, "add_swa_attention_sink_bias", "'no'"),
        ({"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern", "4 layers, not 2 entries"),
        ({"hybrid_layer_pattern": [0, 1, 2, 0]}, "hybrid_layer_pattern", "layer 2: hybrid_layer_pattern 2"),
        ({"moe_layer_freq": 1}, "moe_layer_freq", "not 1"),
        ({"hybrid_layer_pattern": None, "hybrid_block_size": 2}, "hybrid_block_size", "2 is not supported"),
        ({"layernorm_epsilon": "small"}, "model", "layernorm_epsilon is 'small': expected `float`"),
        ({"layernorm_epsilon": 0.01, "rms_norm_eps": 0.02}, "layernorm_epsilon", "contradicts rms_norm_eps 0.02"),
        ({"rope_theta": "big"}, "model", "rope_theta is 'big': expected `float"),
        ({"layer_types": ["sliding_attention"] * 4}, "hybrid_layer_pattern", "layer 0: hybrid_layer_pattern 0 contradicts"),
        ({"scoring_func": "softmax"}, "scoring_func", "softmax"),
        ({"topk_method": "greedy"}, "topk_method", "greedy"),
        ({"n_shared_experts": 1}, "n_shared_experts", "1 is not supported"),
    ],
)
def test_published_words_that_cannot_be_honoured_are_refused_by_name(
    changes: dict[str, Any], param: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        native_spec(tmp_path, PUBLISHED | changes)
    assert caught.value.param == param


def test_a_rope_in_two_words_is_one_rope(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"7000.0 contradicts rope_parameters.sliding_attention.rope_theta 5000.0") as caught:
        native_spec(tmp_path, TRANSFORMERS | {"swa_rope_theta": 7e3})
    assert caught.value.param == "swa_rope_theta"


@pytest.mark.parametrize("nothing", [{}, {"rope_scaling": None}])
def test_a_rope_that_is_not_said_is_the_usual(nothing: dict[str, Any], tmp_path: Path) -> None:
    spec = native_spec(tmp_path, COMMON | nothing)
    assert [(one.rope and one.rope.theta, one.rotary_dim) for one in spec.layers[:2]] == [(5e6, 8), (1e4, 8)]


def logprobs(folder: Path, impl: str) -> tuple[list[int], list[float]]:
    """Returns sampled tokens and their logprobs, those of a prompt first."""
    with LLM(str(folder), model_impl=impl, dtype="float32", skip_tokenizer_init=True, num_threads=1, num_kv_blocks=20) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=0, logprobs=0)
        (result,) = llm.generate([{"prompt_token_ids": [3 + 5 * place % 83 for place in range(40)]}], sampling)
    entries = [*(result.prompt_logprobs or [])[1:], *(result.outputs[0].logprobs or [])]
    return list(result.outputs[0].token_ids), [one.logprob for entry in entries if entry for one in entry.values()]


def test_both_implementations_read_the_published_words(tmp_path: Path) -> None:
    """Windows, ropes, dense layers and the norm's epsilon are none of transformers' defaults."""
    torch.manual_seed(0)
    model = MiMoV2FlashForCausalLM(MiMoV2FlashConfig(**TRANSFORMERS))
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    tokens, values = logprobs(tmp_path, "native")
    assert len(values) == 39 + 8
    others, theirs = logprobs(tmp_path, "transformers")
    assert others == tokens and theirs == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"swa_num_key_value_heads": 8},
            "layer 1: .* means num_kv_heads 8, and .* has 4: set model_impl native",
        ),
        ({"add_full_attention_sink_bias": True}, "layer 0: the configuration means sinks True, and .* has False"),
        ({"add_swa_attention_sink_bias": False}, "layer 1: the configuration means sinks False, and .* has True"),
        ({"layernorm_epsilon": "small"}, "layernorm_epsilon"),
    ],
)
def test_published_words_that_transformers_module_does_not_follow(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | changes))
    args = EngineArgs(model=str(tmp_path), load_format="dummy", model_impl="transformers")
    with pytest.raises(ConfigError, match=message):
        choose(args, find_model(args))
