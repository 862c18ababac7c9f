"""Rows in a paged cache with index keys, for tests of choices and of attention to what was chosen."""

from __future__ import annotations

from typing import NamedTuple

import torch

from headrace.kernels.indexer import ChoiceRule, TokenPlaces


class Geometry(NamedTuple):
    rule: ChoiceRule
    index_heads: int
    index_width: int
    weighted: bool
    heads: int
    kv_heads: int
    width: int
    v_width: int
    latent: bool = False
    """Values are the last channels of the keys."""


GEOMETRIES = {
    "tokens": Geometry(ChoiceRule(9), 5, 24, True, 3, 1, 40, 32, latent=True),
    "blocks": Geometry(ChoiceRule(3, 4, 1), 2, 16, False, 4, 4, 20, 12),
    "odd blocks": Geometry(ChoiceRule(5, 3, 2), 1, 12, False, 6, 2, 16, 16),
    "all are local": Geometry(ChoiceRule(2, 8, 2), 2, 16, False, 4, 2, 16, 16),
}
ROWS = ((1, 1), (2, 40), (1, 7), (2, 23))
"""Queries and keys of rows."""


class World(NamedTuple):
    q: torch.Tensor
    weights: torch.Tensor | None
    index_keys: torch.Tensor
    heads_q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    places: TokenPlaces

    def to(self, device: torch.device) -> World:
        moved = [part.to(device) if isinstance(part, torch.Tensor) else part for part in self[:-1]]
        rows, positions, longest = self.places
        return World(*moved, TokenPlaces(rows.to(device), positions.to(device), longest))


def world(
    one: Geometry, rows: tuple[tuple[int, int], ...] = ROWS, dtype: torch.dtype = torch.float32, block_size: int = 4
) -> World:
    """Random rows, and a token of no row behind them. What holds no token is NaN."""
    torch.manual_seed(len(rows))
    counts = [-(-length // block_size) for _, length in rows]
    blocks = torch.randperm(sum(counts)) + 1
    table = torch.zeros(len(rows), max(counts) + 1, dtype=torch.int32)
    row_width = one.width if one.latent else one.width + one.v_width
    cache = torch.full((sum(counts) + 1, block_size, one.kv_heads, row_width), torch.nan, dtype=dtype)
    index_keys = torch.full((sum(counts) + 1, block_size, one.index_width), torch.nan, dtype=dtype)
    at = 0
    for row, (count, (_, length)) in enumerate(zip(counts, rows, strict=True)):
        table[row, :count] = blocks[at : at + count]
        for position in range(length):
            block, offset = int(blocks[at + position // block_size]), position % block_size
            cache[block, offset] = torch.randn(one.kv_heads, row_width)
            index_keys[block, offset] = torch.randn(one.index_width)
        at += count
    tokens = [(row, length - queries + query) for row, (queries, length) in enumerate(rows) for query in range(queries)]
    number = len(tokens) + 1
    places = torch.tensor([*tokens, (len(rows) - 1, -1)], dtype=torch.int32)
    return World(
        torch.randn(number, one.index_heads, one.index_width).to(dtype),
        torch.randn(number, one.index_heads) if one.weighted else None,
        index_keys,
        torch.randn(number, one.heads, one.width).to(dtype),
        cache[..., : one.width],
        cache[..., row_width - one.v_width :],
        table,
        TokenPlaces(places[:, 0].contiguous(), places[:, 1].contiguous(), max(length for _, length in rows)),
    )
