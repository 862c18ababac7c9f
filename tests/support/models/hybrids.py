"""Tiny hybrid models with random weights, whose recurrences neither forget at once nor remember everything."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from headrace.models import registry
from headrace.models.decoder import Decoder
from support.models.harness import copy_weights

VOCAB = 256
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
DELTA = {
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
ROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}
FALCON = (
    SMALL
    | MAMBA
    | {
        "num_hidden_layers": 3,
        "intermediate_size": 96,
        "head_dim": 16,
        "mamba_d_ssm": 128,
        "mamba_n_groups": 2,
        "ssm_multipliers": [0.5, 0.7, 0.9, 1.1, 1.3],
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.8,
        "key_multiplier": 0.6,
        "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 0.7,
        "embedding_multiplier": 2.0,
        "lm_head_multiplier": 0.5,
        "mlp_multipliers": [0.8, 0.9],
    }
)
CONVOLUTIONS = SMALL | {
    "intermediate_size": 96,
    "conv_L_cache": 3,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
}
GRANITE = (
    SMALL
    | MAMBA
    | {
        "intermediate_size": 48,
        "shared_intermediate_size": 48,
        "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "embedding_multiplier": 1.5,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.0625,
    }
)
OLMO = SMALL | {
    "intermediate_size": 96,
    "num_key_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 24,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
NEMOTRON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 64,
    # transformers' lower bound of time steps, of prompts alone.
    "time_step_min": 1e-9,
}
NEMOTRON_EXPERTS = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.5,
}
CASES: dict[str, tuple[str, dict]] = {
    "qwen3-next": ("qwen3_next", SMALL | DELTA | EXPERTS | {"intermediate_size": 96}),
    "qwen3-next-uneven": (
        "qwen3_next",
        SMALL
        | DELTA
        | EXPERTS
        | {
            "intermediate_size": 96,
            "linear_num_value_heads": 6,
            "linear_value_head_dim": 24,
            "linear_conv_kernel_dim": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "attention_bias": True,
        },
    ),
    "qwen3.5": ("qwen3_5_text", SMALL | DELTA | ROPE | {"intermediate_size": 96}),
    "qwen3.5-tied": ("qwen3_5_text", SMALL | DELTA | ROPE | {"intermediate_size": 96, "tie_word_embeddings": True}),
    "qwen3.5-moe": ("qwen3_5_moe_text", SMALL | DELTA | ROPE | EXPERTS),
    "qwen3.5-pictures": ("qwen3_5", {"text_config": SMALL | DELTA | ROPE | {"intermediate_size": 96}, "vision_config": VISION}),
    "qwen3.5-moe-pictures": ("qwen3_5_moe", {"text_config": SMALL | DELTA | ROPE | EXPERTS, "vision_config": VISION}),
    "lfm2": ("lfm2", CONVOLUTIONS | {"block_auto_adjust_ff_dim": False}),
    "lfm2-adjusted": ("lfm2", CONVOLUTIONS | {"conv_bias": True, "conv_L_cache": 4, "block_multiple_of": 24}),
    "lfm2-moe": ("lfm2_moe", CONVOLUTIONS | EXPERTS | {"num_dense_layers": 1}),
    "olmo-hybrid": ("olmo_hybrid", OLMO),
    "olmo-hybrid-even": (
        "olmo_hybrid",
        OLMO
        | {
            "linear_value_head_dim": 12,
            "linear_allow_neg_eigval": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "bamba": ("bamba", SMALL | MAMBA | {"intermediate_size": 96, "attn_layer_indices": [2]}),
    "bamba-groups": (
        "bamba",
        SMALL
        | MAMBA
        | {
            "intermediate_size": 96,
            "attn_layer_indices": [0, 1],
            "mamba_n_groups": 4,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "mlp_bias": True,
            "attention_bias": True,
        },
    ),
    "granite-moe": ("granitemoehybrid", GRANITE | {"num_local_experts": 4}),
    "granite-dense": ("granitemoehybrid", GRANITE | {"num_local_experts": 0, "position_embedding_type": "rope"}),
    "nemotron-h": ("nemotron_h", NEMOTRON),
    "nemotron-h-experts": ("nemotron_h", NEMOTRON | NEMOTRON_EXPERTS),
    "nemotron-h-latent": (
        "nemotron_h",
        NEMOTRON
        | NEMOTRON_EXPERTS
        | {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "moe_latent_size": 24,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "nemotron-h-biases": ("nemotron_h", NEMOTRON | {"use_bias": True, "mlp_bias": True}),
    "kimi-linear": (
        "kimi_linear",
        SMALL
        | {
            "num_key_value_heads": 4,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "linear_head_dim": 12,
            "linear_num_heads": 4,
            "linear_conv_kernel_dim": 4,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "minimax": (
        "minimax",
        SMALL
        | {
            "head_dim": 20,
            "intermediate_size": 40,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "block_size": 16,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "full_attn_alpha_factor": 1.5,
            "full_attn_beta_factor": 0.8,
            "linear_attn_alpha_factor": 1.2,
            "linear_attn_beta_factor": 0.9,
            "mlp_alpha_factor": 0.7,
            "mlp_beta_factor": 1.1,
        },
    ),
    "falcon-h1": ("falcon_h1", FALCON | {"mamba_rms_norm": False}),
    "falcon-h1-norm": ("falcon_h1", FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": True, "projectors_bias": True}),
}


def architectures(cases: Mapping[str, tuple[str, dict]] = CASES) -> set[str]:
    """The architectures of all cases."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return {names[kind] for kind, _ in cases.values()}


def redraw(model: PreTrainedModel) -> None:
    """Draws weights with which logits are of size 5 and states matter."""
    corrections = [
        (name, buffer) for name, buffer in model.named_buffers() if name.endswith(("correction_bias", "expert_bias"))
    ]
    for name, parameter in [*model.named_parameters(), *corrections]:
        shape = parameter.shape
        if name.endswith("A_log"):
            parameter.data = torch.empty(shape).uniform_(0.05, 3.05).log()
        elif name.endswith("dt_bias"):
            parameter.data = torch.randn(shape) - 2
        elif "conv" in name and parameter.dim() == 3:
            parameter.data = 0.5 * torch.randn(shape)
        elif parameter.dim() >= 2:
            parameter.data = torch.randn(shape) * 1.2 / shape[-1] ** 0.5
        elif name.endswith(("weight", "_bias", ".bias", ".D")):
            parameter.data += 0.1 * torch.randn(shape)


@functools.cache
def pair(name: str) -> tuple[PreTrainedModel, Decoder]:
    """The same model twice, in float32."""
    kind, values = CASES[name]
    torch.manual_seed(sum(map(ord, name)))
    config = CONFIG_MAPPING[kind](**values)
    auto = AutoModelForImageTextToText if "vision_config" in values else AutoModelForCausalLM
    theirs = auto.from_config(config, attn_implementation="eager").float().eval()
    redraw(theirs)
    theirs.tie_weights()
    theirs.config._experts_implementation = "eager"
    ours = registry.build(registry.model_spec(theirs.config), "float32", "cpu")
    copy_weights(ours, theirs.state_dict())
    return theirs, ours
