"""Qwen3-MoE: Qwen3 with mixtures of experts in place of the MLP, in all layers or in some."""

from __future__ import annotations

from headrace.model_spec import ModelSpec, MoeSpec
from headrace.models.family import Family
from headrace.models.hf_config import HFConfig, attention_biases, attention_specs, decoder_spec, per_layer
from headrace.models.moe_config import experts_of, stepped_specs

ARCHITECTURE = "Qwen3MoeForCausalLM"


def model_spec(config: HFConfig) -> ModelSpec:
    layers = attention_specs(config, windows=per_layer(config, "sliding_window"))
    moe = MoeSpec(**experts_of(config, "num_experts", "num_experts_per_tok"), normalize=bool(config.norm_topk_prob))
    return decoder_spec(config, ARCHITECTURE, layers, stepped_specs(config, moe), qk_norm=True, **attention_biases(config))


FAMILY = Family(model_spec=model_spec)
