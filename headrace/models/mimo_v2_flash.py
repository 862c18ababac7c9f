"""MiMo-V2-Flash: keys of another width than values, layers with a window that have more KV heads and sinks, a third of each
head rotated, and values that are scaled.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import PretrainedConfig

from headrace.errors import ConfigError
from headrace.models.decoder import Decoder, DecoderLayer, SelfAttention
from headrace.models.family import Family
from headrace.models.hf_config import attention_specs, decoder_spec, per_layer, required, uniform, windows_by_type
from headrace.models.moe_config import experts_of, mixed_specs, number
from headrace.models.names import decoder_names
from headrace.spec import AttentionSpec, ModelSpec, MoeSpec
from headrace.weights.names import NameTable

ARCHITECTURE = "MiMoV2FlashForCausalLM"
_ROTATED = 0.334
"""Of a head's channels, where a config does not say."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MimoSpec(ModelSpec):
    value_scale: float
    """What values are multiplied by."""


class MimoAttention(SelfAttention):
    def __init__(self, model: ModelSpec, spec: AttentionSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(model, spec, dtype, device)
        if not isinstance(model, MimoSpec):
            raise TypeError(f"a layer of MiMo is built from a MimoSpec, not from a {type(model).__name__}")
        self.v_factor = model.value_scale


class MimoLayer(DecoderLayer):
    attention_class = MimoAttention


class MimoDecoder(Decoder):
    layer_class = MimoLayer


def model_spec(config: PretrainedConfig) -> MimoSpec:
    windows = windows_by_type(config)
    layers = tuple(
        layer if layer.window is None else _with_window(config, layer)
        for layer in attention_specs(config, windows=windows, partial_rotary=_ROTATED)
    )
    moe = MoeSpec(
        **experts_of(config, "n_routed_experts", "num_experts_per_tok"),
        scoring="sigmoid",
        correction_bias=True,
        num_groups=required(config, "n_group"),
        top_groups=required(config, "topk_group"),
        group_score="top2",
        normalize=bool(uniform(config, "norm_topk_prob", True)),
        routed_scale=number(config, "routed_scaling_factor", 1.0),
    )
    kinds = per_layer(config, "mlp_layer_types", "sparse")
    for layer, kind in enumerate(kinds):
        if kind not in ("dense", "sparse"):
            raise ConfigError(f"layer {layer}: mlp_layer_types {kind!r} is neither dense nor sparse", "mlp_layer_types")
    spec = decoder_spec(
        config,
        ARCHITECTURE,
        layers,
        mixed_specs(config, moe, lambda layer: kinds[layer] == "sparse"),
        reads=("partial_rotary_factor",),
        kind=MimoSpec,
        attention_bias=bool(uniform(config, "attention_bias", False)),
        value_scale=number(config, "attention_value_scale", 1.0),
    )
    return spec  # type: ignore[return-value]


def _with_window(config: PretrainedConfig, layer: AttentionSpec) -> AttentionSpec:
    """A layer with a window has sinks and, if the config does not say, twice the KV heads."""
    heads: Any = getattr(config, "swa_num_key_value_heads", None) or 2 * layer.num_kv_heads
    for name, usual in (("swa_head_dim", layer.head_dim), ("swa_v_head_dim", layer.v_head_dim)):
        if getattr(config, name, None) not in (None, usual):
            raise ConfigError(f"layer {layer.layer}: {name} {getattr(config, name)!r} is not the {usual} of other layers", name)
    return dataclasses.replace(layer, num_kv_heads=heads, sinks=True)


def names(model: Decoder) -> NameTable:
    """Sinks may have a name of their own; what predicts tokens further on is not part of the decoder."""
    table = decoder_names(model, ignorable=(r"model\.mtp\..*",))
    for layer in model.spec.layers:
        if layer.sinks:
            here = f"layers.{layer.layer}.self_attn"
            table.instead(f"model.{here}.attention_sink_bias", f"{here}.attention.sinks")
    return table


FAMILY = Family(
    architectures=(ARCHITECTURE,), model_types=("mimo_v2_flash",), model_spec=model_spec, decoder=MimoDecoder, names=names
)
