"""Fixes the frequencies of rotary embeddings that would depend on the longest sequence of a batch.

``dynamic`` and ``longrope`` of transformers look at the largest position of a step and choose frequencies for all of it. So
a token's rotation would depend on the rest of its batch, and on the chunks of its prompt. Nor is one choice right for
every sequence do: transformers turns a short one by other frequencies than a long one. So the context ends where they change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from headrace.config import Decision
from headrace.errors import ConfigError


def context_limit(
    model: nn.Module, context: int, max_model_len: int | Literal["auto"] | None
) -> tuple[int, tuple[Decision, ...]]:
    """Returns the context length, cut to where the frequencies of the rotary embeddings change, and what limits it.

    Args:
        context: the length that the configuration gives.

    Raises:
        ConfigError: ``max_model_len`` is longer.
    """
    changes = [(border, kind) for module in model.modules() for kind, border in _kinds(module)]
    if not changes:
        return context, ()
    border, kind = min(changes)
    if isinstance(max_model_len, int) and max_model_len > border:
        raise ConfigError(
            f"max_model_len {max_model_len} is beyond {border} tokens: there transformers turns all tokens of a step by other "
            f"frequencies ({kind} rotary embedding), those of shorter sequences beside it and those in the cache too",
            "max_model_len",
        )
    why = f"its frequencies change with the longest sequence of a batch beyond {border} tokens: the context ends there"
    return min(context, border), (Decision("rotary embedding", f"{kind}, up to {border} tokens", why),)


def fix_frequencies(model: nn.Module) -> None:
    """Takes the choice of frequencies out of the forward pass: they stay those of the shortest sequences."""
    for module in model.modules():
        if list(_kinds(module)):
            kind: Any = module.rope_type
            module.rope_type = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"  # type: ignore[assignment]


def _kinds(module: nn.Module) -> Iterator[tuple[str, int]]:
    """(type, length at which frequencies change) of a rotary module whose frequencies do."""
    rope_type: Any = getattr(module, "rope_type", None)
    config: Any = getattr(module, "config", None)
    kinds = rope_type if isinstance(rope_type, dict) else {None: rope_type}
    for layer_type, kind in kinds.items():
        if not isinstance(kind, str) or ("dynamic" not in kind and kind != "longrope"):
            continue
        parameters = getattr(config, "rope_parameters", None) or {}
        own = parameters.get(layer_type, parameters) if layer_type is not None else parameters
        border = own.get("original_max_position_embeddings") if kind == "longrope" else None
        yield kind, int(border or getattr(module, "original_max_seq_len", None) or config.max_position_embeddings)


class Angles:
    """Cosines and sines as transformers gives them, as our kernels take them. Once a step for all layers that share them."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forget(self) -> None:
        self._made.clear()

    def of(self, embeddings: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """``[T, rotary_dim]`` float32 of a pair ``[1, T, rotary_dim]``, each of which says everything twice."""
        cos, sin = embeddings
        if id(cos) not in self._made:
            half = cos.shape[-1] // 2
            self._made[id(cos)] = cos, torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1).float()
        return self._made[id(cos)][1]
