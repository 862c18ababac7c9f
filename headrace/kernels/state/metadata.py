"""StateMetadata: one step as state layers see it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch


class StateRow(NamedTuple):
    """A row on the host."""

    block: int
    first: int
    """Its first token in the packed batch."""
    tokens: int
    """The number of its tokens."""
    start: int
    """The position of the first."""


@dataclasses.dataclass(frozen=True)
class StateMetadata:
    """One step as state layers see it. R rows (decode rows first, then prompts), T tokens packed row after row.

    Every row reads its state block and writes it back: a step's operations zero or copy the block before. A padding row has
    block -1: it reads and writes nothing, and its outputs are zeros.
    """

    decode_rows: int
    """Rows of one token, before the others."""
    query_start: torch.Tensor
    """``[R + 1]`` int32: row -> its first token in the packed batch."""
    blocks: torch.Tensor
    """``[R]`` int32: number of the row's state block; -1: a padding row."""
    starts: torch.Tensor
    """``[R]`` int32: tokens of the sequence that its state has absorbed before this step."""
    query_start_host: np.ndarray
    blocks_host: np.ndarray
    starts_host: np.ndarray
    """The same on the host, for kernels that run there."""

    @property
    def num_rows(self) -> int:
        return len(self.blocks_host)

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_host[-1])

    @cached_property
    def longest(self) -> int:
        """The most tokens of a row."""
        return int(np.diff(self.query_start_host).max(initial=0))

    def live_rows(self) -> Iterator[StateRow]:
        """Gives the rows that have a state."""
        ends, counts = self.query_start_host.tolist(), np.diff(self.query_start_host).tolist()
        for block, first, count, start in zip(self.blocks_host.tolist(), ends, counts, self.starts_host.tolist(), strict=False):
            if block >= 0:
                yield StateRow(block, first, count, start)
