"""Llama 2 and 3, and what is built like them (SmolLM2 among others): biases where the config asks for them."""

from __future__ import annotations

from transformers import PretrainedConfig

from headrace.models.hf_config import decoder_spec, required, uniform
from headrace.spec import ModelSpec

ARCHITECTURE = "LlamaForCausalLM"
MODEL_TYPE = "llama"


def model_spec(config: PretrainedConfig) -> ModelSpec:
    bias = bool(uniform(config, "attention_bias", False))
    return decoder_spec(
        config,
        ARCHITECTURE,
        windows=[None] * required(config, "num_hidden_layers"),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=bool(uniform(config, "mlp_bias", False)),
    )
