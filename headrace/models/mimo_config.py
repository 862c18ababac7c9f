"""The published words of MiMo-V2-Flash's config.json, said in transformers' words.

transformers reads the published file, keeps most of its words as attributes that nothing reads, and puts its own defaults
where they should have gone. Here they go there. A model may say the same in both; where it says two things, it is refused.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import PretrainedConfig

from headrace.errors import ConfigError
from headrace.models.hf_config import required
from headrace.models.moe_config import must_be, number

_KINDS = (
    ("hybrid_layer_pattern", "layer_types", ("full_attention", "sliding_attention")),
    ("moe_layer_freq", "mlp_layer_types", ("dense", "sparse")),
)
"""A published list of 0 and 1, one a layer; transformers' word for it; what 0 and 1 are there."""
_ROPES = {
    "full_attention": {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor"},
    "sliding_attention": {"rope_theta": "swa_rope_theta", "partial_rotary_factor": "partial_rotary_factor"},
}
"""For each kind of layer: a word of its set in ``rope_parameters`` -> the published field."""


def in_transformers_words(config: PretrainedConfig) -> PretrainedConfig:
    """A copy of a config in which ``layer_types``, ``mlp_layer_types``, ``rms_norm_eps``, ``rope_parameters`` and
    ``sliding_window`` say what the published fields say. A config without those is as it was.

    transformers' word at its default counts as not said: its config does not tell which fields the file had.

    Raises:
        ConfigError: a published field is malformed, says what the family does not do, or contradicts transformers' word for
            it; the message names it, and the layer if it is a layer's.
    """
    must_be(config, "scoring_func", "sigmoid", None)
    must_be(config, "topk_method", "noaux_tc", None)
    must_be(config, "n_shared_experts", None, 0)
    must_be(config, "use_qk_norm", None, False)
    if _given(config, "hybrid_layer_pattern") is None:
        must_be(config, "hybrid_block_size", None)
    usual = type(config)(num_hidden_layers=required(config, "num_hidden_layers"))  # type: ignore[call-arg]
    said = copy.copy(config)
    for field, word, kinds in _KINDS:
        if _given(config, field) is not None:
            setattr(said, word, _types(config, usual, field, word, kinds))
    if _given(config, "layernorm_epsilon") is not None:
        said.rms_norm_eps = _agreed(
            "layernorm_epsilon",
            number(config, "layernorm_epsilon", 0.0),
            "rms_norm_eps",
            _given(config, "rms_norm_eps"),
            _given(usual, "rms_norm_eps"),
        )
    published = any(_given(config, field) is not None for words in _ROPES.values() for field in words.values())
    # A rope_scaling of null, which transformers reads as rope_parameters, takes its defaults away.
    if published or _given(config, "rope_parameters") is None:
        said.rope_parameters = _ropes(config, usual)
    if _given(config, "sliding_window_size") is not None:
        # The published size leaves out the token itself.
        said.sliding_window = required(config, "sliding_window_size") + 1
    return said


def _given(config: PretrainedConfig, name: str) -> Any:
    """A field as it is, a list too; None where it is not given."""
    values = [getattr(one, name, None) for one in (config.per_layer_config if config.is_heterogeneous else [config])]
    for layer, value in enumerate(values):
        if value != values[0]:
            raise ConfigError(f"layer {layer}: {name} {value!r} in per_layer_config is not supported", name)
    return values[0]


def _types(config: PretrainedConfig, usual: PretrainedConfig, field: str, word: str, kinds: tuple[str, str]) -> list[str]:
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


def _ropes(config: PretrainedConfig, usual: PretrainedConfig) -> dict[str, dict[str, Any]]:
    """A set for each kind of layer."""
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
    """A published number, unless transformers' word for it was given another."""
    if current is not None and current not in (value, usual):
        raise ConfigError(f"config: {field} {value!r} contradicts {word} {current!r}", field)
    return value
