"""Arena: the bytes of the KV cache, from which all cache groups take their blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property


@dataclasses.dataclass(frozen=True)
class Arena:
    """``nbytes`` bytes; block ``b`` of group ``g`` is bytes ``[b * block_bytes[g], (b + 1) * block_bytes[g])`` of them.

    So a group's blocks lie on a regular grid, which kernels reach with one stride, and blocks of different groups may
    overlap: who owns which bytes is for ``headrace.kv`` to keep. Block 0 of every group is the null block: the first
    ``reserved`` bytes belong to no group and are never written.
    """

    nbytes: int
    block_bytes: tuple[int, ...]
    """Bytes of one block in all the group's layers, per cache group."""

    @classmethod
    def holding(cls, block_bytes: Sequence[int], counts: Sequence[int]) -> Arena:
        """The smallest arena that holds ``counts[g]`` blocks of each group at once, and the null block."""
        empty = cls(0, tuple(block_bytes))
        needed = sum(count * size for count, size in zip(counts, block_bytes, strict=True))
        return empty.fitted(empty.reserved + empty.slack + needed + min(block_bytes) - 1)

    def fitted(self, nbytes: int) -> Arena:
        """The largest arena of at most ``nbytes`` bytes with nothing left over at its end."""
        return dataclasses.replace(self, nbytes=nbytes - nbytes % min(self.block_bytes))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The groups as their regions lie in the arena: large blocks first, so that nothing is lost at either end."""
        return tuple(sorted(range(len(self.block_bytes)), key=lambda group: -self.block_bytes[group]))

    @cached_property
    def num_blocks(self) -> tuple[int, ...]:
        """Number of blocks per group: block numbers are below it."""
        return tuple(self.nbytes // size for size in self.block_bytes)

    @cached_property
    def reserved(self) -> int:
        """Bytes of the null block, which is as large as the largest group's."""
        return max(self.block_bytes)

    @cached_property
    def slack(self) -> int:
        """Bytes kept free so that regions between two others can be laid on their grid: none with one or two groups."""
        return sum(self.block_bytes[group] for group in self.order[1:-1])

    @cached_property
    def capacity(self) -> int:
        """Bytes of blocks that can be owned at once, in whatever mix of groups."""
        top = self.order[-1]
        return max(0, self.num_blocks[top] * self.block_bytes[top] - self.reserved - self.slack)
