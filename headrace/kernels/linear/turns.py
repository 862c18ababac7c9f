"""Counters by which programs that share a sum find out who comes last."""

from __future__ import annotations

import functools

import torch

MOST_TILES = 4096
"""Sums of a launch that several programs share, at most."""


@functools.cache
def _turns(device: torch.device, stream: int | None) -> torch.Tensor:
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


def turns_of(device: torch.device) -> torch.Tensor:
    """Counters of the programs of each tile that have left their sums: 0 between launches. Each stream has its own, and so have
    graphs, which are replayed one after the other: theirs exist before the first is captured, as kernels run once before."""
    captured = _turns(device, None)
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return captured
    return _turns(device, torch.cuda.current_stream(device).cuda_stream)
