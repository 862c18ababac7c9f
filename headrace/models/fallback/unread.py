"""Fields of a configuration that make layers differ, or their maths, and that the library's own module does not read.

A library ignores fields that it does not know. Those that say what a model computes must not be: it would be another model.
What the library's class declares it is taken to read; of the rest, what was seen says whether it was.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from headrace.errors import ConfigError
from headrace.models import registry
from headrace.models.fallback.mentions import mentioned_by
from headrace.models.fallback.observe import Observation
from headrace.models.hf_config import NEUTRAL

_SEEN = {
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "v_head_dim": "v_head_dim",
    "sliding_window": "window",
}
"""Fields of configurations -> what of an AttentionSpec shows whether a layer has that value."""
_LIST = "_list"
_ELSEWHERE = ("attn_output_gate", "pretraining_tp")
"""Of ``NEUTRAL``: what is looked at above, and what says in how many pieces a product is computed, which changes nothing."""
_HELPERS = {"attention_chunk_size": "create_chunked_causal_mask"}
"""Fields that functions of the library read for a model -> the function that it then uses."""


def refuse_unread(config: PretrainedConfig, model: PreTrainedModel, seen: Observation) -> None:
    """Refuses ``<field>_list``, ``v_head_dim``, ``attn_output_gate`` and what else changes the maths of a decoder where the
    model does not do as they say.

    Args:
        model: as the library built it from ``config``.
        seen: the same model, as it was observed.

    Raises:
        ConfigError: names the field.
    """
    for part in {id(one): one for one in (config, config.get_text_config(decoder=True))}.values():
        for field in [name for name in vars(part) if name.endswith(_LIST)]:
            _check_list(part, field, seen)
        _check_values(part, seen)
        _check_gate(part, model, seen)
        _check_maths(part, model)


def _refusal(config: PretrainedConfig, field: str) -> ConfigError:
    return ConfigError(
        f"{field} {vars(config).get(field)!r} is not supported by model_impl transformers: transformers' own module of this "
        f"model ({config.model_type or type(config).__name__}) does not read it",
        field,
    )


def _check_list(config: PretrainedConfig, field: str, seen: Observation) -> None:
    name, values = field.removesuffix(_LIST), vars(config)
    listed = values[field]
    if listed is None or _declares(config, field) or not (name in _SEEN or name in values or _declares(config, name)):
        return
    listed = list(listed) if isinstance(listed, list | tuple) else None
    seen_values = [getattr(call.spec, _SEEN[name]) for call in seen.calls] if name in _SEEN else None
    common = [values.get(name)] * values.get("num_hidden_layers", 0)
    if listed is None or listed != (common if seen_values is None else seen_values):
        raise _refusal(config, field)


def _check_values(config: PretrainedConfig, seen: Observation) -> None:
    """The width of values: all layers have it, or one at least if the library knows the field and may mean some layers."""
    field = "v_head_dim"
    per_layer = list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config] * len(seen.calls)
    said = [vars(one).get(field) for one in per_layer]
    if all(value is None for value in said):
        return
    fits = [value == call.spec.v_head_dim for value, call in zip(said, seen.calls, strict=False)]
    if len(said) != len(seen.calls) or not (any(fits) if _declares(config, field) else all(fits)):
        raise _refusal(config, field)


def _check_gate(config: PretrainedConfig, model: PreTrainedModel, seen: Observation) -> None:
    """An output gate is a projection of that name, or it is made beside the queries by theirs."""
    field = "attn_output_gate"
    if not vars(config).get(field) or _declares(config, field):
        return
    for call in seen.calls:
        attention = model.get_submodule(call.path)
        widths = {name: part.out_features for name, part in attention.named_modules() if isinstance(part, nn.Linear)}
        beside = call.spec.num_heads * (call.spec.head_dim + call.spec.v_head_dim)
        if not any("gate" in name or (name == "q_proj" and width == beside) for name, width in widths.items()):
            raise _refusal(config, field)


def _check_maths(config: PretrainedConfig, model: PreTrainedModel) -> None:
    """Fields that make another model wherever they are read must be read by this one."""
    family = registry.find(config)
    unused = _ELSEWHERE if family is None else (*_ELSEWHERE, *family.unused)
    for field, neutral in NEUTRAL.items():
        if field in unused or all(value in neutral for value in _values(config, field)):
            continue
        if not mentioned_by(config, model) & {field, _HELPERS.get(field, field)}:
            raise _refusal(config, field)


def _values(config: PretrainedConfig, field: str) -> Iterator[Any]:
    """All that a configuration says of a field, for whichever layers."""
    for one in config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]:
        value = vars(one).get(field)
        yield from value if isinstance(value, list | tuple) else [value]
        if field == "partial_rotary_factor":
            ropes = vars(one).get("rope_parameters") or {}
            for rope in [ropes, *ropes.values()]:
                # Those of other kinds are made by the library's own functions for each, which read it.
                if isinstance(rope, dict) and rope.get("rope_type", "default") == "default":
                    yield rope.get(field)


def _declares(config: PretrainedConfig, field: str) -> bool:
    """The library's class of configurations names the field, so that its modules may read it."""
    kind: Any = type(config)
    known = {one.name for one in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    return field in known or field in inspect.signature(kind.__init__).parameters or hasattr(kind, field)
