"""Qwen3-Next and the text parts of Qwen3.5: three layers of four are gated delta rules; the attention of the others has an
output gate and rotates a part of each head; all norms' weights but those behind the delta rule are stored less one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from headrace.attention.context import ForwardContext
from headrace.kernels.activation import sigmoid_gated
from headrace.kernels.linear.fp8_reference import Activations
from headrace.layers.norm import OffsetRMSNorm
from headrace.layers.state import GatedDeltaNet
from headrace.model_spec import AttentionSpec, ConvSpec, DenseSpec, MlpSpec, ModelSpec, MoeSpec, StateSpec
from headrace.models.decoder import Decoder, DecoderAttention, DecoderLayer
from headrace.models.family import Family
from headrace.models.hf_config import (
    HFConfig,
    attending,
    attention_biases,
    attention_specs,
    decoder_spec,
    dense_specs,
    hybrid_mixers,
    required,
    text_part,
    uniform,
)
from headrace.models.moe_config import activation, experts_of, must_be, stepped_specs
from headrace.models.names import decoder_names
from headrace.weights.names import NameTable

_ROTATED = 0.25
"""The default share of a head's channels that is rotated."""
_NEXT = "Qwen3NextForCausalLM"
_DENSE = "Qwen3_5ForCausalLM"
_MOE = "Qwen3_5MoeForCausalLM"
_MOVED = {
    ".shared_experts.gate_up_proj": ".shared_expert.gate_up_proj",
    ".shared_experts.gate_up_proj.weight": ".shared_expert.gate_up_proj.weight",
    ".shared_experts.down_proj.weight": ".shared_expert.down_proj.weight",
}
_ELSEWHERE = (r"(?:model\.)?(?:mtp|visual)\..*",)
"""Names of layers for multi-token prediction, and of the vision part."""


class OutputGatedAttention(DecoderAttention):
    """Attention whose output is gated. A checkpoint has each head's gate behind its query, in one matrix with it; here all
    gates come first, and then all queries."""

    norm_class = OffsetRMSNorm

    def __init__(self, model: ModelSpec, spec: AttentionSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(model, spec, dtype, device)
        self.qkv_proj.parts = {"q_proj": spec.out_size + spec.q_size, "k_proj": spec.k_size, "v_proj": spec.v_size}
        self.qkv_proj.stored_rows = {"q_proj": partial(_gates_first, spec.num_heads, spec.head_dim)}

    @property
    def matrices(self) -> tuple[str, ...]:
        return "gate", "q", "k", "v"

    def forward(self, x: Activations, cos_sin: torch.Tensor | None, ctx: ForwardContext) -> torch.Tensor:
        spec = self.spec
        gate, qkv = self.qkv_proj(x).split((spec.out_size, spec.q_size + spec.k_size + spec.v_size), dim=1)
        out = self.attention.forward_qkv(qkv, ctx, cos_sin, self.q_norm, self.k_norm)
        return self.o_proj(sigmoid_gated(out, ctx.wanted_of(gate)))  # type: ignore[no-any-return]


def _gates_first(heads: int, width: int) -> list[int]:
    """Returns, for the gates of all heads and then their queries, the rows of pairs of a query and a gate."""
    return [2 * width * head + start + row for start in (width, 0) for head in range(heads) for row in range(width)]


class GroupedDeltaNet(GatedDeltaNet):
    """The delta rule of Qwen3-Next, whose checkpoints have q, k, v and z of each key head side by side in one matrix."""

    def input_parts(self, spec: StateSpec) -> dict[str, int]:
        return {"in_proj_qkvz": spec.mixed_channels + spec.heads * spec.value_dim}

    def gate_parts(self, spec: StateSpec) -> dict[str, int]:
        return {"in_proj_ba": 2 * spec.heads}

    def input_rows(self, spec: StateSpec) -> Mapping[str, Callable[[], Sequence[int]]]:
        values = spec.heads // spec.key_heads * spec.value_dim
        widths = (spec.key_dim, spec.key_dim, values, values)
        return {"in_proj_qkvz": partial(_by_part, spec.key_heads, widths)}

    def gate_rows(self, spec: StateSpec) -> Mapping[str, Callable[[], Sequence[int]]]:
        shared = spec.heads // spec.key_heads
        return {"in_proj_ba": partial(_by_part, spec.key_heads, (shared, shared))}


def _by_part(groups: int, widths: Sequence[int]) -> list[int]:
    """Returns, for the first part of all groups, then the second and so on, the rows of groups that have all parts."""
    starts = [sum(widths[:part]) for part in range(len(widths))]
    return [
        group * sum(widths) + start + row
        for start, width in zip(starts, widths, strict=True)
        for group in range(groups)
        for row in range(width)
    ]


class Qwen3NextLayer(DecoderLayer):
    attention_class = OutputGatedAttention
    state_class: type[nn.Module] = GroupedDeltaNet
    norm_class = OffsetRMSNorm


class Qwen3NextDecoder(Decoder):
    layer_class = Qwen3NextLayer


class Qwen35Layer(Qwen3NextLayer):
    state_class = GatedDeltaNet


class Qwen35Decoder(Qwen3NextDecoder):
    layer_class = Qwen35Layer


def names(model: Decoder) -> NameTable:
    table = decoder_names(model, _MOVED, ignorable=_ELSEWHERE)
    for layer, block in enumerate(model.spec.blocks):
        if block.state is not None and isinstance(model.layers[layer].mixer, GroupedDeltaNet):
            spec, here = model.spec.states[block.state], f"layers.{layer}.linear_attn"
            # GGUF files have q, k and v, and z, of all heads.
            parts = {"in_proj_qkv": spec.mixed_channels, "in_proj_z": spec.heads * spec.value_dim}
            stored = {f"model.{here}.{name}.weight": rows for name, rows in parts.items()}
            table.instead(stored, f"{here}.in_proj.weight")
    table.elsewhere({"model.": "model.language_model."})
    return table


def delta_rule_spec(config: HFConfig, index: int) -> StateSpec:
    """Reads the geometry of a gated delta rule from the ``linear_*`` fields."""
    must_be(config, "hidden_act", "silu")
    key_heads, heads = required(config, "linear_num_key_heads"), required(config, "linear_num_value_heads")
    key_dim, value_dim = required(config, "linear_key_head_dim"), required(config, "linear_value_head_dim")
    parts = (("q", key_heads * key_dim), ("k", key_heads * key_dim), ("v", heads * value_dim))
    return StateSpec(
        index=index,
        kind="gdn",
        heads=heads,
        key_heads=key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv=ConvSpec(required(config, "linear_conv_kernel_dim"), parts, bias=False, activation="silu"),
    )


def _spec(config: HFConfig, architecture: str, mlps: Sequence[MlpSpec], *, sections: bool = False) -> ModelSpec:
    must_be(config, "attn_output_gate", True)
    must_be(config, "output_gate_type", "swish", None)
    mixers = hybrid_mixers(config, "linear_attention")
    layers = attending(attention_specs(config, partial_rotary=_ROTATED, sections=sections), mixers)
    return decoder_spec(
        config,
        architecture,
        tuple(dataclasses.replace(layer, output_gate=True) for layer in layers),
        mlps,
        reads=("attn_output_gate", "partial_rotary_factor"),
        mixers=mixers,
        states=tuple(delta_rule_spec(config, index) for index in range(len(mixers) - len(layers))),
        qk_norm=True,
        **attention_biases(config),
    )


def _experts(config: HFConfig, *, normalize: bool) -> MoeSpec:
    shared = DenseSpec(required(config, "shared_expert_intermediate_size"), activation(config))
    experts = experts_of(config, "num_experts", "num_experts_per_tok")
    return MoeSpec(**experts, normalize=normalize, shared=shared, shared_gate=True)


def next_spec(config: HFConfig) -> ModelSpec:
    experts = _experts(config, normalize=bool(uniform(config, "norm_topk_prob", True)))
    return _spec(config, _NEXT, stepped_specs(config, experts))


def dense_spec(config: HFConfig) -> ModelSpec:
    text = text_part(config)
    return _spec(text, _DENSE, dense_specs(text), sections=True)


def moe_spec(config: HFConfig) -> ModelSpec:
    text = text_part(config)
    experts = _experts(text, normalize=True)
    return _spec(text, _MOE, [experts] * required(text, "num_hidden_layers"), sections=True)


QWEN3_NEXT = Family(model_spec=next_spec, decoder=Qwen3NextDecoder, names=names)
QWEN3_5 = Family(model_spec=dense_spec, decoder=Qwen35Decoder, names=names)
QWEN3_5_MOE = Family(model_spec=moe_spec, decoder=Qwen35Decoder, names=names)
