"""Qwen3: q and k are normed a head, biases only where the config asks; some layers may have a sliding window."""

from __future__ import annotations

from transformers import PretrainedConfig

from headrace.models.family import Family
from headrace.models.hf_config import attention_specs, decoder_spec, dense_specs, uniform, windows_by_type
from headrace.spec import ModelSpec

ARCHITECTURE = "Qwen3ForCausalLM"


def model_spec(config: PretrainedConfig) -> ModelSpec:
    bias = bool(uniform(config, "attention_bias", False))
    return decoder_spec(
        config,
        ARCHITECTURE,
        attention_specs(config, windows=windows_by_type(config)),
        dense_specs(config),
        attention_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )


FAMILY = Family(architectures=(ARCHITECTURE,), model_types=("qwen3",), model_spec=model_spec)
