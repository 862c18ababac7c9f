"""Blocks of a shared arena as plain bytes: to move one needs to know nothing of its layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from headrace.cache.layer import LayerCache
from headrace.config import CacheConfig
from headrace.errors import EngineError
from headrace.kernels.transfer import upload


def clear(caches: Iterable[LayerCache], blocks: Sequence[Sequence[int]]) -> None:
    """Zeros blocks of each cache group. What a row sees of its last block is masked beyond its end, but NaN times zero is NaN
    all the same."""
    for cache in caches:
        if blocks[cache.group]:
            index = upload(np.array(blocks[cache.group], dtype=np.int64), cache.rows.device)
            cache.rows.index_fill_(0, index, 0)


class ArenaBlocks:
    """The arena under the tensors that ``planes.allocate`` made for several cache groups."""

    def __init__(self, config: CacheConfig, caches: Sequence[LayerCache]) -> None:
        rows = caches[0].rows
        arena = torch.empty(0, dtype=torch.uint8, device=rows.device).set_(rows.untyped_storage())
        self.arena = arena
        """``[nbytes]`` uint8"""
        shapes = zip(config.num_blocks, config.arena.block_bytes, strict=True)
        self._groups = [arena[: count * size].view(count, size) for count, size in shapes]

    def block(self, group: int, block: int) -> torch.Tensor:
        """Returns the bytes of a block, a view.

        Raises:
            EngineError: there is no such block, or it is the null block.
        """
        if not 0 < block < len(self._groups[group]):
            raise EngineError(f"cache group {group} has no block {block}")
        return self._groups[group][block]

    def clear(self, blocks: Sequence[Sequence[int]]) -> None:
        """``clear`` with one launch for all layers of a group."""
        for own, zeroed in zip(self._groups, blocks, strict=False):
            if zeroed:
                words = own if own.shape[1] % 8 else own.view(torch.int64)
                words.index_fill_(0, upload(np.array(zeroed, dtype=np.int64), own.device), 0)

    def move(self, moves: Iterable[tuple[int, int, int]]) -> None:
        """Copies blocks (group, from, to) one after the other: what one leaves another may take, of any group.

        Raises:
            EngineError: there is no such block, or it is a null block.
        """
        for group, source, target in moves:
            if not 0 <= group < len(self._groups) or not 0 < min(source, target) <= max(source, target) < len(
                self._groups[group]
            ):
                raise EngineError(f"block {source} of cache group {group} cannot move to {target}: one of them does not exist")
            blocks = self._groups[group]
            blocks[target].copy_(blocks[source])
