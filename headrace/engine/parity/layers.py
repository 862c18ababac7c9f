"""The results of a model's layers, as they are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from headrace.models.decoder import DecoderLayer
from headrace.models.fallback.megatron import MegatronModel


class Layers:
    """Watches the layers of a model. A layer may be called more than once a step.

    Args:
        layers: in their order.
        axis: of a foreign layer's result, that counts the tokens.
    """

    def __init__(self, layers: Sequence[nn.Module], axis: int = -2) -> None:
        self._layers = list(layers)
        self._axis = axis
        self._step: list[list[torch.Tensor]] = [[] for _ in self._layers]
        """By layer: what its calls gave in this step."""
        self._parts: list[list[list[torch.Tensor]]] = [[] for _ in self._layers]
        """By layer, by call of a step: what it gave in each step."""

    @classmethod
    def of(cls, model: nn.Module) -> Layers:
        """Of any model that was built, ours or a library's."""
        if isinstance(model, MegatronModel):
            return cls.of_megatron(model.foreign.decoder.layers)
        return cls(_stack(model))

    @classmethod
    def of_megatron(cls, layers: Sequence[nn.Module]) -> Layers:
        """Its layers hand on ``[T, 1, hidden]``."""
        return cls(layers, axis=0)

    @contextmanager
    def watched(self) -> Iterator[None]:
        handles, ours = [], []
        for layer, outs in zip(self._layers, self._step, strict=True):
            if isinstance(layer, DecoderLayer):
                ours.append(layer)
                setattr(layer, layer.entry, _looking(layer, outs))
            else:
                handles.append(layer.register_forward_hook(self._hook(outs)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for layer in ours:
                delattr(layer, layer.entry)

    def _hook(self, outs: list[torch.Tensor]) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, args: Any, out: Any) -> None:
            outs.append(_by_token(out[0] if isinstance(out, tuple) else out, self._axis))

        return look

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
    """The longest list of modules that is in no other: a layer's experts may be more than the layers."""
    stacks: dict[str, nn.ModuleList] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer in stacks):
            stacks[path] = module
    return list(max(stacks.values(), key=len, default=[]))


def _by_token(out: torch.Tensor, axis: int) -> torch.Tensor:
    """``[..., tokens, hidden] -> [tokens, width]``, tokens along ``axis``: a layer may hand several streams on."""
    return out.detach().float().movedim(axis, 0).reshape(out.shape[axis], -1).cpu()


def _looking(layer: DecoderLayer, outs: list[torch.Tensor]) -> Callable[..., Any]:
    plain = getattr(layer, layer.entry)

    def looking(*args: Any) -> Any:
        result = plain(*args)
        outs.append(_by_token(layer.behind(result), -2))
        return result

    return looking
