"""Llama 2 and 3, and what is built like them (SmolLM2 among others): biases where the config asks for them."""

from __future__ import annotations

from headrace.model_spec import ModelSpec
from headrace.models.family import Family
from headrace.models.hf_config import HFConfig, attention_biases, attention_specs, decoder_spec, dense_specs, uniform

ARCHITECTURE = "LlamaForCausalLM"


def model_spec(config: HFConfig) -> ModelSpec:
    return decoder_spec(
        config,
        ARCHITECTURE,
        attention_specs(config),
        dense_specs(config, bias=bool(uniform(config, "mlp_bias", False))),
        **attention_biases(config),
    )


FAMILY = Family(model_spec=model_spec)
