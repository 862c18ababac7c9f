"""A config.json that contradicts itself, or that its reader would not read in full, is refused whoever builds the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.config import EngineArgs
from headrace.errors import ConfigError, ContradictionError
from headrace.models.implementation import Implementation, choose
from headrace.sources.files import find_model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_size": 48,
    "intermediate_size": 80,
    "vocab_size": 61,
    "max_position_embeddings": 256,
}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
GRANITE = {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
OLMO = {"architectures": ["OlmoForCausalLM"], "model_type": "olmo"}
GLM = {"architectures": ["GlmForCausalLM"], "model_type": "glm", "head_dim": 8, "pad_token_id": 0}
SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "pad_token_id": 0}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 8}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 8}
ERNIE = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": 32,
}
DEEPSEEK = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "q_lora_rank": None,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "topk_method": "greedy",
}
HEADS = "num_key_value_heads_list"


def chosen(folder: Path, impl: str, **changes: Any) -> Implementation:
    (folder / "config.json").write_text(json.dumps(LLAMA | changes), encoding="utf-8")
    args = EngineArgs(model=str(folder), load_format="dummy", model_impl=impl)
    return choose(args, find_model(args))


@pytest.mark.parametrize("impl", ["auto", "native", "transformers"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({HEADS: [6, 2]}, "2 entries for 3 layers"),
        ({HEADS: []}, "0 entries for 3 layers"),
        ({HEADS: 2}, "must be a list"),
        ({HEADS: [6, 0, 1]}, "layer 1: num_key_value_heads .* not 0"),
        ({HEADS: [6, 4, 1]}, "layer 1: 6 query heads .* 4 KV heads"),
        ({HEADS: [6, "2", 1]}, "layer 1: num_key_value_heads .* not '2'"),
        ({HEADS: [6, None, 1]}, "layer 1: num_key_value_heads_list says null and num_key_value_heads says 2"),
        ({HEADS: [6, 2, 1], "per_layer_config": {"1": {"num_key_value_heads": 3}}}, "both num_key_value_heads_list and per_"),
        ({HEADS: [2, 6, 1], "per_layer_config": {"1": {"num_key_value_heads": 2}}}, "both num_key_value_heads_list and per_"),
        ({"per_layer_config": {"1": {HEADS: [1, 1, 1]}}, HEADS: [6, 2, 1]}, "per_layer_config gives num_key_value_heads_list"),
        ({"v_head_dim": 0}, "layer 0: v_head_dim .* not 0"),
        (MISTRAL | {"sliding_window_list": ["8", 4, 4]}, "layer 0: window .* not '8'"),
        (MISTRAL | {"sliding_window_list": [4, 8.5, 4]}, "layer 1: window .* not 8.5"),
        (MISTRAL | {"sliding_window_list": [4, 4, True]}, "layer 2: window .* not True"),
        (GEMMA3 | {"query_pre_attn_scalar": 0}, "layer 0: query_pre_attn_scalar .* not 0"),
        (GEMMA3 | {"query_pre_attn_scalar": -4}, "layer 0: query_pre_attn_scalar .* not -4"),
        (ERNIE | {"moe_layer_start_index": None}, "moe_layer_start_index must be a whole number .* not None"),
        (ERNIE | {"moe_k": 5}, "top_k 5 is more than the 4 experts"),
    ],
)
def test_contradictions_are_refused_whoever_builds_the_model(
    impl: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ContradictionError, match=message):
        chosen(tmp_path, impl, **changes)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_impl": "transformers", HEADS: [6, 2, 1]}, HEADS),
        ({"model_impl": "transformers", "v_head_dim": 4}, "v_head_dim"),
        ({"model_impl": "transformers", "intermediate_size_list": [80, 32, 80]}, "intermediate_size_list"),
        ({"model_impl": "transformers", **MISTRAL, "sliding_window_list": [8, None, 4]}, "sliding_window_list"),
        ({"hidden_act": "relu2", HEADS: [6, 2, 1]}, HEADS),
        ({"hidden_act": "relu2", "v_head_dim": 4}, "v_head_dim"),
        (GRANITE | {HEADS: [6, 2, 1]}, HEADS),
        (GRANITE | {"v_head_dim": 4}, "v_head_dim"),
        (QWEN3 | {"attn_output_gate": True}, "attn_output_gate"),
        *(
            (changes | {"model_impl": impl}, field)
            for impl in ("auto", "transformers")
            for changes, field in [
                ({"clip_qkv": 8.0}, "clip_qkv"),
                ({"attention_multiplier": 0.5}, "attention_multiplier"),
                ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
                ({"residual_multiplier": 0.2}, "residual_multiplier"),
                ({"logits_scaling": 8.0}, "logits_scaling"),
                ({"logit_scale": 0.0625}, "logit_scale"),
                ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
                ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
                ({"attention_chunk_size": 16}, "attention_chunk_size"),
                ({"no_rope_layers": [1, 0, 1]}, "no_rope_layers"),
                ({"use_mrope": True}, "use_mrope"),
                ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
                (QWEN3 | {"clip_qkv": 8.0}, "clip_qkv"),
            ]
        ),
        (GRANITE | {"clip_qkv": 8.0}, "clip_qkv"),
        (OLMO | {"attention_multiplier": 0.5}, "attention_multiplier"),
        ({"hidden_act": "relu2", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_transformers_would_not_read_is_refused_by_its_name(changes: dict[str, Any], field: str, tmp_path: Path) -> None:
    impl = changes.get("model_impl", "auto")
    rest = {name: value for name, value in changes.items() if name != "model_impl"}
    with pytest.raises(ConfigError, match=f"{field} .*transformers' own module of this model .* does not read it") as caught:
        chosen(tmp_path, impl, **rest)
    assert caught.value.param == field


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {HEADS: [2, 2, 2]},
        {"v_head_dim": 8},
        {"intermediate_size_list": [80] * 3},
        DEEPSEEK,
        ERNIE,
        GRANITE,
        GRANITE
        | {"attention_multiplier": 0.5, "embedding_multiplier": 12.0, "residual_multiplier": 0.2, "logits_scaling": 8.0},
        OLMO | {"clip_qkv": 8.0},
        GLM | {"partial_rotary_factor": 0.5},
        SMOLLM3 | {"no_rope_layers": [1, 0, 1]},
        {"clip_qkv": None, "attention_multiplier": None, "logit_scale": 1, "use_mrope": False, "pretraining_tp": 2},
    ],
    ids=[
        *("plain", "same-heads", "same-values", "same-width", "mla", "experts", "granite", "multipliers", "clipped"),
        *("rotated-in-part", "rotated-in-some-layers", "neutral"),
    ],
)
def test_what_transformers_does_as_said_runs(changes: dict[str, Any], tmp_path: Path) -> None:
    assert chosen(tmp_path, "transformers", **changes).decisions[0].value == "transformers"


@pytest.mark.parametrize(
    ("changes", "field", "values"),
    [
        ({"num_attention_heads_list": [6, 4, 2], "head_dim": 8}, "num_heads", [6, 4, 2]),
        ({HEADS: [6, 2, 1]}, "num_kv_heads", [6, 2, 1]),
        ({"head_dim_list": [8, 16, 4]}, "head_dim", [8, 16, 4]),
        ({"v_head_dim_list": [8, 3, 4]}, "v_head_dim", [8, 3, 4]),
        (MISTRAL | {"sliding_window_list": [8, None, 4]}, "window", [8, None, 4]),
        ({"per_layer_config": {"1": {"num_key_value_heads": 3}}}, "num_kv_heads", [2, 3, 2]),
    ],
)
def test_lists_on_disk_are_the_layers_own(changes: dict[str, Any], field: str, values: list[Any], tmp_path: Path) -> None:
    implementation = chosen(tmp_path, "auto", **changes)
    assert implementation.decisions[0].value == "native"
    assert [getattr(layer, field) for layer in implementation.spec.layers] == values


@pytest.mark.parametrize("field", ["num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"])
def test_a_list_in_the_numbers_place_is_refused(field: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=field):
        chosen(tmp_path, "auto", **{field: [6, 6, 6]})


def test_kv_heads_of_compressed_layers_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layer 1: num_key_value_heads 3 is not num_attention_heads 6"):
        chosen(tmp_path, "native", **DEEPSEEK, per_layer_config={"1": {"num_key_value_heads": 3}})
