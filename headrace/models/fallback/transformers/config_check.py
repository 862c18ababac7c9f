"""Refuses config fields that change the model and that the library's own module ignores.

Records which fields the library reads while it builds and traces the model.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from headrace.errors import ConfigError
from headrace.models import registry
from headrace.models.fallback.transformers.trace import Trace
from headrace.models.hf_config import NEUTRAL

_TRACED = {
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "v_head_dim": "v_head_dim",
    "sliding_window": "window",
}
"""Config field -> the field of ``AttentionSpec`` that shows its value in a layer."""
_LIST = "_list"
_GATE, _V_DIM, _PARTIAL = "attn_output_gate", "v_head_dim", "partial_rotary_factor"
_UNCHECKED = (_GATE, "pretraining_tp")
"""Fields of ``NEUTRAL`` that need not be read: the first is checked by the model's projections, and the second, into how many
products a matrix is split, changes no result."""
_RECORDING = threading.RLock()
"""Lock that is held while a class of configs records: models may be described side by side."""


@contextlib.contextmanager
def recorded_reads(config: PretrainedConfig) -> Iterator[tuple[PretrainedConfig, set[str]]]:
    """Yields a copy of a config, and the set of its fields that other objects read from it or from copies of it."""
    copied, reads = copy.deepcopy(config), set[str]()

    def recording(read: Callable[..., Any]) -> Callable[[Any, str], Any]:
        def recorded(self: Any, name: str) -> Any:
            if not name.startswith("_") and sys._getframe(1).f_locals.get("self") is not self:
                reads.update((name, self.attribute_map.get(name, name)))
            return read(self, name)

        return recorded

    for part in _parts(copied):
        if isinstance(ropes := vars(part).get("rope_parameters"), dict):
            vars(part)["rope_parameters"] = _recording_dict(ropes, reads)
    with _RECORDING, contextlib.ExitStack() as stack:
        for kind in {type(part) for part in _parts(copied)}:
            stack.enter_context(mock.patch.object(kind, "__getattribute__", recording(kind.__getattribute__)))
        yield copied, reads


def _recording_dict(values: dict[str, Any], reads: set[str]) -> dict[str, Any]:
    class Recording(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            reads.add(key)
            return super().__getitem__(key)

        def get(self, key: str, default: Any = None) -> Any:
            reads.add(key)
            return super().get(key, default)

    return Recording(
        {key: _recording_dict(value, reads) if isinstance(value, dict) else value for key, value in values.items()}
    )


def _parts(config: PretrainedConfig) -> list[PretrainedConfig]:
    return list({id(part): part for part in (config, config.get_text_config(decoder=True))}.values())


def check_config(config: PretrainedConfig, reads: set[str], model: PreTrainedModel, traced: Trace) -> None:
    """Refuses ``<field>_list``, ``v_head_dim``, ``attn_output_gate`` and the fields of ``NEUTRAL`` that the model ignores.

    Args:
        reads: names that were read of the config while the model was built and traced.
        model: as the library built it from ``config``.

    Raises:
        ConfigError: names the field.
    """
    family = registry.find(config)
    unchecked = _UNCHECKED if family is None else (*_UNCHECKED, *family.unused)
    for part in _parts(config):
        ignored = [field for field in vars(part) if field.endswith(_LIST) and not _list_holds(part, field, traced)]
        if not _v_dims_hold(part, traced):
            ignored.append(_V_DIM)
        if vars(part).get(_GATE) and not _is_gated(model, traced):
            ignored.append(_GATE)
        for field, neutral in NEUTRAL.items():
            if field not in unchecked and not all(value in neutral for value in _values(part, field)):
                ignored.append(field)
        for field in ignored:
            if field not in reads:
                raise ConfigError(
                    f"{field} {vars(part).get(field)!r} is not supported by model_impl transformers: transformers' own module "
                    f"of this model ({part.model_type or type(part).__name__}) does not read it",
                    field,
                )


def _list_holds(config: PretrainedConfig, field: str, traced: Trace) -> bool:
    """Whether every layer has its value from a list, or the list is not per layer."""
    name, values = field.removesuffix(_LIST), vars(config)
    listed = values[field]
    if name in _TRACED:
        expected = [getattr(call.spec, _TRACED[name]) for call in traced.calls]
    elif name in values:
        expected = [values.get(name)] * values.get("num_hidden_layers", 0)
    else:
        return True
    return listed is None or (isinstance(listed, list | tuple) and list(listed) == expected)


def _v_dims_hold(config: PretrainedConfig, traced: Trace) -> bool:
    said = [vars(one).get(_V_DIM) for one in _layer_configs(config, len(traced.calls))]
    return all(value is None for value in said) or said == [call.spec.v_head_dim for call in traced.calls]


def _is_gated(model: PreTrainedModel, traced: Trace) -> bool:
    """Whether every layer has a projection for an output gate: one of that name, or columns beside the queries'."""
    for call in traced.calls:
        linears = model.get_submodule(call.path).named_modules()
        widths = {name: part.out_features for name, part in linears if isinstance(part, nn.Linear)}
        beside = call.spec.num_heads * (call.spec.head_dim + call.spec.v_head_dim)
        if not any("gate" in name or (name == "q_proj" and width == beside) for name, width in widths.items()):
            return False
    return True


def _layer_configs(config: PretrainedConfig, layers: int) -> list[PretrainedConfig]:
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config] * layers


def _values(config: PretrainedConfig, field: str) -> Iterator[Any]:
    """Every value that a config gives a field, for whichever layers."""
    for one in _layer_configs(config, 1):
        value = vars(one).get(field)
        yield from value if isinstance(value, list | tuple) else [value]
        if field == _PARTIAL:
            ropes = vars(one).get("rope_parameters") or {}
            for rope in [ropes, *ropes.values()]:
                # The library's functions for other kinds of rotary embedding all read it.
                if isinstance(rope, dict) and rope.get("rope_type", "default") == "default":
                    yield rope.get(field)
