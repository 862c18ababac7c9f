"""The registry of families: makes a spec, a module and a table of checkpoint names from a configuration."""

from __future__ import annotations

import dataclasses

import torch

from headrace.errors import ConfigError, did_you_mean, listed
from headrace.layers.linear import connect
from headrace.model_spec import ModelSpec
from headrace.models.cuts import shard_table
from headrace.models.decoder import Decoder
from headrace.models.families import (
    axk2,
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    ernie4_5,
    ernie4_5_moe,
    ernie4_5_vl,
    gemma3,
    gemma4,
    gpt_oss,
    lfm2,
    llama,
    llama4,
    mimo_v2_flash,
    minimax_m3,
    mistral,
    olmo2,
    paw,
    qwen2,
    qwen3,
    qwen3_moe,
    qwen_vl,
)
from headrace.models.families.hybrid import bamba, falcon_h1, granite_hybrid, nemotron_h, olmo_hybrid, qwen3_next
from headrace.models.family import Family
from headrace.models.hf_config import HFConfig, text_part
from headrace.models.vision import interface as vision
from headrace.parallel.group import ALONE, Group
from headrace.quant.formats.find import find_scheme
from headrace.sources.heads import causal_name
from headrace.weights.names import NameTable

_FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    gemma3.FAMILY,
    gemma4.FAMILY,
    gpt_oss.FAMILY,
    mimo_v2_flash.FAMILY,
    minimax_m3.FAMILY,
    qwen3_moe.FAMILY,
    qwen_vl.QWEN2_VL,
    qwen_vl.QWEN3_VL,
    qwen_vl.QWEN3_VL_MOE,
    ernie4_5.FAMILY,
    ernie4_5_moe.FAMILY,
    ernie4_5_vl.FAMILY,
    deepseek_v2.FAMILY,
    deepseek_v3.FAMILY,
    deepseek_v32.FAMILY,
    deepseek_v32.GLM_FAMILY,
    axk2.FAMILY,
    olmo2.FAMILY,
    llama4.FAMILY,
    lfm2.FAMILY,
    lfm2.MOE_FAMILY,
    qwen3_next.QWEN3_NEXT,
    qwen3_next.QWEN3_5,
    qwen3_next.QWEN3_5_MOE,
    bamba.FAMILY,
    granite_hybrid.FAMILY,
    falcon_h1.FAMILY,
    nemotron_h.FAMILY,
    olmo_hybrid.FAMILY,
    *paw.FAMILIES,
)
_BY_ARCHITECTURE = {architecture: family for family in _FAMILIES for architecture in family.architectures}
_BY_TYPE = {kind: family for family in _FAMILIES for kind in family.model_types}


def supported() -> list[str]:
    """Lists the architectures that have a native implementation."""
    return list(_BY_ARCHITECTURE)


def _own_text(hf_config: HFConfig) -> HFConfig:
    """The configuration that says the family: that of the text part where it is a separate model, or the whole."""
    return text_part(hf_config) if vision.is_around_text(hf_config) else hf_config


def find(hf_config: HFConfig) -> Family | None:
    """Returns the native family of a configuration, None if there is none."""
    hf_config = _own_text(hf_config)
    architectures = getattr(hf_config, "architectures", None)
    if not architectures:
        return _BY_TYPE.get(hf_config.model_type)
    return next((_BY_ARCHITECTURE[name] for name in map(causal_name, architectures) if name in _BY_ARCHITECTURE), None)


def model_spec(hf_config: HFConfig) -> ModelSpec:
    """Reads the spec of a model from its Hugging Face configuration.

    Raises:
        ConfigError: the architecture is unsupported (the message names some that are), or a field of the configuration
            is; the message names the field, and the layer if it is per layer.
    """
    family = find(hf_config)
    if family is None:
        own = _own_text(hf_config)
        named = getattr(own, "architectures", None) or [own.model_type]
        name, names = " / ".join(map(str, named)), supported()
        known = f"supported are: {listed(names, 12)}{did_you_mean(name, names)}"
        raise ConfigError(f"architecture {name} is not supported; {known}", "model")
    find_scheme(hf_config)
    return dataclasses.replace(family.model_spec(_own_text(hf_config)), vision=vision.vision_spec(hf_config))


def to_transformers_fields(hf_config: HFConfig) -> HFConfig:
    """Rewrites the config into the fields that transformers' module of the model reads.

    Raises:
        ConfigError: a field has no equivalent; names it.
    """
    family = find(hf_config)
    return hf_config if family is None or family.to_transformers_fields is None else family.to_transformers_fields(hf_config)


def build(spec: ModelSpec, dtype: str, device: str | torch.device, group: Group = ALONE, *, to_load: bool = False) -> Decoder:
    """Builds the model, or the part of it that the spec describes, with its parameters allocated and uninitialised.

    Args:
        group: the ranks that have the other parts.
        to_load: leave the parameters on the meta device: ``load_weights`` allocates those that stay.
    """
    decoder = _BY_ARCHITECTURE[spec.architecture].decoder
    model = decoder(spec, getattr(torch, dtype), "meta" if to_load else device).eval()
    if to_load:
        model.place(device)
    connect(model, group)
    return model


def name_table(spec: ModelSpec) -> NameTable:
    """Maps checkpoint names, as Hugging Face saves a causal language model, to parameters, or to what a rank holds of them."""
    whole = build(spec.whole, "float32", "meta")
    table = _BY_ARCHITECTURE[spec.architecture].names(whole)
    if spec.vision is not None:
        table = vision.with_media_names(table, spec.vision)
    return table if spec.shard is None else shard_table(table, whole, build(spec, "float32", "meta"), spec.shard)
