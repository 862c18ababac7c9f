"""Tiny models whose layers have indexers, with random weights, in transformers and in headrace."""

from __future__ import annotations

import functools

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from headrace.models import registry
from headrace.models.decoder import Decoder
from support.models import hybrids
from support.models.cases import SMALL
from support.models.harness import copy_weights
from support.models.hybrids import redraw
from support.models.mixtures import V3, YARN

# Index heads are many: a key that all of them give 0 has the same score as others like it.
LIGHTNING = SMALL | V3 | {"index_topk": 11, "index_n_heads": 12, "index_head_dim": 16, "mlp_layer_types": None}
M3 = SMALL | {
    "head_dim": 16,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "dense_intermediate_size": 56,
    "shared_intermediate_size": 20,
    "intermediate_size": 28,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "swiglu_limit": 0.9,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 4,
    "index_topk_blocks": 4,
    "index_local_blocks": 2,
}
CASES: dict[str, tuple[str, dict]] = {
    "v3.2": ("deepseek_v32", LIGHTNING | YARN),
    "axk2": ("axk2", LIGHTNING | {"n_group": None, "topk_group": None, "gated_norm_rank": 5}),
    "dots3": (
        "dots3_note_text",
        LIGHTNING
        | {
            "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "sliding_window": 9,
            "head_dim": 20,
            "shared_experts_intermediate_size": 20,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_q_lora_rank": 28,
            "swa_kv_lora_rank": 20,
            "swa_head_dim": 24,
            "swa_qk_nope_head_dim": 16,
            "swa_v_head_dim": 12,
            "pad_token_id": 0,
        },
    ),
    "minimax-m3": ("minimax_m3_vl_text", M3),
    "minimax-m3-local": (
        "minimax_m3_vl_text",
        M3 | {"index_n_heads": 1, "index_local_blocks": 0, "index_block_size": 3, "partial_rotary_factor": 0.5},
    ),
    "minimax-m3-pictures": (
        "minimax_m3_vl",
        {
            "text_config": M3,
            "vision_config": {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2},
            "projector_hidden_size": 16,
        },
    ),
    "glm-dsa": ("glm_moe_dsa", LIGHTNING | {"n_group": 1, "topk_group": 1, "indexer_types": ["full", "shared", "full"]}),
}


def architectures() -> set[str]:
    """The architectures of all cases."""
    return hybrids.architectures(CASES)


@functools.cache
def pair(name: str) -> tuple[PreTrainedModel, Decoder]:
    """The same model twice, in float32."""
    kind, values = CASES[name]
    torch.manual_seed(sum(map(ord, name)))
    auto = AutoModelForImageTextToText if "vision_config" in values else AutoModelForCausalLM
    theirs = auto.from_config(CONFIG_MAPPING[kind](**values), attn_implementation="eager").float().eval()
    redraw(theirs)
    theirs.config._experts_implementation = "eager"
    ours = registry.build(registry.model_spec(theirs.config), "float32", "cpu")
    copy_weights(ours, theirs.state_dict())
    return theirs, ours
