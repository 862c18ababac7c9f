"""Records the results of a model's layers, as they are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from headrace.models.decoder import DecoderLayer
from headrace.models.fallback.hooks import hooked
from headrace.models.fallback.megatron.model import MegatronModel


class RecordedLayers:
    """Records the layers of a model. A layer may be called more than once a step.

    Args:
        layers: in their order.
        axis: the axis of a layer's result that counts the tokens.
    """

    def __init__(self, layers: Sequence[nn.Module], axis: int = -2) -> None:
        self._layers = list(layers)
        self._axis = axis
        self._step: list[list[torch.Tensor]] = [[] for _ in self._layers]
        """``[layer][call]``: results of the current step."""
        self._parts: list[list[list[torch.Tensor]]] = [[] for _ in self._layers]
        """``[layer][call][step]``: results of earlier steps."""

    @classmethod
    def of(cls, model: nn.Module) -> RecordedLayers:
        """Finds the layers of a native or foreign model. Megatron's return ``[T, 1, hidden]``."""
        if isinstance(model, MegatronModel):
            return cls(model.foreign.decoder.layers, axis=0)
        return cls(_stack(model))

    def recorded(self) -> ExitStack:
        layers = zip(self._layers, self._step, strict=True)
        return hooked(layer.register_forward_hook(self._recording(outs)) for layer, outs in layers)

    def _recording(self, outs: list[torch.Tensor]) -> Callable[[nn.Module, Any, Any], None]:
        def record(module: nn.Module, args: Any, out: Any) -> None:
            if isinstance(module, DecoderLayer):
                out = module.stream(*out)
            outs.append(_by_token(out[0] if isinstance(out, tuple) else out, self._axis))

        return record

    def step_ended(self) -> None:
        for outs, parts in zip(self._step, self._parts, strict=True):
            for call, out in enumerate(outs):
                if call == len(parts):
                    parts.append([])
                parts[call].append(out)
            outs.clear()

    def taken(self) -> list[list[torch.Tensor]]:
        """``[tokens, width]`` of each call of each layer, since the last time."""
        results = [[torch.cat(call) for call in parts] for parts in self._parts if parts]
        for parts in self._parts:
            parts.clear()
        return results


def _stack(model: nn.Module) -> list[nn.Module]:
    """Returns the longest ModuleList outside of any other, since a layer may have more experts than the model has layers."""
    stacks: dict[str, nn.ModuleList] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer in stacks):
            stacks[path] = module
    return list(max(stacks.values(), key=len, default=[]))


def _by_token(out: torch.Tensor, axis: int) -> torch.Tensor:
    """``[..., tokens, hidden] -> [tokens, width]``, tokens along ``axis``: a layer may hand several streams on."""
    return out.detach().float().movedim(axis, 0).reshape(out.shape[axis], -1).cpu()
