"""Llama 2 and 3, and what is built like them (SmolLM2 among others): biases where the config asks for them."""

from __future__ import annotations

from transformers import PretrainedConfig

from headrace.models.family import Family
from headrace.models.hf_config import attention_specs, decoder_spec, dense_specs, uniform
from headrace.spec import ModelSpec

ARCHITECTURE = "LlamaForCausalLM"


def model_spec(config: PretrainedConfig) -> ModelSpec:
    bias = bool(uniform(config, "attention_bias", False))
    return decoder_spec(
        config,
        ARCHITECTURE,
        attention_specs(config),
        dense_specs(config, bias=bool(uniform(config, "mlp_bias", False))),
        attention_bias=bias,
        output_bias=bias,
    )


FAMILY = Family(architectures=(ARCHITECTURE,), model_types=("llama",), model_spec=model_spec)
