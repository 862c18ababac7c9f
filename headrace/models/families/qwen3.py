"""Qwen3: q and k are normed a head, biases only where the config asks; some layers may have a sliding window."""

from __future__ import annotations

from headrace.model_spec import ModelSpec
from headrace.models.family import Family
from headrace.models.hf_config import HFConfig, attention_biases, attention_specs, decoder_spec, dense_specs, windows_by_type

ARCHITECTURE = "Qwen3ForCausalLM"


def model_spec(config: HFConfig) -> ModelSpec:
    return decoder_spec(
        config,
        ARCHITECTURE,
        attention_specs(config, windows=windows_by_type(config)),
        dense_specs(config),
        qk_norm=True,
        **attention_biases(config),
    )


FAMILY = Family(model_spec=model_spec)
