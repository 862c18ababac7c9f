"""Small random models on disk, of the widths that the GPU's attention kernels know and of one that they do not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from support.models.hybrids import DELTA, MAMBA, ROPE
from support.models.tiny_llama import write_config

MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False}
QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False, "head_dim": 64}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
}
_THIRD = {"rope_type": "default", "partial_rotary_factor": 0.334}
MIMO = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "attention_bias": False,
    "layer_types": ["full_attention", "sliding_attention"],
    # No mixtures: which are the best few of many experts is a matter of rounding.
    "mlp_layer_types": ["dense", "dense"],
    "attention_value_scale": 0.707,
    "rope_parameters": {
        "full_attention": {**_THIRD, "rope_theta": 5e6},
        "sliding_attention": {**_THIRD, "rope_theta": 1e4},
    },
}
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
DELTA_RULE = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    **DELTA,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 64,
    "linear_value_head_dim": 32,
    "rope_parameters": ROPE["rope_parameters"] | {"mrope_section": [3, 3, 2]},
}
STATE_SPACE = {"architectures": ["BambaForCausalLM"], "model_type": "bamba", **MAMBA, "attn_layer_indices": [1]}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 64},
    "qwen3": QWEN3 | {"head_dim": 128, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "windows": MISTRAL | {"head_dim": 64, "sliding_window": 19},
    "groups of 3, width 80": {"head_dim": 80, "num_attention_heads": 6, "hidden_size": 96},
    "sinks, 48 and 32 wide": MIMO
    | {"num_key_value_heads": 1, "swa_num_key_value_heads": 2, "head_dim": 48, "v_head_dim": 32, "sliding_window": 21},
    "gemma": GEMMA3 | {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 23},
    "mixture": QWEN3_MOE | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
    # All experts of every token: which are the best few is a matter of rounding.
    "mla": DEEPSEEK | {"kv_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 20},
    "latent, full width": DEEPSEEK | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
    "delta rule": DELTA_RULE,
    "state space": STATE_SPACE,
}
EVERY_EXPERT = "mixture, every expert"
MODELS = FAMILIES | {EVERY_EXPERT: FAMILIES["mixture"] | {"num_experts_per_tok": FAMILIES["mixture"]["num_experts"]}}
"""All that there is a folder for."""


def write_family(folder: Path, **changes: Any) -> Path:
    """Weights that make every token depend on many before it, so that a wrong one of them shows."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    write_config(folder, **changes)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    generator = torch.Generator().manual_seed(len(changes))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.8, 1.2, generator=generator)
        elif "embed" in name:
            parameter.data.normal_(0.0, 1.0, generator=generator)
        else:
            parameter.data.normal_(0.0, 2.0 / math.sqrt(parameter.shape[-1]), generator=generator)
    if changes.get("tie_word_embeddings"):
        # One matrix for both: as an output layer it should be as narrow as the others'.
        model.get_input_embeddings().weight.data.mul_(2.0 / math.sqrt(model.config.hidden_size))
    model.save_pretrained(folder)
    write_config(folder, **changes)
    return folder
