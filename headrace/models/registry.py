"""The registry of families: makes a spec, a module and a table of checkpoint names from a configuration."""

from __future__ import annotations

import dataclasses
import functools
import importlib

import torch

from headrace.errors import ConfigError, did_you_mean, listed
from headrace.layers.linear import connect
from headrace.model_spec import ModelSpec
from headrace.models.cuts import shard_table
from headrace.models.decoder import Decoder
from headrace.models.family import Family
from headrace.models.hf_config import HFConfig, text_part
from headrace.models.vision import interface as vision
from headrace.parallel.group import ALONE, Group
from headrace.quant.formats.find import find_scheme
from headrace.sources.heads import causal_name
from headrace.weights.names import NameTable

_FAMILIES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("llama.FAMILY", ("LlamaForCausalLM",), ("llama",)),
    ("mistral.FAMILY", ("MistralForCausalLM",), ("mistral",)),
    ("qwen2.FAMILY", ("Qwen2ForCausalLM",), ("qwen2",)),
    ("qwen3.FAMILY", ("Qwen3ForCausalLM",), ("qwen3",)),
    ("gemma3.FAMILY", ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), ("gemma3_text", "gemma3")),
    ("gemma4.FAMILY", ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"), ("gemma4_text", "gemma4")),
    ("gpt_oss.FAMILY", ("GptOssForCausalLM",), ("gpt_oss",)),
    ("mimo_v2_flash.FAMILY", ("MiMoV2FlashForCausalLM",), ("mimo_v2_flash",)),
    (
        "minimax_m3.FAMILY",
        ("MiniMaxM3VLForCausalLM", "MiniMaxM3SparseForConditionalGeneration"),
        ("minimax_m3_vl_text", "minimax_m3_vl"),
    ),
    ("qwen3_moe.FAMILY", ("Qwen3MoeForCausalLM",), ("qwen3_moe",)),
    (
        "qwen_vl.QWEN2_VL",
        ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
        ("qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text"),
    ),
    ("qwen_vl.QWEN3_VL", ("Qwen3VLForConditionalGeneration",), ("qwen3_vl", "qwen3_vl_text")),
    ("qwen_vl.QWEN3_VL_MOE", ("Qwen3VLMoeForConditionalGeneration",), ("qwen3_vl_moe", "qwen3_vl_moe_text")),
    ("ernie4_5.FAMILY", ("Ernie4_5ForCausalLM",), ("ernie4_5",)),
    ("ernie4_5_moe.FAMILY", ("Ernie4_5_MoeForCausalLM",), ("ernie4_5_moe",)),
    ("ernie4_5_vl.FAMILY", ("Ernie4_5_VLMoeForConditionalGeneration",), ("ernie4_5_vl_moe", "ernie4_5_vl_moe_text")),
    ("deepseek_v2.FAMILY", ("DeepseekV2ForCausalLM",), ("deepseek_v2",)),
    ("deepseek_v2.V3_FAMILY", ("DeepseekV3ForCausalLM",), ("deepseek_v3",)),
    ("deepseek_v32.FAMILY", ("DeepseekV32ForCausalLM",), ("deepseek_v32",)),
    ("deepseek_v32.GLM_FAMILY", ("GlmMoeDsaForCausalLM",), ("glm_moe_dsa",)),
    ("axk2.FAMILY", ("AXK2ForCausalLM",), ("axk2",)),
    ("dots3.FAMILY", ("Dots3NoteForCausalLM", "Dots3NoteForConditionalGeneration"), ("dots3_note_text", "dots3_note")),
    ("olmo2.FAMILY", ("Olmo2ForCausalLM",), ("olmo2",)),
    ("llama4.FAMILY", ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"), ("llama4_text", "llama4")),
    ("lfm2.FAMILY", ("Lfm2ForCausalLM",), ("lfm2",)),
    ("lfm2.MOE_FAMILY", ("Lfm2MoeForCausalLM",), ("lfm2_moe",)),
    ("hybrid.qwen3_next.QWEN3_NEXT", ("Qwen3NextForCausalLM",), ("qwen3_next",)),
    ("hybrid.qwen3_next.QWEN3_5", ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), ("qwen3_5_text", "qwen3_5")),
    (
        "hybrid.qwen3_next.QWEN3_5_MOE",
        ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        ("qwen3_5_moe_text", "qwen3_5_moe"),
    ),
    ("hybrid.bamba.FAMILY", ("BambaForCausalLM",), ("bamba",)),
    ("hybrid.granite_hybrid.FAMILY", ("GraniteMoeHybridForCausalLM",), ("granitemoehybrid",)),
    ("hybrid.falcon_h1.FAMILY", ("FalconH1ForCausalLM",), ("falcon_h1",)),
    ("hybrid.nemotron_h.FAMILY", ("NemotronHForCausalLM",), ("nemotron_h",)),
    ("hybrid.kimi_linear.FAMILY", ("KimiLinearForCausalLM",), ("kimi_linear",)),
    ("hybrid.minimax.FAMILY", ("MiniMaxForCausalLM",), ("minimax",)),
    ("hybrid.olmo_hybrid.FAMILY", ("OlmoHybridForCausalLM",), ("olmo_hybrid",)),
    ("paw.QWEN3_FAMILY", ("PawQwen3ForCausalLM",), ()),
    ("paw.LLAMA_FAMILY", ("PawLlamaForCausalLM",), ()),
)
"""A family's module and name in ``headrace.models.families``, names in ``architectures`` of its configurations, and types of
those that name no architecture, since they were never saved with a model. Only families that are asked for are imported."""

_BY_ARCHITECTURE = {name: place for place, architectures, _ in _FAMILIES for name in architectures}
_BY_TYPE = {kind: place for place, _, kinds in _FAMILIES for kind in kinds}


@functools.cache
def _load(place: str) -> Family:
    module, _, name = place.rpartition(".")
    family: Family = getattr(importlib.import_module(f"headrace.models.families.{module}"), name)
    return family


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
    if architectures:
        place = next((_BY_ARCHITECTURE[name] for name in map(causal_name, architectures) if name in _BY_ARCHITECTURE), None)
    else:
        place = _BY_TYPE.get(hf_config.model_type)
    return None if place is None else _load(place)


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
    decoder = _load(_BY_ARCHITECTURE[spec.architecture]).decoder
    model = decoder(spec, getattr(torch, dtype), "meta" if to_load else device).eval()
    if to_load:
        model.place(device)
    connect(model, group)
    return model


def name_table(spec: ModelSpec) -> NameTable:
    """Maps checkpoint names, as Hugging Face saves a causal language model, to parameters, or to what a rank holds of them."""
    whole = build(spec.whole, "float32", "meta")
    table = _load(_BY_ARCHITECTURE[spec.architecture]).names(whole)
    if spec.vision is not None:
        table = vision.with_media_names(table, spec.vision)
    return table if spec.shard is None else shard_table(table, whole, build(spec, "float32", "meta"), spec.shard)
