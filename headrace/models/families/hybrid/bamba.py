"""Bamba: Mamba-2 in place of attention in most layers; attention rotates half of each head."""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
from torch import nn

from headrace.layers.state import Mamba2Mixer
from headrace.model_spec import ModelSpec, StateSpec
from headrace.models.decoder import Decoder, DecoderLayer
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
from headrace.models.mamba_config import mamba2_specs
from headrace.models.names import decoder_names
from headrace.weights.names import NameTable

ARCHITECTURE = "BambaForCausalLM"
_ROTATED = 0.5
_MOVED = {
    ".mlp.gate_up_proj": ".feed_forward.gate_up_proj",
    ".mlp.gate_up_proj.weight": ".feed_forward.gate_up_proj.weight",
    ".mlp.gate_up_proj.bias": ".feed_forward.gate_up_proj.bias",
    ".mlp.down_proj.weight": ".feed_forward.down_proj.weight",
    ".mlp.down_proj.bias": ".feed_forward.down_proj.bias",
    ".post_attention_layernorm.weight": ".pre_ff_layernorm.weight",
}
"""Suffixes of the model's names -> of a checkpoint's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MambaSpec(ModelSpec):
    mamba_bias: bool = False
    """The projections of Mamba layers have biases."""


class MambaMixer(Mamba2Mixer):
    def __init__(self, model: ModelSpec, spec: StateSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        bias = cast(MambaSpec, model).mamba_bias
        super().__init__(model, spec, dtype, device, bias=bias, out_bias=bias)


class MambaLayer(DecoderLayer):
    state_class: type[nn.Module] = MambaMixer
    state_name = "mamba"


class BambaDecoder(Decoder):
    layer_class = MambaLayer


def names(model: Decoder) -> NameTable:
    table = decoder_names(model, _MOVED)
    table.instead("model.final_layernorm.weight", "norm.weight")
    return table


def model_spec(config: HFConfig) -> ModelSpec:
    mixers = hybrid_mixers(config, "linear_attention")
    layers = attending(attention_specs(config, partial_rotary=_ROTATED), mixers)
    return decoder_spec(
        config,
        ARCHITECTURE,
        layers,
        dense_specs(config, bias=bool(uniform(config, "mlp_bias", False))),
        reads=("partial_rotary_factor",),
        kind=MambaSpec,
        mixers=mixers,
        states=mamba2_specs(config, len(mixers) - len(layers)),
        mamba_bias=bool(uniform(config, "mamba_proj_bias", False)),
        **attention_biases(config),
    )


FAMILY = Family(model_spec=model_spec, decoder=BambaDecoder, names=names)
