"""Rotary embeddings whose frequencies depend on the longest sequence of a batch: made to depend on nothing.

``dynamic`` and ``longrope`` of transformers look at the largest position of a step and choose frequencies for all of it. So
a token would be turned one way or another by the company it is in, and by how its prompt was cut. Here the frequencies are
chosen once, and the context ends where they would change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from headrace.config import Decision


@dataclasses.dataclass(frozen=True)
class Lengths:
    """How long a context may be, and what was chosen to make it so."""

    longest: int
    long_factors: bool = False
    """longrope turns by its factors for long contexts, whatever a sequence's length."""
    decisions: tuple[Decision, ...] = ()


def lengths_of(model: nn.Module, context: int, asked: int | Literal["auto"] | None) -> Lengths:
    """Where the frequencies of a model's rotary embeddings change, if they do.

    Args:
        context: what the configuration says.
        asked: ``max_model_len``.
    """
    kinds = {kind for module in model.modules() for kind, _ in _kinds(module)}
    if "longrope" in kinds:
        border = min(border for module in model.modules() for kind, border in _kinds(module) if kind == "longrope")
        if isinstance(asked, int) and asked > border:
            why = f"max_model_len is beyond {border}, up to which longrope has other factors: every sequence gets the long ones"
            return Lengths(max(context, asked), True, (Decision("rotary embedding", "longrope, long factors", why),))
        why = f"longrope changes its factors beyond {border} tokens: set max_model_len above it for the long ones"
        return Lengths(min(context, border), False, (Decision("rotary embedding", "longrope, short factors", why),))
    if any("dynamic" in kind for kind in kinds):
        border = min(border for module in model.modules() for kind, border in _kinds(module) if "dynamic" in kind)
        why = f"dynamic frequencies change with the longest sequence of a batch beyond {border} tokens: the context ends there"
        return Lengths(min(context, border), False, (Decision("rotary embedding", "dynamic, unscaled", why),))
    return Lengths(context)


def fix_frequencies(model: nn.Module, lengths: Lengths) -> None:
    """Takes the choice of frequencies out of the forward pass."""
    for module in model.modules():
        kinds = list(_kinds(module))
        if not kinds:
            continue
        if lengths.long_factors:
            _choose_long(module, lengths.longest)
        kind: Any = module.rope_type
        module.rope_type = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"  # type: ignore[assignment]


def _kinds(module: nn.Module) -> Iterator[tuple[str, int]]:
    """(type, length at which frequencies change) of a rotary module whose frequencies do."""
    given: Any = getattr(module, "rope_type", None)
    config: Any = getattr(module, "config", None)
    kinds = given if isinstance(given, dict) else {None: given}
    for layer_type, kind in kinds.items():
        if not isinstance(kind, str) or ("dynamic" not in kind and kind != "longrope"):
            continue
        parameters = getattr(config, "rope_parameters", None) or {}
        own = parameters.get(layer_type, parameters) if layer_type is not None else parameters
        border = own.get("original_max_position_embeddings") if kind == "longrope" else None
        yield kind, int(border or getattr(module, "original_max_seq_len", None) or config.max_position_embeddings)


def _choose_long(module: nn.Module, longest: int) -> None:
    """Has the module see a long position once: it keeps the factors for it."""
    buffer = next(module.buffers())
    x = torch.zeros(1, 1, 1, device=buffer.device)
    position = torch.full((1, 1), longest - 1, dtype=torch.int64, device=buffer.device)
    kinds: Any = module.rope_type
    for layer_type in kinds if isinstance(kinds, dict) else [None]:
        module(x, position, **({} if layer_type is None else {"layer_type": layer_type}))


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
