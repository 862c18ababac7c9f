"""Steps of state layers by hand: rows of any sequences, with the states in shuffled blocks of strided views."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from headrace.kernels.state import StateMetadata


def state_step(rows: Sequence[tuple[int, int, int]], device: str = "cpu", *, by_token: bool = False) -> StateMetadata:
    """(block, tokens, start) of each row, those of one token that come first as decode rows."""
    counts = np.array([count for _, count, _ in rows], dtype=np.int32)
    query_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    blocks = np.array([block for block, _, _ in rows], dtype=np.int32)
    starts = np.array([start for _, _, start in rows], dtype=np.int32)
    decodes = next((index for index, count in enumerate(counts) if count != 1), len(counts))
    on_device = [torch.from_numpy(each).to(device) for each in (query_start, blocks, starts)]
    return StateMetadata(decodes, *on_device, int(query_start[-1]), padded=bool((blocks < 0).any()), by_token=by_token)


def blocks_of(count: int, *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    """Zeroed blocks that do not lie side by side, as views of an arena do not."""
    size = int(np.prod(shape))
    whole = torch.full((count, size + 24), torch.nan, dtype=dtype, device=device)
    view = whole[:, 8 : 8 + size].view(count, *shape)
    return view.zero_()


def in_chunks(
    run: Callable[[torch.Tensor, StateMetadata], torch.Tensor], tokens: int, chunks: Sequence[int], block: int
) -> torch.Tensor:
    """``run(indices of tokens, step)`` chunk by chunk: its results, one after another."""
    parts, start = [], 0
    for chunk in (*chunks, tokens - sum(chunks)):
        parts.append(run(torch.arange(start, start + chunk), state_step([(block, chunk, start)])))
        start += chunk
    return torch.cat(parts)
