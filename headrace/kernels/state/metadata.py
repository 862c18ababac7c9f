"""StateMetadata: one step as state layers see it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch

TILE = 64
"""Tokens that the kernels of prompts take at once. Chunks of prompts end at multiples of it."""


class StateRow(NamedTuple):
    """A row on the host."""

    block: int
    first: int
    """Its first token in the packed batch."""
    tokens: int
    """The number of its tokens."""
    start: int
    """The position of the first."""


class Pending(NamedTuple):
    """Tokens of each block that its states of a gated delta rule lack."""

    tokens: torch.Tensor
    """``[blocks, most, channels]`` float32: k of length 1, of each key head; what was added along it, of each head; and the sum
    of the log-decays since the state was written. The token of position p is in row ``p % (most + 1)``; ``most + 1`` is a power
    of two."""
    until: torch.Tensor
    """``[blocks, heads, value_dim]`` int32: the tokens of its sequence that each row of a head's state has."""


class Tiles(NamedTuple):
    """The prompts of a step cut into tiles: each row from its first token, the tiles of one row after those of another."""

    rows: torch.Tensor
    """``[N]`` int32: tile -> row of the step; -1: there are fewer tiles."""
    starts: torch.Tensor
    """``[prompts]`` int32: prompt -> its first tile."""


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
    num_tokens: int
    """Tokens of the step; some of a padded one may belong to no row."""
    padded: bool = False
    """The step stands for others: there may be padding rows, and tokens of no row."""
    by_token: bool = False
    """Prompts are absorbed token by token, so that results are bitwise the same wherever chunks end; on a GPU."""

    @property
    def num_rows(self) -> int:
        return len(self.blocks)

    @property
    def prompt_rows(self) -> int:
        return self.num_rows - self.decode_rows

    @cached_property
    def tiles(self) -> Tiles:
        """The tiles of the prompts, of which there is at least one."""
        prompts = self.query_start[self.decode_rows :]
        ends = torch.div(torch.diff(prompts) + (TILE - 1), TILE, rounding_mode="floor").cumsum(0)
        most = (self.num_tokens - self.decode_rows) // TILE + self.prompt_rows
        rows = torch.searchsorted(ends, torch.arange(most, device=ends.device), right=True)
        rows = torch.where(rows < self.prompt_rows, rows + self.decode_rows, -1)
        return Tiles(rows.to(torch.int32), torch.nn.functional.pad(ends[:-1], (1, 0)).to(torch.int32))

    def live_rows(self) -> Iterator[StateRow]:
        """Gives the rows that have a state, whose numbers are on the host."""
        bounds, starts = self.query_start.tolist(), self.starts.tolist()
        for row, block in enumerate(self.blocks.tolist()):
            if block >= 0:
                yield StateRow(block, bounds[row], bounds[row + 1] - bounds[row], starts[row])


def token_rows(x: torch.Tensor) -> torch.Tensor:
    """x with the channels of a token side by side: it may be a slice of wider rows."""
    return x if x.stride(1) == 1 else x.contiguous()
