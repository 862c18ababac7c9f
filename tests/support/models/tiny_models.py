"""Tiny random models of every causal language model that transformers ships, for comparing engines with it."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 97
_MOST = 60_000_000
"""Weights of a model that counts as tiny."""
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "max_position_embeddings": 128,
    "max_target_positions": 128,
    "n_positions": 128,
    "max_seq_len": 128,
    "sliding_window": 7,
} | {
    name: value
    for names, value in (
        (("hidden_size", "n_embd", "d_model", "dim_model", "embedding_size", "emb_dim"), 32),
        (("intermediate_size", "n_inner", "ffn_dim", "dim_ff", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 48),
        (("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"), 3),
        (("encoder_layers", "num_encoder_layers"), 1),
        (("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"), 4),
        (("num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
        (("num_key_value_heads",), 2),
        (("head_dim", "attention_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 8),
        (("v_head_dim",), 12),
        (("linear_num_heads", "linear_num_value_heads"), 4),
        (("linear_num_key_heads",), 2),
        (("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
        (("q_lora_rank", "kv_lora_rank"), 16),
        (("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 24),
        (("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
        (("num_experts_per_tok", "moe_topk", "moe_k"), 2),
        (("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    )
    for name in names
}
"""Field of a configuration -> a small value for it. Families call one thing by many names."""

_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "attn_layer_indices": [1]},
    "blt": {
        name: {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "vocab_size": VOCAB,
            "max_position_embeddings": 128,
        }
        for name in ("patcher_config", "encoder_config", "decoder_config", "global_config")
    }
    | {"encoder_hash_byte_group_vocab": 100},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 24, "hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"topk_method": "greedy"},
    "dots3_note_text": {"shared_experts_intermediate_size": 24, "index_head_dim": 16, "index_n_heads": 2},
    # Learned factors are relative to this: with one smaller than the random part, logits of attention are in the hundreds, and
    # transformers' own float32 is 0.0015 from its float64.
    "dory": {"initializer_range": 0.5},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "intermediate_size": 48,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        "activation_sparsity_pattern": None,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
    },
    "gemma4_text": {
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 16,
    },
    "gemma4_unified_text": {"global_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1], [["global"], 1]], "window_size": 7},
    "granite": {
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
    },
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16, "layer_types": ["mamba", "attention", "mamba"]},
    "inkling2_loop_text": {"unpadded_vocab_size": VOCAB},
    "inkling2_text": {"unpadded_vocab_size": VOCAB},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "mamba_d_state": 8},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "longcat_flash": {"num_layers": 2, "zero_expert_num": 2, "expert_ffn_hidden_size": 24, "head_dim": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2},
    "minimax": {"sliding_window": None},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], "index_n_heads": 2},
    "mimo_v2_flash": {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    "modernbert-decoder": {"local_attention": 14},
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "moe_shared_expert_intermediate_size": 24,
        # transformers' lower bound of time steps, of prompts alone.
        "time_step_min": 1e-9,
    },
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh", "local"]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba"], "mamba_headdim": 16, "n_mamba_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}
"""Fields that a family wants besides, or instead: often so that every kind of its layers is there."""


def families() -> dict[str, str]:
    """model_type -> class, of every causal language model of text in transformers. Those of images and sound are left out."""
    found = {}
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        parts = set(CONFIG_MAPPING[kind].sub_configs)
        if not parts & {
            "text_config",
            "vision_config",
            "audio_config",
            "vq_config",
            "audio_encoder",
            "audio_encoder_config",
            "dac_config",
        }:
            found[kind] = name
    return found


def config(kind: str) -> PretrainedConfig:
    """A small configuration of a model_type."""
    factory = CONFIG_MAPPING[kind]
    fields = {field.name for field in dataclasses.fields(factory)} if dataclasses.is_dataclass(factory) else set()
    fields |= set(inspect.signature(factory.__init__).parameters)
    values = {name: value for name, value in _SIZES.items() if name in fields}
    if "kv_lora_rank" in fields:
        # Latent attention: every head makes its own key and value.
        values["num_key_value_heads"] = _SIZES["num_attention_heads"]
    values |= _every_kind(factory, fields) | _OWN.get(kind, {})
    made: PretrainedConfig = factory(**values)
    return made


def _every_kind(factory: type[PretrainedConfig], fields: set[str]) -> dict[str, Any]:
    """Layer types of so few layers that every kind is among them, in the order in which a real model has them."""
    try:
        usual = factory()
    except Exception:
        return {}
    values: dict[str, Any] = {}
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        given = getattr(usual, name, None)
        if name in fields and isinstance(given, list) and len(set(given)) > 1:
            kinds = list(dict.fromkeys(given))
            values[name] = [kinds[index % len(kinds)] for index in range(_SIZES["num_hidden_layers"])]
    return values


def model(kind: str, **changes: Any) -> PreTrainedModel:
    """Makes a model with random values everywhere, norms and biases too, so that nothing is left out of a comparison.
    Float32. ``changes``: fields of its configuration."""
    torch.manual_seed(sum(map(ord, kind)))
    factory, own = getattr(transformers, families()[kind]), config(kind)
    own.update(changes)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in factory._from_config(own).parameters())
    if size > _MOST:
        raise ValueError(f"the small configuration of {kind} makes {size:,} weights: give it an entry of its own")
    made: PreTrainedModel = factory._from_config(own, attn_implementation="eager", dtype=torch.float32)
    made.train(False)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return made


def save(made: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Saves a checkpoint that has no tokenizer. Returns the model that transformers makes of it again, with what it ties
    tied."""
    made.save_pretrained(folder)
    file = folder / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"architectures": [type(made).__name__]}))
    again: PreTrainedModel = type(made).from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    again.train(False)
    return again
