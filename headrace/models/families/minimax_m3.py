"""MiniMax M3, its text: layers whose index heads choose blocks of keys for each KV head, and gates that are clamped."""

from __future__ import annotations

import dataclasses

import torch

from headrace.attention.context import ForwardContext
from headrace.errors import ConfigError, ContradictionError
from headrace.kernels.linear.fp8_reference import Activations, Fp8Rows
from headrace.layers.indexer import BlockIndexer
from headrace.layers.linear import Linear
from headrace.layers.norm import OffsetRMSNorm
from headrace.model_spec import CLAMPED_SWIGLU, AttentionSpec, DenseSpec, IndexerSpec, ModelSpec, MoeSpec
from headrace.models.decoder import Decoder, DecoderAttention, DecoderLayer
from headrace.models.families.gemma import with_multimodal_names
from headrace.models.family import Family
from headrace.models.hf_config import HFConfig, attention_specs, decoder_spec, per_layer, required, text_part, whole
from headrace.models.moe_config import number
from headrace.models.names import block_sparse_experts, decoder_names
from headrace.weights.names import NameTable

ARCHITECTURE = "MiniMaxM3VLForCausalLM"
_SPARSE = "minimax_m3_sparse"
_BESIDE = (
    r"(?:model\.)?(?:vision_tower|multi_modal_projector|patch_merge_mlp)\..*",
    r"(?:.*\.)?mtp\..*",
)
"""Checkpoint names of the parts that read pictures, and of those that predict further tokens."""


class M3Attention(DecoderAttention):
    norm_class = OffsetRMSNorm

    def __init__(self, model: ModelSpec, spec: AttentionSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(model, spec, dtype, device)
        self.indexer: BlockIndexer | None = None
        if spec.indexer is not None:
            self.indexer = BlockIndexer(model.hidden_size, spec, self.norm_class, model.norm_eps, dtype=dtype, device=device)

    def readers(self) -> tuple[Linear, ...]:
        """No layers where an indexer reads the input in floats."""
        return super().readers() if self.indexer is None else ()

    def forward(self, x: Activations, cos_sin: torch.Tensor | None, ctx: ForwardContext) -> torch.Tensor:
        if self.indexer is not None:
            if isinstance(x, Fp8Rows):
                raise TypeError("an indexer reads floats")
            self.indexer(x, cos_sin, ctx)
        return super().forward(x, cos_sin, ctx)


class M3Layer(DecoderLayer):
    attention_class = M3Attention
    norm_class = OffsetRMSNorm


class M3Decoder(Decoder):
    layer_class = M3Layer


def model_spec(config: HFConfig) -> ModelSpec:
    config = text_part(config)
    alpha, limit = number(config, "swiglu_alpha", 1.702), number(config, "swiglu_limit", 7.0)
    dense = DenseSpec(required(config, "dense_intermediate_size"), CLAMPED_SWIGLU, alpha=alpha, limit=limit)
    moe = MoeSpec(
        num_experts=required(config, "num_local_experts"),
        top_k=required(config, "num_experts_per_tok"),
        intermediate_size=required(config, "intermediate_size"),
        shared=dataclasses.replace(dense, intermediate_size=required(config, "shared_intermediate_size")),
        act=CLAMPED_SWIGLU,
        scoring="sigmoid",
        correction_bias=True,
        routed_scale=number(config, "routed_scaling_factor", 1.0),
        alpha=alpha,
        limit=limit,
    )
    mlps: list[DenseSpec | MoeSpec] = []
    for layer, kind in enumerate(per_layer(config, "mlp_layer_types", "sparse")):
        if kind not in ("dense", "sparse"):
            raise ConfigError(f"layer {layer}: mlp_layer_types {kind!r} is neither dense nor sparse", "mlp_layer_types")
        mlps.append(moe if kind == "sparse" else dense)
    layers = attention_specs(config, partial_rotary=1.0)
    return decoder_spec(
        config, ARCHITECTURE, _with_indexers(config, layers), mlps, reads=("partial_rotary_factor",), qk_norm=True
    )


def _with_indexers(config: HFConfig, layers: tuple[AttentionSpec, ...]) -> tuple[AttentionSpec, ...]:
    own = IndexerSpec(
        top_k=required(config, "index_topk_blocks"),
        block=required(config, "index_block_size"),
        local=whole(config, "index_local_blocks", 1),
        num_heads=required(config, "index_n_heads"),
        head_dim=required(config, "index_head_dim"),
        weighted=False,
    )
    if own.local > own.top_k:
        raise ContradictionError(
            f"config: index_local_blocks {own.local} is more than the {own.top_k} blocks of index_topk_blocks",
            "index_local_blocks",
        )
    made = []
    for spec, kind in zip(layers, per_layer(config, "layer_types", "full_attention"), strict=True):
        if kind == _SPARSE and own.head_dim < spec.rotary_dim:
            raise ContradictionError(
                f"layer {spec.layer}: index_head_dim {own.head_dim} is less than the {spec.rotary_dim} rotated channels",
                "index_head_dim",
            )
        made.append(dataclasses.replace(spec, indexer=own) if kind == _SPARSE else spec)
    return tuple(made)


def names(model: Decoder) -> NameTable:
    """Published checkpoints have names of their own for mixtures and indexers, in the model that reads pictures too."""
    table = with_multimodal_names(decoder_names(model, experts=block_sparse_experts, ignorable=_BESIDE))
    for index, mlp in enumerate(model.spec.mlps):
        ours, theirs = f"layers.{index}.mlp", f"model.layers.{index}.block_sparse_moe"
        if not isinstance(mlp, MoeSpec) or mlp.shared is None:
            continue
        table.instead(f"{theirs}.gate.weight", f"{ours}.gate.weight")
        table.instead(f"{theirs}.e_score_correction_bias", f"{ours}.gate.e_score_correction_bias")
        width, shared = mlp.shared.intermediate_size, f"{theirs}.shared_experts"
        parts = {f"{shared}.{part}.weight": width for part in ("gate_proj", "up_proj")}
        table.instead(parts, f"{ours}.shared_experts.gate_up_proj.weight")
        table.instead(f"{shared}.down_proj.weight", f"{ours}.shared_experts.down_proj.weight")
    for spec in model.spec.layers:
        for part in ("q_proj", "k_proj", "q_norm", "k_norm") if spec.indexer is not None else ():
            here = f"layers.{spec.layer}.self_attn"
            table.instead(f"model.{here}.index_{part}.weight", f"{here}.indexer.{part}.weight")
    return table


FAMILY = Family(model_spec=model_spec, decoder=M3Decoder, names=names)
