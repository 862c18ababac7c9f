"""Reading Hugging Face configurations, layer by layer; what cannot be honoured is refused by its name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig

from headrace.errors import ConfigError
from headrace.layers.mlp import ACTIVATIONS
from headrace.layers.rotary import frequencies
from headrace.spec import AttentionSpec, ModelSpec, RopeSpec

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_chunk_size": (None,),
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "embedding_multiplier": (None, 1),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "no_rope_layers": (None, 1),
    "partial_rotary_factor": (None, 1),
    "pretraining_tp": (None, 0, 1),
    "quantization_config": (None,),
    "residual_multiplier": (None, 1),
    "rope_interleaved": (None, False),
    "use_mrope": (None, False),
}
"""Fields that change the maths of a decoder -> the values at which they do not."""


def _num_layers(config: PretrainedConfig) -> int:
    return _checked("config", "num_hidden_layers", getattr(config, "num_hidden_layers", None))


def _checked(where: str, name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{where}: {name} must be a positive whole number, not {value!r}", name)
    return value


def required(config: PretrainedConfig, name: str) -> int:
    """A positive whole number that the config must have, the same for every layer."""
    return _checked("config", name, uniform(config, name))


def per_layer(config: PretrainedConfig, name: str, default: Any = None) -> list[Any]:
    """The values of a field, one a layer.

    They come from ``per_layer_config``, from a list named ``name`` or ``name + "_list"``, or from one value for all;
    None where neither is given becomes ``default`` (or its entry for the layer, if it is a list).

    Raises:
        ConfigError: a list has not as many entries as there are layers.
    """
    layers = _num_layers(config)
    values = [getattr(one, name + "_list", None) or getattr(one, name, None) for one in _layer_configs(config, layers)]
    for layer, value in enumerate(values):
        if isinstance(value, list | tuple):
            if not value:
                values[layer] = None
                continue
            if len(value) != layers:
                raise ConfigError(f"config: {name} has {len(value)} entries for {layers} layers", name)
            values[layer] = value[layer]
    defaults = default if isinstance(default, list) else [default] * layers
    return [defaults[layer] if value is None else value for layer, value in enumerate(values)]


def _layer_configs(config: PretrainedConfig, layers: int) -> list[PretrainedConfig]:
    if not getattr(config, "is_heterogeneous", False):
        return [config] * layers
    configs = list(config.per_layer_config)
    for layer, one in enumerate(configs):
        if getattr(one, "skip", None):
            raise ConfigError(f"layer {layer}: skip {one.skip!r} in per_layer_config is not supported", "per_layer_config")
    return configs


def uniform(config: PretrainedConfig, name: str, default: Any = None) -> Any:
    """A field that must be the same in every layer.

    Raises:
        ConfigError: a layer has its own; the message names it.
    """
    values = per_layer(config, name, default)
    for layer, value in enumerate(values):
        if value != values[0]:
            raise ConfigError(f"layer {layer}: {name} {value!r} differs from layer 0's, which is not supported", name)
    return values[0]


def refuse_unknown_maths(config: PretrainedConfig) -> None:
    """Raises ConfigError for fields that change what the model computes and that nobody here reads."""
    for name, neutral in _NEUTRAL.items():
        for layer, value in enumerate(per_layer(config, name)):
            if value not in neutral:
                raise ConfigError(f"layer {layer}: {name} {value!r} is not supported", name)


def rope_spec(config: PretrainedConfig) -> RopeSpec:
    """The rotary embedding, in transformers 5's manner (``rope_parameters``) or the older (``rope_theta``, ``rope_scaling``).

    Raises:
        ConfigError: it is not one for all layers, or not of a kind we know.
    """
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [key for key, value in given.items() if isinstance(value, dict)]
    if nested:
        raise ConfigError(f"rope_parameters: a set for each of {', '.join(nested)} is not supported", "rope_parameters")
    parameters = {name: value for name, value in given.items() if value is not None}
    kind = parameters.pop("rope_type", parameters.pop("type", "default"))
    parameters.pop("type", None)
    theta = parameters.pop("rope_theta", None) or getattr(config, "rope_theta", None) or 10000.0
    if parameters.get("partial_rotary_factor", 1) != 1:
        raise ConfigError("rope_parameters.partial_rotary_factor other than 1 is not supported", "rope_parameters")
    if parameters.get("mrope_section"):
        raise ConfigError("rope_parameters.mrope_section is not supported", "rope_parameters")
    parameters.setdefault("max_position_embeddings", required(config, "max_position_embeddings"))
    if kind in ("llama3", "yarn"):
        parameters.setdefault("original_max_position_embeddings", parameters["max_position_embeddings"])
    if not isinstance(theta, int | float) or not theta > 1:
        raise ConfigError(f"rope_parameters.rope_theta must be a number above 1, not {theta!r}", "rope_parameters")
    rope = RopeSpec(float(theta), kind, parameters)
    frequencies(rope, 2)
    return rope


def max_position(config: PretrainedConfig, rope: RopeSpec) -> int:
    """The longest context: what the config says, stretched where its rotary embedding stretches it."""
    given = required(config, "max_position_embeddings")
    factor = rope.parameters.get("factor") or 1
    if rope.kind in ("linear", "dynamic"):
        return int(given * factor)
    if rope.kind == "yarn":
        return max(given, int(rope.parameters["original_max_position_embeddings"] * factor))
    return given


def windows_by_type(config: PretrainedConfig) -> list[int | None]:
    """Each layer's window where ``layer_types`` says which layers have one.

    Raises:
        ConfigError: a type is unknown, or the window is missing; the message names the layer.
    """
    types = per_layer(config, "layer_types", "full_attention")
    windows = per_layer(config, "sliding_window")
    result: list[int | None] = []
    for layer, (kind, window) in enumerate(zip(types, windows, strict=True)):
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(f"layer {layer}: layer_types {kind!r} is not supported", "layer_types")
        if kind == "sliding_attention" and window is None:
            raise ConfigError(f"layer {layer}: sliding_attention without a sliding_window", "sliding_window")
        result.append(window if kind == "sliding_attention" else None)
    return result


def attention_specs(config: PretrainedConfig, windows: Sequence[int | None]) -> tuple[AttentionSpec, ...]:
    """The geometry of every layer, each from its own numbers.

    Raises:
        ConfigError: a layer's numbers do not fit together; the message names it.
    """
    hidden = required(config, "hidden_size")
    heads = per_layer(config, "num_attention_heads")
    fields = {
        "num_attention_heads": heads,
        "num_key_value_heads": per_layer(config, "num_key_value_heads", heads),
        "head_dim": per_layer(config, "head_dim", [_share(layer, hidden, count) for layer, count in enumerate(heads)]),
    }
    fields["v_head_dim"] = per_layer(config, "v_head_dim", fields["head_dim"])
    for name, values in fields.items():
        for layer, value in enumerate(values):
            _checked(f"layer {layer}", name, value)
    for layer, width in enumerate(fields["head_dim"]):
        if width % 2:
            raise ConfigError(f"layer {layer}: head_dim {width} is odd, which cannot be rotated", "head_dim")
    return tuple(
        AttentionSpec(
            layer=layer,
            num_heads=fields["num_attention_heads"][layer],
            num_kv_heads=fields["num_key_value_heads"][layer],
            head_dim=fields["head_dim"][layer],
            v_head_dim=fields["v_head_dim"][layer],
            scale=fields["head_dim"][layer] ** -0.5,
            rotary_dim=fields["head_dim"][layer],
            window=window,
        )
        for layer, window in enumerate(windows)
    )


def _share(layer: int, hidden: int, heads: Any) -> int | None:
    """The head_dim of a layer that gives none: None where it cannot be had."""
    return hidden // heads if isinstance(heads, int) and 0 < heads <= hidden else None


def decoder_spec(
    config: PretrainedConfig,
    architecture: str,
    windows: Sequence[int | None],
    *,
    attention_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> ModelSpec:
    """What every family has in common.

    Args:
        windows: each layer's window. The other arguments are ModelSpec's fields in which families differ.
    """
    refuse_unknown_maths(config)
    hidden_act = uniform(config, "hidden_act", "silu")
    if hidden_act not in ACTIVATIONS:
        raise ConfigError(f"hidden_act {hidden_act!r} is not supported; supported are: {', '.join(ACTIVATIONS)}", "hidden_act")
    rope = rope_spec(config)
    return ModelSpec(
        architecture=architecture,
        vocab_size=required(config, "vocab_size"),
        hidden_size=required(config, "hidden_size"),
        intermediate_size=required(config, "intermediate_size"),
        layers=attention_specs(config, windows),
        rope=rope,
        norm_eps=float(uniform(config, "rms_norm_eps", 1e-6)),
        max_position=max_position(config, rope),
        hidden_act=hidden_act,
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        attention_bias=attention_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        dtype=str(getattr(config, "dtype", None) or "float32").removeprefix("torch."),
    )
