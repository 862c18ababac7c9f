"""Configurations of hybrid models from the metadata of GGUF files."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

from headrace.errors import ConfigError
from headrace.sources.fields import Divisor, Experts, Factor, Size, Width

HYBRIDS = {
    "qwen3next": ("qwen3_next", "Qwen3NextForCausalLM"),
    "lfm2": ("lfm2", "Lfm2ForCausalLM"),
    "lfm2moe": ("lfm2_moe", "Lfm2MoeForCausalLM"),
    "granitehybrid": ("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
    "qwen35": ("qwen3_5_text", "Qwen3_5ForCausalLM"),
    "qwen35moe": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    "nemotron_h": ("nemotron_h", "NemotronHForCausalLM"),
    "nemotron_h_moe": ("nemotron_h", "NemotronHForCausalLM"),
    "falcon-h1": ("falcon_h1", "FalconH1ForCausalLM"),
}
"""``general.architecture`` -> model type and architecture in transformers."""
PARTLY_ROTATED = frozenset({"qwen3next", "qwen35", "qwen35moe", "nemotron_h", "nemotron_h_moe"})
"""Architectures whose ``rope.dimension_count`` is not the width of a head. That of Nemotron-H means nothing."""
_STATES = {"qwen3next": "linear_attention", "granitehybrid": "linear_attention", "lfm2": "conv", "lfm2moe": "conv"}
_STATES |= {"qwen35": "linear_attention", "qwen35moe": "linear_attention"}
"""Architecture -> the word of its configuration's ``layer_types`` for layers that do not attend."""


class MetadataFields(Protocol):
    """The fields of a file, as ``headrace.sources.gguf.Metadata`` reads them."""

    path: Path

    def get(self, key: str, kind: Any, default: Any = None) -> Any: ...
    def integer(self, key: str, kind: Any, default: int | None = None) -> int: ...
    def number(self, key: str, kind: Any, default: float | None = None) -> float: ...


def common_size(metadata: MetadataFields, key: str, default: int) -> int:
    """The size that a field gives for the layers that have it, as KV heads those that attend; files have 0 for the others."""
    counts = metadata.get(key, Width | list[Width], default)
    if isinstance(counts, int):
        return counts
    own = {count for count in counts if count}
    if len(own) != 1:
        raise ConfigError(
            f"{metadata.path}: {key} differs among layers that have any, which is not supported: {counts}", "model"
        )
    return int(own.pop())


def hybrid_facts(metadata: MetadataFields, tensors: Collection[str], arch: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of the configuration beside ``facts``, those of any model, or in place of them."""
    own = _READERS[arch](metadata, tensors, arch, facts)
    if (state := _STATES.get(arch)) is not None:
        layers = range(facts["num_hidden_layers"])
        own["layer_types"] = ["full_attention" if f"blk.{layer}.attn_q.weight" in tensors else state for layer in layers]
    return own


def _has(tensors: Collection[str], ending: str) -> bool:
    return any(name.endswith(ending) for name in tensors)


def qwen_mixture(metadata: MetadataFields, arch: str) -> dict[str, Any]:
    """Returns the fields of Qwen's mixtures, whose layers all have experts."""
    return _experts(metadata, arch) | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _experts(metadata: MetadataFields, arch: str) -> dict[str, int]:
    return {
        "num_experts": metadata.integer(f"{arch}.expert_count", Experts),
        "num_experts_per_tok": metadata.integer(f"{arch}.expert_used_count", Experts),
        "moe_intermediate_size": metadata.integer(f"{arch}.expert_feed_forward_length", Size),
    }


def _lfm2(metadata: MetadataFields, tensors: Collection[str], arch: str, facts: dict[str, Any]) -> dict[str, Any]:
    own = {
        "norm_eps": facts["rms_norm_eps"],
        "conv_L_cache": metadata.integer(f"{arch}.shortconv.l_cache", Size),
        "conv_bias": _has(tensors, ".shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,
    }
    if arch == "lfm2":
        return own
    dense = metadata.integer(f"{arch}.leading_dense_block_count", Width)
    bias = _has(tensors, ".exp_probs_b.bias")
    return own | _experts(metadata, arch) | {"num_dense_layers": dense, "use_expert_bias": bias, "norm_topk_prob": True}


def _qwen3next(metadata: MetadataFields, tensors: Collection[str], arch: str, facts: dict[str, Any]) -> dict[str, Any]:
    shared = metadata.integer(f"{arch}.expert_shared_feed_forward_length", Size)
    return _qwen35(metadata, tensors, arch, facts) | qwen_mixture(metadata, arch) | {"shared_expert_intermediate_size": shared}


def _qwen35(metadata: MetadataFields, tensors: Collection[str], arch: str, facts: dict[str, Any]) -> dict[str, Any]:
    heads = metadata.integer(f"{arch}.ssm.time_step_rank", Size)
    rotated = metadata.integer(f"{arch}.rope.dimension_count", Size, facts["head_dim"] // 4)
    rope = facts["rope_parameters"] | {"partial_rotary_factor": rotated / facts["head_dim"]}
    if sections := metadata.get(f"{arch}.rope.dimension_sections", list[Width]):
        rope |= {"mrope_section": sections[:3], "mrope_interleaved": True}
    return {
        "attention_bias": _has(tensors, ".attn_q.bias"),
        "linear_conv_kernel_dim": metadata.integer(f"{arch}.ssm.conv_kernel", Size),
        "linear_num_key_heads": metadata.integer(f"{arch}.ssm.group_count", Size),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": metadata.integer(f"{arch}.ssm.state_size", Size),
        "linear_value_head_dim": metadata.integer(f"{arch}.ssm.inner_size", Size) // heads,
        "rope_parameters": rope,
    }


def _granite(metadata: MetadataFields, tensors: Collection[str], arch: str, facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_local_experts": metadata.integer(f"{arch}.expert_count", Experts, 0),
        "num_experts_per_tok": metadata.integer(f"{arch}.expert_used_count", Experts, 0),
        "shared_intermediate_size": metadata.integer(
            f"{arch}.expert_shared_feed_forward_length", Size, facts["intermediate_size"]
        ),
        "position_embedding_type": "rope" if metadata.get(f"{arch}.rope.scaling.finetuned", bool, False) else "nope",
        "embedding_multiplier": metadata.number(f"{arch}.embedding_scale", Factor),
        "residual_multiplier": metadata.number(f"{arch}.residual_scale", Factor),
        "attention_multiplier": metadata.number(f"{arch}.attention.scale", Factor),
        "logits_scaling": metadata.number(f"{arch}.logit_scale", Divisor),
        "attention_bias": _has(tensors, ".attn_q.bias"),
        "mamba_expand": metadata.integer(f"{arch}.ssm.inner_size", Size) // facts["hidden_size"],
        "mamba_proj_bias": _has(tensors, ".ssm_in.bias"),
        **_mamba2(metadata, tensors, arch),
    }


def _mamba2(metadata: MetadataFields, tensors: Collection[str], arch: str) -> dict[str, Any]:
    """The sizes of Mamba-2's layers, as Granite and Falcon name them."""
    heads = metadata.integer(f"{arch}.ssm.time_step_rank", Size)
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": metadata.integer(f"{arch}.ssm.inner_size", Size) // heads,
        "mamba_n_groups": metadata.integer(f"{arch}.ssm.group_count", Size),
        "mamba_d_state": metadata.integer(f"{arch}.ssm.state_size", Size),
        "mamba_d_conv": metadata.integer(f"{arch}.ssm.conv_kernel", Size),
        "mamba_conv_bias": _has(tensors, ".ssm_conv1d.bias"),
    }


def _nemotron(metadata: MetadataFields, tensors: Collection[str], arch: str, facts: dict[str, Any]) -> dict[str, Any]:
    heads = metadata.integer(f"{arch}.ssm.time_step_rank", Size)
    own = {
        "layers_block_type": [_nemotron_kind(tensors, layer) for layer in range(facts["num_hidden_layers"])],
        "layer_norm_epsilon": facts["rms_norm_eps"],
        "attention_bias": _has(tensors, ".attn_q.bias"),
        "mamba_num_heads": heads,
        "mamba_head_dim": metadata.integer(f"{arch}.ssm.inner_size", Size) // heads,
        "n_groups": metadata.integer(f"{arch}.ssm.group_count", Size),
        "ssm_state_size": metadata.integer(f"{arch}.ssm.state_size", Size),
        "conv_kernel": metadata.integer(f"{arch}.ssm.conv_kernel", Size),
        "use_conv_bias": _has(tensors, ".ssm_conv1d.bias"),
        "use_bias": _has(tensors, ".ssm_in.bias"),
        "mlp_bias": _has(tensors, ".ffn_up.bias") or _has(tensors, ".ffn_up_shexp.bias"),
    }
    if arch == "nemotron_h":
        return own
    groups, experts = metadata.integer(f"{arch}.expert_group_count", Experts, 1), _experts(metadata, arch)
    return own | {
        "n_routed_experts": experts.pop("num_experts"),
        **experts,
        "moe_shared_expert_intermediate_size": metadata.integer(f"{arch}.expert_shared_feed_forward_length", Size),
        "moe_latent_size": metadata.get(f"{arch}.moe_latent_size", Size),
        "norm_topk_prob": metadata.get(f"{arch}.expert_weights_norm", bool, True),
        "routed_scaling_factor": metadata.number(f"{arch}.expert_weights_scale", Factor, 1.0),
        "n_group": groups,
        "topk_group": metadata.integer(f"{arch}.expert_group_used_count", Experts, 1 if groups == 1 else None),
    }


def _nemotron_kind(tensors: Collection[str], layer: int) -> str:
    kinds = {"attn_q": "full_attention", "ssm_in": "linear_attention", "ffn_gate_inp": "moe"}
    return next((kind for name, kind in kinds.items() if f"blk.{layer}.{name}.weight" in tensors), "mlp")


def _falcon(metadata: MetadataFields, tensors: Collection[str], arch: str, facts: dict[str, Any]) -> dict[str, Any]:
    """The matrices of files include the factors of configurations; the gate comes before the norm, if there is one."""
    if facts["tie_word_embeddings"]:
        raise ConfigError(f"{metadata.path} has no tensor output.weight, and the embedding's factor is another one", "model")
    return {
        "mamba_d_ssm": metadata.integer(f"{arch}.ssm.inner_size", Size),
        **_mamba2(metadata, tensors, arch),
        "mamba_rms_norm": _has(tensors, ".ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


_READERS = {
    **dict.fromkeys(("qwen3next", "qwen35moe"), _qwen3next),
    "qwen35": _qwen35,
    "granitehybrid": _granite,
    **dict.fromkeys(("lfm2", "lfm2moe"), _lfm2),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _nemotron),
    "falcon-h1": _falcon,
}
