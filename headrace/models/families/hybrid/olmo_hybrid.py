"""OLMo hybrid: gated delta rules in three layers of four, normed before; the attention layers are OLMo 2's, normed behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import cast

import torch
from torch import nn

from headrace.attention.context import ForwardContext
from headrace.layers.norm import RMSNorm
from headrace.layers.state import GatedDeltaNet
from headrace.model_spec import ModelSpec, StateSpec
from headrace.models.decoder import Decoder, DecoderLayer
from headrace.models.families.hybrid.qwen3_next import delta_rule_spec
from headrace.models.families.olmo2 import Olmo2Decoder, Olmo2Layer
from headrace.models.family import Family
from headrace.models.hf_config import (
    HFConfig,
    attending,
    attention_biases,
    attention_specs,
    decoder_spec,
    dense_specs,
    hybrid_mixers,
    uniform,
)
from headrace.models.names import decoder_names
from headrace.weights.names import NameTable

ARCHITECTURE = "OlmoHybridForCausalLM"
_MOVED = {
    ".linear_attn.norm.weight": ".linear_attn.o_norm.weight",
    ".linear_attn.out_proj.weight": ".linear_attn.o_proj.weight",
}
"""Suffixes of the model's names -> of a checkpoint's."""


class OlmoDeltaNet(GatedDeltaNet):
    def input_parts(self, spec: StateSpec) -> dict[str, int]:
        keys, values = spec.key_heads * spec.key_dim, spec.heads * spec.value_dim
        return {"q_proj": keys, "k_proj": keys, "v_proj": values, "g_proj": values}

    def gate_parts(self, spec: StateSpec) -> dict[str, int]:
        return {"b_proj": spec.heads, "a_proj": spec.heads}

    def norm_eps(self, model: ModelSpec) -> float:
        return 1e-5


class OlmoHybridLayer(Olmo2Layer):
    """One of OLMo 2's; with a state, a common decoder layer."""

    state_class: type[nn.Module] = OlmoDeltaNet

    def __init__(self, model: ModelSpec, index: int, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(model, index, dtype, device)
        self.normed_behind = model.blocks[index].attention is not None
        if not self.normed_behind:
            del self.post_feedforward_layernorm
            self.input_layernorm = self.norm_class(model.hidden_size, model.norm_eps, dtype=dtype, device=device)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, cos_sin: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.normed_behind:
            return super().forward(x, residual, cos_sin, ctx)
        if residual is not None:
            before = cast(OlmoHybridLayer, self._before[0])
            if before.normed_behind:
                x, residual = before.stream(x, residual), None
        return DecoderLayer.forward(self, x, residual, cos_sin, ctx)

    def norm_readers(self) -> Iterator[tuple[RMSNorm, nn.Module]]:
        return super().norm_readers() if self.normed_behind else DecoderLayer.norm_readers(self)

    def stream(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return super().stream(x, residual) if self.normed_behind else DecoderLayer.stream(self, x, residual)


class OlmoHybridDecoder(Olmo2Decoder):
    layer_class = OlmoHybridLayer


def names(model: Decoder) -> NameTable:
    """Checkpoints have the convolution's parts apart, and other names of norms than transformers' module."""
    table = decoder_names(model, _MOVED)
    for layer, block in enumerate(model.spec.blocks):
        here = f"layers.{layer}"
        table.instead(f"model.{here}.feedforward_layer_norm.weight", f"{here}.post_attention_layernorm.weight")
        if block.state is None:
            continue
        conv = model.spec.states[block.state].conv
        parts = () if conv is None else conv.parts
        stored = {f"model.{here}.linear_attn.{name}_conv1d.weight": channels for name, channels in parts}
        table.instead(stored, f"{here}.linear_attn.conv1d.weight")
        table.instead(f"model.{here}.attention_layer_norm.weight", f"{here}.input_layernorm.weight")
    return table


def model_spec(config: HFConfig) -> ModelSpec:
    mixers = hybrid_mixers(config, "linear_attention")
    layers = attending(attention_specs(config), mixers)
    if (getattr(config, "rope_parameters", None) or {}).get("rope_theta") is None:
        layers = tuple(dataclasses.replace(layer, rotary_dim=0, rope=None) for layer in layers)
    factor = 2 if uniform(config, "linear_allow_neg_eigval", True) else 1
    return decoder_spec(
        config,
        ARCHITECTURE,
        layers,
        dense_specs(config),
        mixers=mixers,
        states=tuple(
            dataclasses.replace(delta_rule_spec(config, index), beta_factor=factor)
            for index in range(len(mixers) - len(layers))
        ),
        qk_norm=True,
        **attention_biases(config),
    )


FAMILY = Family(model_spec=model_spec, decoder=OlmoHybridDecoder, names=names)
