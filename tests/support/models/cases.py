"""Tiny models of every family with random weights, in transformers and in headrace."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from transformers import (
    Ernie4_5_VLMoeConfig,
    Ernie4_5_VLMoeForConditionalGeneration,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from headrace.models import registry
from headrace.models.decoder import Decoder
from support.models import mixtures
from support.models.harness import copy_weights
from support.models.uneven import replace_projections

VOCAB = 89
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def rope(kind: str, **parameters: object) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


GEMMA_TYPES = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
GEMMA3 = {"num_hidden_layers": 5, "layer_types": GEMMA_TYPES, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 24}
GEMMA4 = {
    "num_hidden_layers": 5,
    "layer_types": GEMMA_TYPES,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 7,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": VOCAB,
}
VISION = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}


def with_images3(**values: object) -> Gemma3Config:
    """Beside the text part, a tower for images that text never enters."""
    vision = {"model_type": "siglip_vision_model", "image_size": 16, **VISION}
    return Gemma3Config(text_config=values, vision_config=vision, mm_tokens_per_image=4)


def with_images4(**values: object) -> Gemma4Config:
    vision = {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 8, **VISION}
    return Gemma4Config(text_config=values, vision_config=vision)


def with_pictures(config_class: Callable[..., PretrainedConfig], **vision: object) -> Callable[..., PretrainedConfig]:
    return lambda **values: config_class(text_config=values, vision_config=vision)


QWEN2_VISION = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 48, "mlp_ratio": 2}
QWEN25_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "out_hidden_size": 48}
QWEN3_VISION = QWEN25_VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
QWEN3_VL = {"head_dim": 16} | rope("default", mrope_section=[4, 2, 2])
ERNIE_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2}
ERNIE_VL = rope("default", mrope_section=[1, 1, 2]) | {
    "moe_num_experts": 5,
    "moe_k": 2,
    "moe_intermediate_size": [20, 12],
    "use_bias": True,
}
LLAMA3 = rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
LLAMA4 = {
    "head_dim": 8,
    "intermediate_size": 20,
    "intermediate_size_mlp": 80,
    "num_local_experts": 4,
    "attention_chunk_size": 10,
    "no_rope_layers": [1, 0, 1],
    "floor_scale": 8,
}


CASES: dict[str, tuple[type[PreTrainedModel], Callable[..., PretrainedConfig], dict]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama-biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": (LlamaForCausalLM, LlamaConfig, {"head_dim": 20, "num_key_value_heads": 3}),
    "llama-one-kv-head": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 1}),
    "llama-gelu": (LlamaForCausalLM, LlamaConfig, {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-linear": (LlamaForCausalLM, LlamaConfig, rope("linear", factor=2.5)),
    "llama-dynamic": (LlamaForCausalLM, LlamaConfig, rope("dynamic", factor=4.0) | {"max_position_embeddings": 32}),
    "llama-llama3": (LlamaForCausalLM, LlamaConfig, LLAMA3),
    "llama-yarn": (LlamaForCausalLM, LlamaConfig, rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama4": (Llama4ForCausalLM, Llama4TextConfig, LLAMA4),
    "llama4-dense": (
        Llama4ForCausalLM,
        Llama4TextConfig,
        LLAMA4
        | {"use_qk_norm": False, "moe_layers": [1], "num_experts_per_tok": 2, "attention_bias": True}
        | {"attn_temperature_tuning": False}
        | LLAMA3,
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "mistral-window": (MistralForCausalLM, MistralConfig, {"sliding_window": 9}),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, {}),
    "olmo2-biases": (Olmo2ForCausalLM, Olmo2Config, {"attention_bias": True, "num_key_value_heads": 1}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-windows": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    ),
    "qwen2-mixed": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "qwen3-window": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"head_dim": 12, "attention_bias": True, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    ),
    "llama-uneven": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads_list": [6, 2, 1]}),
    "llama-uneven-narrow-v": (
        LlamaForCausalLM,
        LlamaConfig,
        {"num_key_value_heads_list": [2, 1, 3], "head_dim": 16, "v_head_dim": 10, "attention_bias": True},
    ),
    "qwen3-uneven": (Qwen3ForCausalLM, Qwen3Config, {"num_key_value_heads_list": [2, 1, 3], "head_dim": 16}),
    "qwen3-uneven-wide-v": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {
            "num_key_value_heads_list": [6, 2, 1],
            "head_dim": 8,
            "v_head_dim": 20,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, GEMMA3),
    "gemma3-capped": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        GEMMA3
        | {
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "gemma3-images": (Gemma3ForConditionalGeneration, with_images3, GEMMA3),
    "gemma4-images": (Gemma4ForConditionalGeneration, with_images4, GEMMA4 | {"num_kv_shared_layers": 2}),
    "gemma4": (Gemma4ForCausalLM, Gemma4TextConfig, GEMMA4 | {"final_logit_softcapping": 4.0}),
    "gemma4-shared": (
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        GEMMA4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "attention_bias": True},
    ),
    "gemma4-experts": (
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        GEMMA4 | {"enable_moe_block": True, "num_experts": 7, "top_k_experts": 3, "moe_intermediate_size": 20},
    ),
    "gemma4-k-is-v": (
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
    ),
}
CASES |= {
    "qwen2-vl": (
        Qwen2VLForConditionalGeneration,
        with_pictures(Qwen2VLConfig, **QWEN2_VISION),
        rope("default", mrope_section=[1, 1, 2]),
    ),
    "qwen2.5-vl": (
        Qwen2_5_VLForConditionalGeneration,
        with_pictures(Qwen2_5_VLConfig, **QWEN25_VISION),
        rope("default", mrope_section=[1, 1, 2]),
    ),
    "qwen3-vl": (Qwen3VLForConditionalGeneration, with_pictures(Qwen3VLConfig, **QWEN3_VISION), QWEN3_VL),
    "qwen3-vl-moe": (
        Qwen3VLMoeForConditionalGeneration,
        with_pictures(Qwen3VLMoeConfig, **QWEN3_VISION),
        QWEN3_VL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    ),
    "ernie-vl": (Ernie4_5_VLMoeForConditionalGeneration, with_pictures(Ernie4_5_VLMoeConfig, **ERNIE_VISION), ERNIE_VL),
}
"""Cases of text alone: ``test_pictures`` has the others."""
CASES |= mixtures.CASES


@functools.cache
def pair(name: str) -> tuple[PreTrainedModel, Decoder]:
    """The same model twice, in float32. Every parameter is random, norms and biases too."""
    model_class, config_class, changes = CASES[name]
    torch.manual_seed(sum(map(ord, name)))
    theirs = model_class(config_class(**{**SMALL, **changes})).eval()
    if "num_key_value_heads_list" in changes:
        replace_projections(theirs)
    theirs.config._experts_implementation = "eager"
    corrections = [buffer for name, buffer in theirs.named_buffers() if name.endswith("correction_bias")]
    for parameter in [*theirs.parameters(), *corrections]:
        parameter.data += 0.15 * torch.randn_like(parameter)
    for name, buffer in theirs.named_buffers():
        if name.endswith("layer_scalar"):
            buffer += 0.3 * torch.rand_like(buffer)
    ours = registry.build(registry.model_spec(theirs.config), "float32", "cpu")
    copy_weights(ours, theirs.state_dict())
    return theirs, ours


def greedy(model: PreTrainedModel, prompt: list[int], steps: int) -> tuple[list[int], torch.Tensor]:
    """transformers' own loop: tokens, and ``[steps, vocab]`` logits."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(1000 * seed + length)).tolist()
