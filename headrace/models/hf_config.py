"""Reads Hugging Face configurations layer by layer, and refuses unsupported fields by name."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from headrace.errors import ConfigError, ContradictionError
from headrace.kernels.activation import ACTIVATIONS
from headrace.layers.rotary import frequencies
from headrace.model_spec import AttentionSpec, BlockSpec, DenseSpec, MlpSpec, ModelSpec, RopeSpec
from headrace.model_spec.integers import MAX_INTEGER, is_integer, is_number
from headrace.options import shown
from headrace.sources.plain_config import PlainConfig

INDEXED_TYPES = ("indexed_attention", "deepseek_sparse_attention", "minimax_m3_sparse")
"""Layer types whose tokens attend to the keys that an indexer chooses; the second is a former name of the first."""
HFConfig = Any
"""A Hugging Face configuration: transformers' class for it, or a ``PlainConfig``."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_chunk_size": (None,),
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "attn_output_gate": (None, False),
    "clip_qkv": (None,),
    "embedding_multiplier": (None, 1),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "no_rope_layers": (None, 1),
    "partial_rotary_factor": (None, 1),
    "pretraining_tp": (None, 0, 1),
    "residual_multiplier": (None, 1),
    "rope_interleaved": (None, False),
    "use_bidirectional_attention": (None, False),
    "use_mrope": (None, False),
}
"""Fields that change a decoder's computation -> the values at which they have no effect."""


def text_part(config: HFConfig) -> HFConfig:
    """Returns the text decoder's configuration within that of a multimodal model; a text model's is returned unchanged."""
    text: HFConfig = config.get_text_config(decoder=True)
    if text is config:
        return config
    text = copy.copy(text)
    text.tie_word_embeddings = config.tie_word_embeddings
    if getattr(text, "dtype", None) is None:
        text.dtype = getattr(config, "dtype", None)
    return text


def _num_layers(config: HFConfig) -> int:
    return _checked("config", "num_hidden_layers", getattr(config, "num_hidden_layers", None))


def _checked(where: str, name: str, value: Any) -> int:
    """Raises ContradictionError for a value that is wrong in any model, and ConfigError for a missing one, which another
    implementation may not need."""
    if value is None:
        raise ConfigError(f"{where}: {name} must be a positive whole number, not None", name)
    if not is_integer(value, 1):
        raise ContradictionError(f"{where}: {name} must be a positive whole number, not {value!r}", name)
    return value


def whole(config: HFConfig, name: str, default: int | None = None, *, least: int = 0, most: int = MAX_INTEGER) -> int:
    """Reads an integer from ``least`` to ``most``, the same for every layer; a missing one is ``default``.

    Raises:
        ContradictionError: the value is not such integer.
    """
    value = uniform(config, name, default)
    if not is_integer(value, least) or value > most:
        raise ContradictionError(f"config: {name} must be a whole number from {least} to {most}, not {value!r}", name)
    return value


def required(config: HFConfig, name: str) -> int:
    """Reads a required positive integer, the same for every layer."""
    return _checked("config", name, uniform(config, name))


def per_layer(config: HFConfig, name: str, default: Any = None) -> list[Any]:
    """Reads the values of a field, one for each layer.

    They come from ``per_layer_config``, from a list named ``name`` or ``name + "_list"``, or from one value for all;
    None where neither is given becomes ``default`` (or its entry for the layer, if it is a list).

    Raises:
        ContradictionError: a list has not as many entries as there are layers, or the config says two things of a layer.
    """
    layers = _num_layers(config)
    listed = _list_of(config, name, layers)
    values = listed or [getattr(one, name, None) for one in _layer_configs(config, layers)]
    for layer, value in enumerate(values):
        if isinstance(value, list | tuple):
            if not value:
                values[layer] = None
                continue
            _check_length(name, value, layers, name)
            values[layer] = value[layer]
    defaults = default if isinstance(default, list) else [default] * layers
    return [defaults[layer] if value is None else value for layer, value in enumerate(values)]


def _list_of(config: HFConfig, name: str, layers: int) -> list[Any] | None:
    """``name + "_list"``, one value a layer; None: there is none.

    Raises:
        ContradictionError: it is not a list of one entry a layer; or a layer is said to be something else beside it, by
            ``per_layer_config`` or, where the list has null for it, by the one value for all.
    """
    field = name + "_list"
    # ``per_layer_config`` omits values that equal the common one.
    uneven = getattr(getattr(config, "_heterogeneity_spec", None), "explicit_per_layer_attributes", ())
    if field in uneven:
        raise ContradictionError(f"per_layer_config gives {field}, which is of all layers", "per_layer_config")
    listed = getattr(config, field, None)
    if listed is None:
        return None
    if not isinstance(listed, list | tuple):
        raise ContradictionError(f"config: {field} must be a list of one entry for each layer, not {listed!r}", name)
    _check_length(field, listed, layers, name)
    if name in uneven:
        raise ContradictionError(f"both {field} and per_layer_config give {name}: one of them must go", "per_layer_config")
    common = getattr(config, name, None)
    if None in listed and common is not None:
        raise ContradictionError(
            f"layer {listed.index(None)}: {field} says null and {name} says {common!r}: the list must say each layer's",
            name,
        )
    return list(listed)


def _check_length(field: str, listed: Sequence[Any], layers: int, name: str) -> None:
    """Raises ContradictionError if a list has not an entry for each layer; names the first layer at fault."""
    if len(listed) != layers:
        fault = f"layer {len(listed)} has none" if len(listed) < layers else f"there is no layer {layers}"
        raise ContradictionError(f"config: {field} has {len(listed)} entries for {layers} layers: {fault}", name)


def _layer_configs(config: HFConfig, layers: int) -> list[HFConfig]:
    if not getattr(config, "is_heterogeneous", False):
        return [config] * layers
    configs = list(config.per_layer_config)
    for layer, one in enumerate(configs):
        if getattr(one, "skip", None):
            raise ConfigError(f"layer {layer}: skip {one.skip!r} in per_layer_config is not supported", "per_layer_config")
    return configs


def uniform(config: HFConfig, name: str, default: Any = None) -> Any:
    """Reads a field that must be the same in every layer.

    Raises:
        ConfigError: a layer differs; names it.
    """
    values = per_layer(config, name, default)
    for layer, value in enumerate(values):
        if value != values[0]:
            raise ConfigError(f"layer {layer}: {name} {value!r} differs from layer 0's, which is not supported", name)
    return values[0]


def refuse_unknown_maths(config: HFConfig, reads: Collection[str] = ()) -> None:
    """Raises ConfigError for fields that change what the model computes and that the family does not read.

    Args:
        reads: those of ``NEUTRAL`` that the family does read.
    """
    for name, neutral in NEUTRAL.items():
        if name in reads:
            continue
        for layer, value in enumerate(per_layer(config, name)):
            if value not in neutral:
                raise ConfigError(f"layer {layer}: {name} {value!r} is not supported", name)


def layer_types(config: HFConfig) -> list[str | None]:
    """Returns each layer's type. A config with a window and without types gets those that its class in transformers fills in,
    None where that fills in none."""
    types, windows = per_layer(config, "layer_types"), per_layer(config, "sliding_window")
    if any(types) or not any(windows) or isinstance(config, PlainConfig):  # A plain config has the defaults of its class.
        return types
    fields = {name: value for name, value in config.to_dict().items() if name != "layer_types"}
    return per_layer(type(config).from_dict(fields), "layer_types")


def rope_specs(config: HFConfig, *, sections: bool = False) -> list[RopeSpec]:
    """Each layer's rotary embedding, in transformers 5's manner (``rope_parameters``, one set or one for each of the
    ``layer_types``) or the older (``rope_theta``, ``rope_scaling``).

    Args:
        sections: the family has M-RoPE; others refuse it.

    Raises:
        ConfigError: it is not of a kind we know, or a layer's type has none; the message names the layer.
    """
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if not any(isinstance(value, dict) for value in parameters.values()):
        return [_rope_spec(config, parameters, "rope_parameters", sections)] * _num_layers(config)
    by_type: dict[str, RopeSpec] = {}
    specs = []
    for layer, kind in enumerate(kind or "full_attention" for kind in layer_types(config)):
        if not isinstance(parameters.get(kind), dict):
            raise ConfigError(f"layer {layer}: rope_parameters has no set for {kind}", "rope_parameters")
        if kind not in by_type:
            by_type[kind] = _rope_spec(config, parameters[kind], f"rope_parameters.{kind}", sections)
        specs.append(by_type[kind])
    return specs


def _rope_spec(config: HFConfig, fields: Mapping[str, Any], where: str, sections: bool) -> RopeSpec:
    parameters = {name: value for name, value in fields.items() if value is not None}
    kind = parameters.pop("rope_type", parameters.pop("type", "default"))
    parameters.pop("type", None)
    usual = getattr(config, "default_theta", None)
    theta = parameters.pop("rope_theta", None) or getattr(config, "rope_theta", None)
    theta = theta or (usual if isinstance(usual, int | float) else 10000.0)
    mrope = parameters.pop("mrope_section", None) or ()
    interleaved = bool(parameters.pop("mrope_interleaved", False))
    if mrope and not sections:
        raise ConfigError(f"{where}.mrope_section is not supported", "rope_parameters")
    if mrope and (len(mrope) != 3 or not all(is_integer(size, 1) for size in mrope)):
        raise ContradictionError(
            f"{where}.mrope_section must be three whole numbers above 0, not {shown(mrope)}", "rope_parameters"
        )
    if kind == "mrope" and mrope:
        kind = "default"
    parameters.setdefault("max_position_embeddings", required(config, "max_position_embeddings"))
    if kind in ("llama3", "yarn"):
        parameters.setdefault("original_max_position_embeddings", parameters["max_position_embeddings"])
    if not is_number(theta) or not theta > 1:
        raise ConfigError(f"{where}.rope_theta must be a number above 1, not {shown(theta)}", "rope_parameters")
    rope = RopeSpec(float(theta), kind, parameters, sections=tuple(mrope), interleaved=interleaved)
    factors = parameters.get("short_factor")
    frequencies(rope, 2 * len(factors) if isinstance(factors, list) and factors else 2)
    return rope


def max_position(config: HFConfig, layers: Sequence[AttentionSpec]) -> int:
    """Returns the longest context: the config's, extended where all layers' rotary embeddings extend it,
    and cut to where they change their factors."""
    configured = required(config, "max_position_embeddings")
    return min((_stretched(configured, layer.rope) for layer in layers if layer.rope is not None), default=configured)


def _stretched(configured: int, rope: RopeSpec) -> int:
    factor = rope.parameters.get("factor") or 1
    if rope.kind in ("linear", "dynamic"):
        return int(configured * factor)
    if rope.kind == "longrope":
        return min(configured, int(rope.parameters["original_max_position_embeddings"]))
    if rope.kind == "yarn":
        return max(configured, int(rope.parameters["original_max_position_embeddings"] * factor))
    return configured


def windows_by_type(config: HFConfig) -> list[int | None]:
    """Returns each layer's window, for families whose ``layer_types`` say which layers have one.

    Raises:
        ConfigError: the window is missing; the message names the layer.
    """
    types, windows = layer_types(config), per_layer(config, "sliding_window")
    result: list[int | None] = []
    for layer, (kind, window) in enumerate(zip(types, windows, strict=True)):
        if kind == "sliding_attention" and window is None:
            raise ConfigError(f"layer {layer}: sliding_attention without a sliding_window", "sliding_window")
        result.append(window if kind == "sliding_attention" else None)
    return result


def hybrid_mixers(config: HFConfig, state_type: str) -> tuple[BlockSpec, ...]:
    """Returns the mixer of each layer of the model: a state layer where ``layer_types`` says ``state_type``, else attention."""
    mixers: list[BlockSpec] = []
    counts = [0, 0]
    for kind in per_layer(config, "layer_types"):
        is_state = kind == state_type
        mixers.append(BlockSpec(state=counts[True]) if is_state else BlockSpec(attention=counts[False]))
        counts[is_state] += 1
    return tuple(mixers)


def attending(layers: Sequence[AttentionSpec], mixers: Sequence[BlockSpec]) -> tuple[AttentionSpec, ...]:
    """Returns the specs of the layers that attend, numbered anew. ``layers``: one for every layer of the model."""
    return tuple(
        dataclasses.replace(spec, layer=block.attention)
        for spec, block in zip(layers, mixers, strict=True)
        if block.attention is not None
    )


_SEEN = {"full_attention": "no window", "sliding_attention": "a window", "chunked_attention": "chunks"}
"""Layer types without states and indexers -> what limits the keys that a token sees."""


def _check_windows(config: HFConfig, layers: Sequence[AttentionSpec], mixers: Sequence[BlockSpec]) -> None:
    """Refuses windows that a config asks for and the layers do not have, or do not ask for and have: a family reads
    ``layer_types`` and ``sliding_window`` as transformers' module of it does, which may be not at all.

    Raises:
        ConfigError: a layer is not of the type that the config says; the message names it.
    """
    types, windows = layer_types(config), per_layer(config, "sliding_window")
    owners = [index for index, block in enumerate(mixers) if block.attention is not None] if mixers else range(len(types))
    for layer, index in zip(layers, owners, strict=True):
        here, kind, window = f"layer {index}", types[index], windows[index]
        if kind == "hybrid" and mixers and mixers[index].state is not None:
            kind = "full_attention"
        if kind in INDEXED_TYPES and layer.indexer is not None:
            continue  # A window is that of layers of another type.
        meant = _SEEN.get(kind or "full_attention")
        if meant is None:
            raise ConfigError(f"{here}: layer_types {kind!r} is not supported", "layer_types")
        has = "no window" if layer.window is None else "chunks" if layer.chunked else "a window"
        if kind is not None and meant != has:
            raise ConfigError(f"{here}: layer_types {kind!r}, but such layers of this family have {has}", "layer_types")
        inert = window is None or (isinstance(window, int) and window >= required(config, "max_position_embeddings"))
        if kind is None and layer.window is None and not inert:
            raise ConfigError(f"{here}: sliding_window {window!r}, but such layers of this family have none", "sliding_window")


def attention_specs(
    config: HFConfig,
    *,
    windows: Sequence[int | None] | None = None,
    partial_rotary: float | None = None,
    sections: bool = False,
) -> tuple[AttentionSpec, ...]:
    """Returns the geometry of every layer. A family sets its own fields with ``dataclasses.replace``.

    Args:
        windows: each layer's; None: none has one.
        partial_rotary: the ``partial_rotary_factor`` of a family that rotates so much of a head's channels, where the config
            gives none; None: the family rotates all and refuses to do less.
        sections: as in ``rope_specs``.

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
    return tuple(
        AttentionSpec(
            layer=layer,
            num_heads=fields["num_attention_heads"][layer],
            num_kv_heads=fields["num_key_value_heads"][layer],
            head_dim=fields["head_dim"][layer],
            v_head_dim=fields["v_head_dim"][layer],
            scale=fields["head_dim"][layer] ** -0.5,
            rotary_dim=_rotary_dim(layer, fields["head_dim"][layer], rope, partial_rotary),
            rope=rope,
            window=None if windows is None else windows[layer],
        )
        for layer, rope in enumerate(rope_specs(config, sections=sections))
    )


def _share(layer: int, hidden: int, heads: Any) -> int | None:
    """Returns the default head_dim of a layer, or None."""
    return hidden // heads if isinstance(heads, int) and 0 < heads <= hidden else None


def _rotary_dim(layer: int, head_dim: int, rope: RopeSpec, partial: float | None) -> int:
    """Returns the number of rotated channels of a head."""
    share = rope.parameters.get("partial_rotary_factor", 1 if partial is None else partial)
    if share != 1 and partial is None:
        raise ConfigError(f"layer {layer}: partial_rotary_factor {share!r} is not supported", "rope_parameters")
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise ConfigError(f"layer {layer}: partial_rotary_factor {share!r} is not a share of a head", "rope_parameters")
    width = head_dim if rope.kind == "proportional" else int(head_dim * share)
    if rope.sections and 2 * sum(rope.sections) != width:
        raise ContradictionError(
            f"layer {layer}: mrope_section {list(rope.sections)} sums to {sum(rope.sections)}, not half of {width} channels",
            "rope_parameters",
        )
    if width % 2 or not width:
        what = f"head_dim {head_dim}" if width == head_dim else f"{share} of head_dim {head_dim}, which is {width},"
        raise ConfigError(f"layer {layer}: {what} is odd, which cannot be rotated", "head_dim")
    return width


def attention_biases(config: HFConfig, default: bool = False) -> dict[str, Any]:
    """Fields of a ModelSpec whose ``attention_bias`` covers q, k, v and o."""
    bias = bool(uniform(config, "attention_bias", default))
    return {"attention_bias": bias, "output_bias": bias}


def dense_specs(config: HFConfig, *, act: str = "hidden_act", bias: bool = False) -> tuple[DenseSpec, ...]:
    """Returns the gated MLP of every layer, with the layer's own ``intermediate_size``.

    Args:
        act: the field that names the activation.
    """
    names = per_layer(config, act, "silu")
    for layer, name in enumerate(names):
        if name not in ACTIVATIONS:
            raise ConfigError(
                f"layer {layer}: {act} {name!r} is not supported; supported are: {', '.join(ACTIVATIONS)}", "hidden_act"
            )
    widths = per_layer(config, "intermediate_size")
    return tuple(
        DenseSpec(_checked(f"layer {layer}", "intermediate_size", width), name, bias)
        for layer, (width, name) in enumerate(zip(widths, names, strict=True))
    )


def decoder_spec(
    config: HFConfig,
    architecture: str,
    layers: tuple[AttentionSpec, ...],
    mlps: Sequence[MlpSpec],
    *,
    reads: Collection[str] = (),
    kind: type[ModelSpec] = ModelSpec,
    **facts: Any,
) -> ModelSpec:
    """Builds the spec from the fields that all families share.

    Args:
        reads: fields of ``NEUTRAL`` that the family reads itself; the others are refused.
        kind: the class of the spec, for a family with facts of its own.
        facts: other fields of the spec.
    """
    refuse_unknown_maths(config, reads)
    _check_windows(config, layers, facts.get("mixers", ()))
    values: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": required(config, "vocab_size"),
        "hidden_size": required(config, "hidden_size"),
        "layers": layers,
        "mlps": tuple(mlps),
        "norm_eps": float(uniform(config, "rms_norm_eps", 1e-6)),
        "max_position": max_position(config, layers),
        "tie_word_embeddings": bool(getattr(config, "tie_word_embeddings", False)),
        "dtype": str(getattr(config, "dtype", None) or "float32").removeprefix("torch."),
    }
    return kind(**values | facts)
