"""Megatron-core's forward pass as a reference: of a checkpoint, or of the live model that an engine runs on."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.choices import DType
from headrace.errors import ConfigError
from headrace.models.fallback.megatron.model import MegatronModel
from headrace.models.fallback.megatron.own import OwnForward
from headrace.parity.layers import RecordedLayers
from headrace.parity.reference import Forward, Loadable

_EAGER = (
    "Megatron's core attention and rotary embedding ask for a CUDA device, and the model is on the CPU: the reference is its "
    "modules with eager attention, and angles computed from positions"
)
_WIDENED = (
    "the model stays {}: for the reference each module computes in float32, with a copy of its weights that lives as long as "
    "its call, and with eager attention"
)


@contextmanager
def open_megatron(loadable: Loadable, live: bool, dtype: DType) -> Iterator[Forward]:
    """The forward pass of a ``GPTModel``; a live one stays in its dtype."""
    own_dtype = typing.cast(DType, loadable.implementation.spec.dtype) if live else dtype
    model, _ = loadable.loaded(own_dtype)
    if not isinstance(model, MegatronModel):
        raise ConfigError(f"a {type(model).__name__} has no forward of Megatron's to compare with", "model_impl")
    forward = OwnForward(model.described, in_float32=own_dtype != dtype)
    name = "Megatron's modules, eager attention" if forward.eager else "Megatron's own forward"
    note = _WIDENED.format(own_dtype) if own_dtype != dtype else _EAGER if forward.eager else ""
    yield Forward(forward.logits, RecordedLayers(forward.layers, axis=0), name, note)
