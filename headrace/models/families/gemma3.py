"""Gemma 3, its text part: windows in five layers of six, each kind with its own rope; every norm's weight is stored less 1."""

from __future__ import annotations

import dataclasses
from typing import Any

from headrace.errors import ContradictionError
from headrace.layers.norm import OffsetRMSNorm
from headrace.model_spec import ModelSpec
from headrace.models.decoder import Decoder, DecoderAttention
from headrace.models.families.gemma import NON_TEXT, GemmaDecoder, GemmaLayer, with_multimodal_names
from headrace.models.family import Family
from headrace.models.hf_config import (
    HFConfig,
    attention_biases,
    attention_specs,
    decoder_spec,
    dense_specs,
    per_layer,
    required,
    text_part,
    uniform,
    windows_by_type,
)
from headrace.models.names import decoder_names
from headrace.weights.names import NameTable

ARCHITECTURE = "Gemma3ForCausalLM"


class Gemma3Attention(DecoderAttention):
    norm_class = OffsetRMSNorm


class Gemma3Layer(GemmaLayer):
    attention_class = Gemma3Attention
    norm_class = OffsetRMSNorm


class Gemma3Decoder(GemmaDecoder):
    layer_class = Gemma3Layer


def names(model: Decoder) -> NameTable:
    return with_multimodal_names(decoder_names(model, ignorable=NON_TEXT))


def model_spec(config: HFConfig) -> ModelSpec:
    config = text_part(config)
    scalars = per_layer(config, "query_pre_attn_scalar", 256)
    layers = tuple(
        dataclasses.replace(layer, scale=_scale(layer.layer, scalar))
        for layer, scalar in zip(attention_specs(config, windows=windows_by_type(config)), scalars, strict=True)
    )
    return decoder_spec(
        config,
        ARCHITECTURE,
        layers,
        dense_specs(config, act="hidden_activation"),
        reads=("final_logit_softcapping",),
        qk_norm=True,
        **attention_biases(config),
        logit_soft_cap=uniform(config, "final_logit_softcapping"),
        # It includes what the ropes of the full layers stretch.
        max_position=required(config, "max_position_embeddings"),
    )


def _scale(layer: int, scalar: Any) -> float:
    if not isinstance(scalar, int | float) or isinstance(scalar, bool) or not scalar > 0:
        raise ContradictionError(
            f"layer {layer}: query_pre_attn_scalar must be a number above 0, not {scalar!r}", "query_pre_attn_scalar"
        )
    return float(scalar**-0.5)


FAMILY = Family(model_spec=model_spec, decoder=Gemma3Decoder, names=names)
