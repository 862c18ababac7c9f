"""Qwen3: q and k are normed a head, biases only where the config asks; some layers may have a sliding window."""

from __future__ import annotations

from transformers import PretrainedConfig

from headrace.models.hf_config import decoder_spec, uniform, windows_by_type
from headrace.spec import ModelSpec

ARCHITECTURE = "Qwen3ForCausalLM"
MODEL_TYPE = "qwen3"


def model_spec(config: PretrainedConfig) -> ModelSpec:
    bias = bool(uniform(config, "attention_bias", False))
    return decoder_spec(
        config,
        ARCHITECTURE,
        windows=windows_by_type(config),
        attention_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )
