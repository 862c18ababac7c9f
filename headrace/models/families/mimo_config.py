"""Rewrites the published config.json of MiMo-V2-Flash into the fields transformers reads.

transformers keeps most published fields as attributes that nothing reads, and uses its own defaults instead. A config may
have both if they agree; a contradiction is refused.
"""

from __future__ import annotations

import copy
from typing import Any

from headrace.errors import ConfigError
from headrace.models.hf_config import HFConfig, required
from headrace.models.moe_config import must_be, number

_KINDS = (
    ("hybrid_layer_pattern", "layer_types", ("full_attention", "sliding_attention")),
    ("moe_layer_freq", "mlp_layer_types", ("dense", "sparse")),
)
"""(published list of 0 and 1, one for each layer; transformers' field; what 0 and 1 mean there)."""
_ROPES = {
    "full_attention": {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor"},
    "sliding_attention": {"rope_theta": "swa_rope_theta", "partial_rotary_factor": "partial_rotary_factor"},
}
"""Kind of layer -> field in its ``rope_parameters`` -> published field."""


def to_transformers_fields(config: HFConfig) -> HFConfig:
    """Returns a copy of a config whose ``layer_types``, ``mlp_layer_types``, ``rms_norm_eps``, ``rope_parameters`` and
    ``sliding_window`` have the values of the published fields. A config without those is copied unchanged.

    A field of transformers at its default counts as missing, since its config does not record which fields the file had.

    Raises:
        ConfigError: a published field is malformed or unsupported, or contradicts transformers' field; names it, and the layer
            if it is per layer.
    """
    must_be(config, "scoring_func", "sigmoid", None)
    must_be(config, "topk_method", "noaux_tc", None)
    must_be(config, "n_shared_experts", None, 0)
    must_be(config, "use_qk_norm", None, False)
    if _given(config, "hybrid_layer_pattern") is None:
        must_be(config, "hybrid_block_size", None)
    default_config = type(config)(num_hidden_layers=required(config, "num_hidden_layers"))
    translated = copy.copy(config)
    for field, word, kinds in _KINDS:
        if _given(config, field) is not None:
            setattr(translated, word, _types(config, default_config, field, word, kinds))
    if _given(config, "layernorm_epsilon") is not None:
        translated.rms_norm_eps = _agreed(
            "layernorm_epsilon",
            number(config, "layernorm_epsilon", 0.0),
            "rms_norm_eps",
            _given(config, "rms_norm_eps"),
            _given(default_config, "rms_norm_eps"),
        )
    published = any(_given(config, field) is not None for words in _ROPES.values() for field in words.values())
    # A rope_scaling of null, which transformers reads as rope_parameters, takes its defaults away.
    if published or _given(config, "rope_parameters") is None:
        translated.rope_parameters = _ropes(config, default_config)
    if _given(config, "sliding_window_size") is not None:
        # The published size leaves out the token itself.
        translated.sliding_window = required(config, "sliding_window_size") + 1
    return translated


def _given(config: HFConfig, name: str) -> Any:
    """Returns a field, which may be a list; None where it is missing."""
    values = [getattr(one, name, None) for one in (config.per_layer_config if config.is_heterogeneous else [config])]
    for layer, value in enumerate(values):
        if value != values[0]:
            raise ConfigError(f"layer {layer}: {name} {value!r} in per_layer_config is not supported", name)
    return values[0]


def _types(config: HFConfig, usual: HFConfig, field: str, word: str, kinds: tuple[str, str]) -> list[str]:
    """Each layer's kind, of a list of 0 and 1."""
    pattern, layers = _given(config, field), required(config, "num_hidden_layers")
    if not isinstance(pattern, list | tuple) or len(pattern) != layers:
        count = f"{len(pattern)} entries" if isinstance(pattern, list | tuple) else repr(pattern)
        raise ConfigError(f"config: {field} must be a list of 0 and 1, one for each of the {layers} layers, not {count}", field)
    for layer, entry in enumerate(pattern):
        if entry not in (0, 1):
            raise ConfigError(f"layer {layer}: {field} {entry!r} is neither 0 nor 1", field)
    types, current = [kinds[int(entry)] for entry in pattern], _given(config, word)
    if current is not None and list(current) != list(_given(usual, word) or ()):
        for layer, (ours, theirs) in enumerate(zip(types, current, strict=False)):
            if ours != theirs:
                raise ConfigError(f"layer {layer}: {field} {pattern[layer]!r} contradicts {word} {theirs!r}", field)
    return types


def _ropes(config: HFConfig, usual: HFConfig) -> dict[str, dict[str, Any]]:
    """Returns the rope parameters of each kind of layer."""
    defaults = _given(usual, "rope_parameters") or {}
    given = _given(config, "rope_parameters") or defaults
    by_kind = any(isinstance(value, dict) for value in given.values())
    sets = {}
    for kind, words in _ROPES.items():
        values = dict(given.get(kind) or {}) if by_kind else dict(given)
        default = defaults.get(kind)
        for word, field in words.items():
            if _given(config, field) is None:
                continue
            # One set for all says nothing of a kind that has a theta of its own.
            current = None if not by_kind and field == "swa_rope_theta" else values.get(word)
            before = default.get(word) if isinstance(default, dict) else None
            values[word] = _agreed(field, number(config, field, 0.0), f"rope_parameters.{kind}.{word}", current, before)
        sets[kind] = values
    return sets


def _agreed(field: str, value: float, word: str, current: Any, usual: Any) -> float:
    """Returns a published number. Raises ConfigError if transformers' field contradicts it."""
    if current is not None and current not in (value, usual):
        raise ConfigError(f"config: {field} {value!r} contradicts {word} {current!r}", field)
    return value
