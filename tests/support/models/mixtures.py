"""Tiny mixtures of experts, and models with compressed KV or a paired rotary embedding: what families.py builds twice."""

from __future__ import annotations

from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MiMoV2FlashConfig,
    MiMoV2FlashForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

QWEN = {"head_dim": 12, "num_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "norm_topk_prob": True}
ERNIE = {"use_bias": False, "tie_word_embeddings": True}
ERNIE_MOE = {"moe_num_experts": 9, "moe_k": 2, "moe_num_shared_experts": 2, "moe_intermediate_size": 20}
MLA = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 6,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
        "beta_fast": 32,
        "beta_slow": 1,
    }
}
V2 = MLA | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
V3 = MLA | {"n_group": 3, "topk_group": 2}
GPT_OSS = {
    "head_dim": 8,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 28,
    "sliding_window": 7,
    "attn_implementation": "eager",
}
MIMO_TYPES = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
MIMO = {
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "v_head_dim": 16,
    "layer_types": MIMO_TYPES,
    "sliding_window": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "attn_implementation": "eager",
}
CASES: dict[str, tuple[type[PreTrainedModel], type, dict]] = {
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, QWEN),
    "qwen3-moe-mixed": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        QWEN
        | {
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 9,
            "attention_bias": True,
        },
    ),
    "qwen3-moe-step": (Qwen3MoeForCausalLM, Qwen3MoeConfig, QWEN | {"decoder_sparse_step": 2, "hidden_act": "gelu"}),
    "ernie": (Ernie4_5ForCausalLM, Ernie4_5Config, ERNIE | {"head_dim": 12}),
    "ernie-biases": (Ernie4_5ForCausalLM, Ernie4_5Config, {"use_bias": True, "head_dim": 8, "tie_word_embeddings": False}),
    "ernie-moe": (Ernie4_5_MoeForCausalLM, Ernie4_5_MoeConfig, ERNIE | ERNIE_MOE),
    "ernie-moe-biases": (
        Ernie4_5_MoeForCausalLM,
        Ernie4_5_MoeConfig,
        ERNIE_MOE | {"use_bias": True, "moe_layer_start_index": 0, "moe_layer_end_index": 1, "moe_num_shared_experts": 0},
    ),
    "deepseek-v2": (DeepseekV2ForCausalLM, DeepseekV2Config, V2 | YARN),
    "deepseek-v2-lite": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config,
        MLA | {"q_lora_rank": None, "topk_method": "greedy", "attention_bias": True, "mlp_bias": True},
    ),
    "deepseek-v3": (DeepseekV3ForCausalLM, DeepseekV3Config, V3 | YARN),
    "deepseek-v3-halves": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        V3 | {"rope_interleave": False, "attention_bias": True, "norm_topk_prob": False, "rms_norm_eps": 1e-4},
    ),
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig,
        GPT_OSS | {"rope_parameters": YARN["rope_parameters"] | {"truncate": False, "mscale": None, "mscale_all_dim": None}},
    ),
    "gpt-oss-clamped": (
        GptOssForCausalLM,
        GptOssConfig,
        GPT_OSS
        | {
            "swiglu_limit": 0.4,
            "swiglu_alpha": 1.1,
            "attention_bias": False,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        },
    ),
    "mimo": (MiMoV2FlashForCausalLM, MiMoV2FlashConfig, MIMO),
    "mimo-groups": (
        MiMoV2FlashForCausalLM,
        MiMoV2FlashConfig,
        MIMO
        | {"n_group": 4, "topk_group": 2, "attention_bias": True, "attention_value_scale": None, "routed_scaling_factor": 2.5},
    ),
}
