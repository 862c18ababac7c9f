"""Megatron-core's forward pass as a reference: of a checkpoint, or of the live model that an engine runs on."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.config import DType, EngineArgs
from headrace.engine.parity.layers import Layers
from headrace.engine.parity.reference import Forward
from headrace.errors import ConfigError
from headrace.models.fallback.megatron import MegatronModel
from headrace.models.fallback.megatron_own import OwnForward
from headrace.models.implementation import Implementation
from headrace.resolve import DeviceFacts, resolve
from headrace.sources.files import ModelFiles

_EAGER = (
    "Megatron's core attention and rotary embedding ask for a CUDA device, and the model is on the CPU: the reference is its "
    "modules with eager attention, and angles computed from positions"
)
_WIDENED = (
    "the model stays {}: for the reference each module computes in float32, with a copy of its weights that lives as long as "
    "its call, and with eager attention"
)


@dataclasses.dataclass(frozen=True)
class OfMegatron:
    """The forward pass of a ``GPTModel``."""

    args: EngineArgs
    files: ModelFiles
    choice: Implementation
    device: DeviceFacts
    live: bool
    """It is somebody's, and stays in its dtype."""

    @contextmanager
    def opened(self, dtype: str) -> Iterator[Forward]:
        own = typing.cast(DType, self.choice.spec.dtype if self.live else dtype)
        config = resolve(dataclasses.replace(self.args, dtype=own), self.files, self.choice.spec, self.device)
        model, _ = self.choice.load(self.files, config, lambda done, total: None)
        if not isinstance(model, MegatronModel):
            raise ConfigError(f"a {type(model).__name__} has no forward of Megatron's to compare with", "model_impl")
        forward = OwnForward(model.described, in_float32=own != dtype)
        name = "Megatron's modules, eager attention" if forward.eager else "Megatron's own forward"
        note = _WIDENED.format(own) if own != dtype else _EAGER if forward.eager else ""
        yield Forward(forward.logits, Layers.of_megatron(forward.layers), name, note)
