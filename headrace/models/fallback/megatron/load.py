"""A live Megatron-core model as an implementation: nothing is loaded or copied."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from headrace.config import Decision, EngineConfig
from headrace.errors import ConfigError
from headrace.model_spec import ForeignSpec
from headrace.models.fallback.megatron.describe import MegatronDescription, describe_megatron
from headrace.models.fallback.megatron.model import MegatronModel
from headrace.models.fallback.refusal import refusals_as_errors
from headrace.sources.files import ModelFiles
from headrace.weights.load import Progress
from headrace.weights.report import LoadReport, unquantized_report


@dataclasses.dataclass(frozen=True)
class LiveMegatron:
    """A live model, which its trainer owns."""

    described: MegatronDescription
    decisions: tuple[Decision, ...]

    @property
    def spec(self) -> ForeignSpec:
        return self.described.spec

    def with_tokens(self, num_tokens: int) -> LiveMegatron:
        """Returns the same model with a vocabulary of ``num_tokens``; columns of the logits beyond it are padding."""
        spec = dataclasses.replace(self.spec, num_tokens=num_tokens)
        return dataclasses.replace(self, described=dataclasses.replace(self.described, spec=spec))

    def load(self, files: ModelFiles, config: EngineConfig, progress: Progress) -> tuple[MegatronModel, LoadReport]:
        """The model where it is. Raises ConfigError if the engine was configured for another device or dtype."""
        spec, device = self.described.spec, self.described.device
        if config.dtype != spec.dtype:
            raise ConfigError(f"dtype is {config.dtype}, but the model is {spec.dtype}, and nothing is converted", "dtype")
        if config.device != device.type:
            raise ConfigError(f"device is {config.device}, but the model is on {device}, and nothing is copied", "device")
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            raise ConfigError(
                f"the model is on {device}, and the current CUDA device is {torch.cuda.current_device()}: call "
                f"torch.cuda.set_device({device.index}) first",
                "device",
            )
        progress(0, 0)
        report = unquantized_report(self.described.model, f"{spec.dtype}, their owner's")
        return MegatronModel(self.described), report


def live_megatron(model: Any, config: Any = None, num_tokens: int | None = None) -> LiveMegatron:
    """Describes a live ``GPTModel``. Arguments as of ``describe_megatron``.

    Raises:
        ConfigError: it cannot run on headrace's attention; names the layer and the reason.
        ValueError: an argument does not belong to the model, or the layers' numbers are not consecutive.
        ImportError: there is no megatron-core.
    """
    with refusals_as_errors(type(model).__name__, "Megatron"):
        described = describe_megatron(model, config, num_tokens)
    decisions = [Decision("model_impl", "megatron", "the model was handed over as an object")]
    if any(layer.rotary is not None for layer in described.layers):
        decisions.append(
            Decision("latent attention", "uncompressed", "Megatron's layers hand over keys and values of every head")
        )
    return LiveMegatron(described, tuple(decisions))
