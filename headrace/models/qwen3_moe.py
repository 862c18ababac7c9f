"""Qwen3-MoE: Qwen3 with mixtures of experts in place of the MLP, in all layers or in some."""

from __future__ import annotations

from headrace.errors import ConfigError
from headrace.model_spec import ModelSpec, MoeSpec
from headrace.models.family import Family
from headrace.models.hf_config import HFConfig, attention_biases, attention_specs, decoder_spec, per_layer, required
from headrace.models.moe_config import experts_of, mixed_specs

ARCHITECTURE = "Qwen3MoeForCausalLM"


def model_spec(config: HFConfig) -> ModelSpec:
    layers = attention_specs(config, windows=per_layer(config, "sliding_window"))
    moe = MoeSpec(**experts_of(config, "num_experts", "num_experts_per_tok"), normalize=bool(config.norm_topk_prob))
    dense, step = getattr(config, "mlp_only_layers", None) or [], required(config, "decoder_sparse_step")
    if strangers := [layer for layer in dense if layer not in range(len(layers))]:
        raise ConfigError(f"mlp_only_layers: there is no layer {strangers[0]}", "mlp_only_layers")
    mlps = mixed_specs(config, moe, lambda layer: layer not in dense and (layer + 1) % step == 0)
    return decoder_spec(config, ARCHITECTURE, layers, mlps, qk_norm=True, **attention_biases(config))


FAMILY = Family(architectures=(ARCHITECTURE,), model_types=("qwen3_moe",), model_spec=model_spec)
