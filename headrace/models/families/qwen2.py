"""Qwen2 and 2.5: q, k and v have biases, o_proj has none; some layers may have a sliding window."""

from __future__ import annotations

from headrace.model_spec import ModelSpec
from headrace.models.family import Family
from headrace.models.hf_config import HFConfig, attention_specs, decoder_spec, dense_specs, windows_by_type

ARCHITECTURE = "Qwen2ForCausalLM"


def model_spec(config: HFConfig) -> ModelSpec:
    layers = attention_specs(config, windows=windows_by_type(config))
    return decoder_spec(config, ARCHITECTURE, layers, dense_specs(config), attention_bias=True)


FAMILY = Family(model_spec=model_spec)
