"""MiMo-V2-Flash: keys of another width than values, layers with a window that have more KV heads and sinks, a third of each
head rotated, and values that are scaled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import cast

import torch

from headrace.errors import ConfigError
from headrace.model_spec import AttentionSpec, ModelSpec
from headrace.model_spec.integers import is_integer
from headrace.models.decoder import Decoder, DecoderAttention, DecoderLayer
from headrace.models.families.mimo_config import to_transformers_fields
from headrace.models.family import Family
from headrace.models.hf_config import HFConfig, attention_specs, decoder_spec, per_layer, required, uniform, windows_by_type
from headrace.models.moe_config import grouped_mixture, number, typed_specs
from headrace.models.names import decoder_names
from headrace.weights.names import NameTable

ARCHITECTURE = "MiMoV2FlashForCausalLM"
_ROTATED = 0.334
"""The default share of a head's channels that is rotated."""
_UNUSED = ("attention_chunk_size",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MimoSpec(ModelSpec):
    value_scale: float
    """The factor on values."""


class MimoAttention(DecoderAttention):
    def __init__(self, model: ModelSpec, spec: AttentionSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(model, spec, dtype, device)
        self.v_factor = cast(MimoSpec, model).value_scale


class MimoLayer(DecoderLayer):
    attention_class = MimoAttention


class MimoDecoder(Decoder):
    layer_class = MimoLayer


def model_spec(config: HFConfig) -> MimoSpec:
    config = to_transformers_fields(config)
    windows = windows_by_type(config)
    in_full = _flag(config, "add_full_attention_sink_bias", False)
    in_window = _flag(config, "add_swa_attention_sink_bias", True)
    layers = tuple(
        dataclasses.replace(layer, num_kv_heads=heads, sinks=in_full if layer.window is None else in_window)
        for layer, heads in _with_kv_heads(config, attention_specs(config, windows=windows, partial_rotary=_ROTATED))
    )
    moe = grouped_mixture(config, shared=False)
    return decoder_spec(  # type: ignore[return-value]
        config,
        ARCHITECTURE,
        layers,
        typed_specs(config, moe, "sparse"),
        reads=("partial_rotary_factor", *_UNUSED),
        kind=MimoSpec,
        attention_bias=bool(uniform(config, "attention_bias", False)),
        value_scale=number(config, "attention_value_scale", 1.0),
    )


def _flag(config: HFConfig, name: str, default: bool) -> bool:
    value = uniform(config, name, default)
    if not isinstance(value, bool):
        raise ConfigError(f"config: {name} must be true or false, not {value!r}", name)
    return value


def _with_kv_heads(config: HFConfig, layers: Sequence[AttentionSpec]) -> Iterator[tuple[AttentionSpec, int]]:
    """Each layer and its KV heads: its own number if it has one, else, where it has a window, that of layers with windows.

    That one is ``swa_num_key_value_heads``, or, if the config does not say, twice the number for all.
    """
    own, said = _own_counts(config), per_layer(config, "swa_num_key_value_heads")
    for layer, has_own, swa in zip(layers, own, said, strict=True):
        here = f"layer {layer.layer}"
        if layer.window is None:
            yield layer, layer.num_kv_heads
            continue
        for name, usual in (
            ("swa_num_attention_heads", layer.num_heads),
            ("swa_head_dim", layer.head_dim),
            ("swa_v_head_dim", layer.v_head_dim),
        ):
            if (value := uniform(config, name)) not in (None, usual):
                raise ConfigError(f"{here}: {name} {value!r} is not the {usual} of other layers", name)
        if swa is not None and not is_integer(swa, 1):
            raise ConfigError(
                f"{here}: swa_num_key_value_heads must be a positive whole number, not {swa!r}", "swa_num_key_value_heads"
            )
        if has_own:
            if swa not in (None, layer.num_kv_heads):
                raise ConfigError(
                    f"{here}: swa_num_key_value_heads {swa} contradicts its own num_key_value_heads {layer.num_kv_heads}",
                    "swa_num_key_value_heads",
                )
            yield layer, layer.num_kv_heads
            continue
        if swa is None and any(own):
            # transformers drops an override that equals the number for all, so this may be the layer's own or twice it.
            raise ConfigError(
                f"{here}: per_layer_config does not tell its num_key_value_heads from the {layer.num_kv_heads} of all layers; "
                "num_key_value_heads_list does",
                "num_key_value_heads",
            )
        yield layer, swa or 2 * layer.num_kv_heads


def _own_counts(config: HFConfig) -> list[bool]:
    """Returns which layers have their own ``num_key_value_heads``."""
    # Read from ``vars``, since attribute access raises for a field that layers override.
    count, layers = vars(config).get("num_key_value_heads"), required(config, "num_hidden_layers")
    if getattr(config, "num_key_value_heads_list", None) or isinstance(count, list | tuple):
        return [True] * layers
    if not getattr(config, "is_heterogeneous", False):
        return [False] * layers
    return [one.num_key_value_heads != count for one in config.per_layer_config]


def names(model: Decoder) -> NameTable:
    """Accepts another name for sinks, and ignores the layers for multi-token prediction."""
    table = decoder_names(model, ignorable=(r"model\.mtp\..*",))
    for layer in model.spec.layers:
        if layer.sinks:
            here = f"layers.{layer.layer}.self_attn"
            table.instead(f"model.{here}.attention_sink_bias", f"{here}.attention.sinks")
    return table


FAMILY = Family(
    model_spec=model_spec,
    decoder=MimoDecoder,
    names=names,
    unused=_UNUSED,
    to_transformers_fields=to_transformers_fields,
)
