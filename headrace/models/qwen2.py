"""Qwen2 and 2.5: q, k and v have biases, o_proj has none; some layers may have a sliding window."""

from __future__ import annotations

from transformers import PretrainedConfig

from headrace.models.hf_config import decoder_spec, windows_by_type
from headrace.spec import ModelSpec

ARCHITECTURE = "Qwen2ForCausalLM"
MODEL_TYPE = "qwen2"


def model_spec(config: PretrainedConfig) -> ModelSpec:
    return decoder_spec(config, ARCHITECTURE, windows=windows_by_type(config), attention_bias=True)
