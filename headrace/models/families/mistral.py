"""Mistral: Llama with a sliding window in every layer, if the config gives one, and no biases."""

from __future__ import annotations

from headrace.model_spec import ModelSpec
from headrace.models.family import Family
from headrace.models.hf_config import HFConfig, attention_specs, decoder_spec, dense_specs, per_layer

ARCHITECTURE = "MistralForCausalLM"


def model_spec(config: HFConfig) -> ModelSpec:
    layers = attention_specs(config, windows=per_layer(config, "sliding_window"))
    return decoder_spec(config, ARCHITECTURE, layers, dense_specs(config))


FAMILY = Family(model_spec=model_spec)
