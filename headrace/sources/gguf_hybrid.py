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
}
"""``general.architecture`` -> model type and architecture in transformers."""
PARTLY_ROTATED = frozenset({"qwen3next"})
"""Architectures whose ``rope.dimension_count`` is not the width of a head."""


class MetadataFields(Protocol):
    """The fields of a file, as ``headrace.sources.gguf.Metadata`` reads them."""

    path: Path

    def get(self, key: str, kind: Any, default: Any = None) -> Any: ...
    def integer(self, key: str, kind: Any, default: int | None = None) -> int: ...
    def number(self, key: str, kind: Any, default: float | None = None) -> float: ...


def kv_heads(metadata: MetadataFields, arch: str, heads: int) -> int:
    """The KV heads of the layers that attend; files have 0 for the others."""
    key = f"{arch}.attention.head_count_kv"
    counts = metadata.get(key, Width | list[Width], heads)
    if isinstance(counts, int):
        return counts
    own = {count for count in counts if count}
    if len(own) != 1:
        raise ConfigError(f"{metadata.path}: {key} differs among layers that attend, which is not supported: {counts}", "model")
    return int(own.pop())


def hybrid_facts(metadata: MetadataFields, tensors: Collection[str], arch: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of the configuration beside ``facts``, those of any model, or in place of them."""
    state = "conv" if arch.startswith("lfm2") else "linear_attention"
    layers = range(facts["num_hidden_layers"])
    types = ["full_attention" if f"blk.{layer}.attn_q.weight" in tensors else state for layer in layers]
    own = {"qwen3next": _qwen3next, "granitehybrid": _granite}.get(arch, _lfm2)(metadata, tensors, arch, facts)
    return {"layer_types": types, **own}


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
    heads = metadata.integer(f"{arch}.ssm.time_step_rank", Size)
    rotated = metadata.integer(f"{arch}.rope.dimension_count", Size, facts["head_dim"] // 4)
    return qwen_mixture(metadata, arch) | {
        "shared_expert_intermediate_size": metadata.integer(f"{arch}.expert_shared_feed_forward_length", Size),
        "attention_bias": _has(tensors, ".attn_q.bias"),
        "linear_conv_kernel_dim": metadata.integer(f"{arch}.ssm.conv_kernel", Size),
        "linear_num_key_heads": metadata.integer(f"{arch}.ssm.group_count", Size),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": metadata.integer(f"{arch}.ssm.state_size", Size),
        "linear_value_head_dim": metadata.integer(f"{arch}.ssm.inner_size", Size) // heads,
        "rope_parameters": facts["rope_parameters"] | {"partial_rotary_factor": rotated / facts["head_dim"]},
    }


def _granite(metadata: MetadataFields, tensors: Collection[str], arch: str, facts: dict[str, Any]) -> dict[str, Any]:
    heads, inner = metadata.integer(f"{arch}.ssm.time_step_rank", Size), metadata.integer(f"{arch}.ssm.inner_size", Size)
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
        "mamba_expand": inner // facts["hidden_size"],
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": metadata.integer(f"{arch}.ssm.group_count", Size),
        "mamba_d_state": metadata.integer(f"{arch}.ssm.state_size", Size),
        "mamba_d_conv": metadata.integer(f"{arch}.ssm.conv_kernel", Size),
        "mamba_conv_bias": _has(tensors, ".ssm_conv1d.bias"),
        "mamba_proj_bias": _has(tensors, ".ssm_in.bias"),
    }
