"""LayerState: one state layer's blocks in the arena."""

from __future__ import annotations

import dataclasses
import math

import torch

from headrace.kernels.state import Pending
from headrace.model_spec import StateGroup


@dataclasses.dataclass(frozen=True)
class LayerState:
    """One state layer's tensors, views of the arena at the stride of a state block."""

    conv: torch.Tensor | None
    """``[num_blocks, width - 1, channels]`` in the model's dtype: the last inputs of the convolution, that of position p in row
    ``p % (width - 1)``."""
    state: torch.Tensor | None
    """``[num_blocks, heads, value_dim, key_dim]`` in the state dtype."""
    pending: Pending | None = None
    """The tokens that ``state`` lacks; None: it lacks none."""


def state_views(arena: torch.Tensor, group: StateGroup) -> list[LayerState]:
    """The tensors of every state layer in ``arena [nbytes]`` uint8."""
    size = group.block_bytes
    count = len(arena) // size
    blocks = arena[: count * size].view(count, size)
    layers = []
    for planes, offsets in zip(group.planes, group.offsets, strict=True):
        views: dict[str, torch.Tensor] = {}
        for plane, offset in zip(planes, offsets, strict=True):
            own = blocks[:, offset : offset + plane.nbytes].view(getattr(torch, plane.dtype))
            strides = [math.prod(plane.shape[axis + 1 :]) for axis in range(len(plane.shape))]
            views[plane.name] = own.as_strided((count, *plane.shape), (own.stride(0), *strides))
        pending = Pending(views["tokens"], views["until"]) if "tokens" in views else None
        layers.append(LayerState(views.get("conv"), views.get("state"), pending))
    return layers
