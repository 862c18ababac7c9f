"""Mistral: Llama with a sliding window in every layer, if the config gives one, and no biases."""

from __future__ import annotations

from transformers import PretrainedConfig

from headrace.models.hf_config import decoder_spec, per_layer
from headrace.spec import ModelSpec

ARCHITECTURE = "MistralForCausalLM"
MODEL_TYPE = "mistral"


def model_spec(config: PretrainedConfig) -> ModelSpec:
    return decoder_spec(config, ARCHITECTURE, windows=per_layer(config, "sliding_window"))
