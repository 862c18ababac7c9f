"""Common model configurations read without transformers, whose configuration classes take seconds to import."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

REQUIRED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    "max_position_embeddings",
)
"""Numbers that every published config.json has: one that leaves them out is read by transformers."""
_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA = _COMMON | {"bos_token_id": 1, "eos_token_id": 2, "head_dim": None}
_QWEN = _COMMON | {
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA | {"num_key_value_heads": None, "pretraining_tp": 1, "attention_bias": False, "mlp_bias": False},
    "mistral": _LLAMA | {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128, "attention_bias": False},
    "qwen3_moe": _COMMON
    | {
        "num_key_value_heads": 4,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "mlp_only_layers": None,
    },
}
"""Model type -> the fields that its class in transformers fills in where a config.json leaves them out."""
_OPTIONAL = ("head_dim", "num_key_value_heads", "sliding_window")
_LISTS = ("layer_types", "mlp_only_layers")
_DTYPES = ("float32", "float16", "bfloat16")
_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_UNCOMMON = ("per_layer_config", "partial_rotary_factor", "text_config", "original_max_position_embeddings")
"""Fields that transformers does more with than keep them."""


class PlainConfig:
    """The fields of a configuration as attributes, those that ``config.json`` leaves out included."""

    def __init__(self, raw: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
        vars(self).update(fields)
        self._raw = raw

    model_type: str

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PlainConfig:
        return self

    def in_transformers(self) -> PreTrainedConfig:
        """Returns the configuration as transformers' class for it."""
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        config: PreTrainedConfig = CONFIG_MAPPING[self.model_type].from_dict(copy.deepcopy(dict(self._raw)))
        return config


def in_transformers(config: Any) -> PreTrainedConfig:
    """A configuration as transformers' class for it."""
    return config.in_transformers() if isinstance(config, PlainConfig) else config


def plain_config(raw: Mapping[str, Any]) -> PlainConfig | None:
    """The configuration that transformers would make of ``config.json``.

    Returns:
        None for what is not plain: another model type, a value of an unusual type, or a field that transformers converts.
    """
    defaults = _DEFAULTS.get(str(raw.get("model_type")))
    if defaults is None or any(raw.get(name) is not None for name in _UNCOMMON):
        return None
    if not all(type(raw.get(name)) is int and raw[name] > 0 for name in REQUIRED):
        return None
    raw = copy.deepcopy(dict(raw))
    fields = {**defaults, **raw}
    dtype = fields.pop("torch_dtype", None)
    fields["dtype"] = raw.get("dtype") or dtype
    architectures = fields.setdefault("architectures", None)
    rope = _rope(fields)
    usual = (
        all(_is_usual(fields[name], name, default) for name, default in defaults.items() if not name.endswith("_token_id"))
        and (fields["dtype"] is None or fields["dtype"] in _DTYPES)
        and (architectures is None or _is_strings(architectures))
    )
    if not usual or rope is None or fields["hidden_size"] % fields["num_attention_heads"]:
        return None
    fields["rope_parameters"] = fields["rope_scaling"] = rope
    if "head_dim" in fields and fields["head_dim"] is None:
        fields["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
    if fields["num_key_value_heads"] is None:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    if fields["model_type"] == "qwen3_moe":
        fields["mlp_only_layers"] = fields["mlp_only_layers"] or []
        fields["num_experts"] = fields["num_local_experts"] = fields.get("num_local_experts", fields["num_experts"])
    if "use_sliding_window" in defaults and not fields["use_sliding_window"]:
        fields["sliding_window"] = None
    if "layer_types" in defaults and not _set_layer_types(fields):
        return None
    return PlainConfig(raw, fields)


def _rope(fields: dict[str, Any]) -> dict[str, Any] | None:
    """The rotary parameters, out of whichever fields hold them; None: not plain."""
    given = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    theta = fields.pop("rope_theta", 10_000.0)
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        return None
    rope = dict(given)
    rope.setdefault("rope_theta", theta)
    kind = rope.setdefault("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_TYPES or isinstance(rope["rope_theta"], bool) or not isinstance(rope["rope_theta"], int | float):
        return None
    if kind in ("llama3", "yarn"):
        rope.setdefault("original_max_position_embeddings", fields["max_position_embeddings"])
    return rope


def _set_layer_types(fields: dict[str, Any]) -> bool:
    """Sets which layers of a dense Qwen have a window. Returns False if the configuration is not plain."""
    window, first, layers = fields["sliding_window"], fields["max_window_layers"], fields["num_hidden_layers"]
    if fields["layer_types"] is None:
        windowed = window is not None
        fields["layer_types"] = [_LAYER_TYPES[windowed and layer >= first] for layer in range(layers)]
    types = fields["layer_types"]
    return _is_strings(types) and len(types) == layers and set(types) <= set(_LAYER_TYPES)


def _is_usual(value: Any, name: str, default: Any) -> bool:
    """Whether a value has the type of the field's default; integers are positive."""
    if name in _LISTS:
        return value is None or isinstance(value, list)
    if name in _OPTIONAL:
        return value is None or (type(value) is int and value > 0)
    return type(value) is type(default) and (type(value) is not int or value > 0)


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
