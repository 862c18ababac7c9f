"""LFM2: short convolutions in place of attention in most layers; q and k are normed a head. In LFM2-MoE the later layers have
mixtures of experts."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from headrace.layers.mlp import GatedMLP
from headrace.layers.moe import Experts
from headrace.layers.short_conv import ShortConv
from headrace.model_spec import AttentionSpec, ConvSpec, DenseSpec, MlpSpec, ModelSpec, MoeSpec, StateSpec
from headrace.models.decoder import Decoder, DecoderLayer
from headrace.models.family import Family
from headrace.models.hf_config import (
    HFConfig,
    attending,
    attention_specs,
    decoder_spec,
    dense_specs,
    hybrid_mixers,
    required,
    uniform,
    whole,
)
from headrace.models.moe_config import experts_of, mixed_specs, number
from headrace.models.names import decoder_names, experts_apart
from headrace.weights.names import NameTable

ARCHITECTURE, MOE_ARCHITECTURE = "Lfm2ForCausalLM", "Lfm2MoeForCausalLM"
_STORED = {
    ".input_layernorm.weight": ".operator_norm.weight",
    ".post_attention_layernorm.weight": ".ffn_norm.weight",
    ".self_attn.q_norm.weight": ".self_attn.q_layernorm.weight",
    ".self_attn.k_norm.weight": ".self_attn.k_layernorm.weight",
    ".self_attn.o_proj.weight": ".self_attn.out_proj.weight",
    ".mlp.gate_up_proj": ".feed_forward.gate_up_proj",
    ".mlp.gate_up_proj.weight": ".feed_forward.gate_up_proj.weight",
    ".mlp.down_proj.weight": ".feed_forward.w2.weight",
    ".mlp.gate.weight": ".feed_forward.gate.weight",
    ".mlp.gate.e_score_correction_bias": ".feed_forward.expert_bias",
    ".mlp.experts": ".feed_forward.experts",
}
"""Suffixes of the model's names -> of a checkpoint's."""


class Lfm2Layer(DecoderLayer):
    state_class = ShortConv
    state_name = "conv"

    def build_mlp(self, model: ModelSpec, index: int, dtype: torch.dtype, device: str | torch.device) -> nn.Module:
        mlp = super().build_mlp(model, index, dtype, device)
        if isinstance(mlp, GatedMLP):
            mlp.gate_up_proj.parts = dict(zip(("w1", "w3"), mlp.gate_up_proj.parts.values(), strict=True))
        return mlp


class Lfm2Decoder(Decoder):
    layer_class = Lfm2Layer


def _dense(config: HFConfig) -> tuple[DenseSpec, ...]:
    """The MLPs, whose width the ``block_*`` fields change."""
    if not uniform(config, "block_auto_adjust_ff_dim", False):
        return dense_specs(config)
    factor, multiple = uniform(config, "block_ffn_dim_multiplier"), required(config, "block_multiple_of")
    specs = []
    for spec in dense_specs(config):
        width = int(2 * spec.intermediate_size / 3)
        if factor is not None:
            width = -(-int(factor * width) // multiple) * multiple
        specs.append(dataclasses.replace(spec, intermediate_size=width))
    return tuple(specs)


def _spec(config: HFConfig, architecture: str, mlps: tuple[MlpSpec, ...]) -> ModelSpec:
    mixers, hidden = hybrid_mixers(config, "conv"), required(config, "hidden_size")
    conv = ConvSpec(required(config, "conv_L_cache"), (("x", hidden),), bool(uniform(config, "conv_bias", False)), None)
    layers: tuple[AttentionSpec, ...] = attending(attention_specs(config), mixers)
    return decoder_spec(
        config,
        architecture,
        layers,
        mlps,
        mixers=mixers,
        states=tuple(StateSpec(index, "conv", 0, 0, 0, 0, conv) for index in range(len(mixers) - len(layers))),
        norm_eps=number(config, "norm_eps", 1e-5, above=0),
        qk_norm=True,
    )


def model_spec(config: HFConfig) -> ModelSpec:
    return _spec(config, ARCHITECTURE, _dense(config))


def moe_model_spec(config: HFConfig) -> ModelSpec:
    moe = MoeSpec(
        **experts_of(config, "num_experts", "num_experts_per_tok"),
        scoring="sigmoid",
        correction_bias=bool(uniform(config, "use_expert_bias", True)),
        normalize=bool(uniform(config, "norm_topk_prob", True)),
        added_sum=1e-6,
        routed_scale=number(config, "routed_scaling_factor", 1.0),
    )
    dense = whole(config, "num_dense_layers")
    return _spec(config, MOE_ARCHITECTURE, mixed_specs(config, moe, lambda layer: layer >= dense))


def _experts(table: NameTable, theirs: str, ours: str, module: Experts) -> None:
    experts_apart(table, theirs, ours, module, matrices=("w1", "w3", "w2"))
    for kind in ("gate_up_proj", "down_proj"):
        table.instead(f"{theirs}.{kind}", f"{ours}.{kind}")


def names(model: Decoder) -> NameTable:
    table = decoder_names(model, _STORED, experts=_experts)
    table.instead("model.embedding_norm.weight", "norm.weight")
    return table


FAMILY = Family(model_spec=model_spec, decoder=Lfm2Decoder, names=names)
MOE_FAMILY = Family(model_spec=moe_model_spec, decoder=Lfm2Decoder, names=names)
