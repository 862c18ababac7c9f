"""Order of tokens by their experts: a stable counting sort, and the tiles of rows that it makes. Only the device knows how many
tiles an expert has: the host launches the most there can be, and each program finds its expert's tile, or that there is none.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl

from headrace.kernels.kv_cache.triton_fp8 import mode
from headrace.kernels.moe.tiling import MoeTiling, most_tiles
from headrace.kernels.moe.triton_rounding import Rounding, round_groups
from headrace.kernels.support import cdiv, power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options

_CHUNK, _LONG = 2048, 8192
"""Choices that a program for each expert counts at a time, and up to which there are such."""
_SEGMENTS = ((32768, 256), (1 << 62, 512))
"""With more choices than that: up to how many, a program sorts a segment of so many."""
_PART = 64
"""Choices of a segment that are compared at a time."""
_TILES = tl.constexpr(16)
"""Tiles of an expert that are written at a time."""
_FEW = 32
"""Choices up to which none are sorted: each gets its own tile, if there are enough experts that few tokens share one."""
_BAND = 1024
"""Rows of the tiles that go through the outputs together, so that both factors stay in the cache."""
TABLED = tl.constexpr(2)
"""The value of SORTED where a table names the tiles."""


@triton.jit
def _write_tiles(table, tile, end, owner, first, stop, TOKENS: tl.constexpr):
    """Writes the tiles ``[tile, end)`` of an expert, of which the first has the choices from the place ``first`` on."""
    for at in range(tile, end, _TILES):
        each = at + tl.arange(0, _TILES)
        tl.store(table + each * 4, owner + each * 0, mask=each < end)
        tl.store(table + each * 4 + 1, first + (each - tile) * TOKENS, mask=each < end)
        tl.store(table + each * 4 + 2, stop + each * 0, mask=each < end)


@triton.jit
def _sort_expert(
    experts, order, start, table, choices, tiles, own, EXPERTS: tl.constexpr, EXPERTS_P: tl.constexpr, CHUNK: tl.constexpr,
    TOKENS: tl.constexpr
):  # fmt: skip
    """Writes where one expert's choices begin in the order, which they are, and its tiles; the last expert also those of
    ``tiles`` that have no rows."""
    other = tl.arange(0, EXPERTS_P)
    counts = tl.zeros([EXPERTS_P], tl.int32)
    for first in range(0, choices, CHUNK):
        index = first + tl.arange(0, CHUNK)
        expert = tl.load(experts + index, mask=index < choices, other=EXPERTS)
        counts += tl.histogram(tl.minimum(expert, EXPERTS), EXPERTS_P)
    before = tl.sum(tl.where(other < own, counts, 0), 0)
    mine = tl.sum(tl.where(other == own, counts, 0), 0)
    tl.store(start + own, before)
    if TOKENS:
        tall = (counts + TOKENS - 1) // TOKENS
        tile = tl.sum(tl.where(other < own, tall, 0), 0)
        end = tile + (mine + TOKENS - 1) // TOKENS
        _write_tiles(table, tile, end, own, before, before + mine, TOKENS)
        if own == EXPERTS - 1:
            _write_tiles(table, end, tiles, EXPERTS, 0, 0, TOKENS)
    if own == EXPERTS - 1:
        tl.store(start + EXPERTS, before + mine)
    if mine > 0:
        done = before
        for first in range(0, choices, CHUNK):
            index = first + tl.arange(0, CHUNK)
            hit = (tl.load(experts + index, mask=index < choices, other=EXPERTS) == own).to(tl.int32)
            tl.store(order + done + tl.cumsum(hit, 0) - 1, index, mask=hit == 1)
            done += tl.sum(hit, 0)


@launched(do_not_specialize=["choices", "tiles"])
def _sort(
    experts, order, start, table, choices, tiles, EXPERTS: tl.constexpr, EXPERTS_P: tl.constexpr, CHUNK: tl.constexpr,
    TOKENS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    begin(PDL)
    _sort_expert(experts, order, start, table, choices, tiles, tl.program_id(0), EXPERTS, EXPERTS_P, CHUNK, TOKENS)


@launched(do_not_specialize=["choices", "tiles", "count", "column"])
def _sort_and_round(
    experts, order, start, table, x, given, codes, scales, choices, tiles, count, x_row: tl.int64, column: tl.int64,
    EXPERTS: tl.constexpr, EXPERTS_P: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr, IN: tl.constexpr,
    GROUP: tl.constexpr, GROUP_P: tl.constexpr, GROUPS: tl.constexpr, SEVERAL: tl.constexpr, STATIC: tl.constexpr,
    MODE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One expert's choices; behind the programs of all experts, some groups of rows, which are rounded."""
    begin(PDL)
    own = tl.program_id(0)
    if own < EXPERTS:
        _sort_expert(experts, order, start, table, choices, tiles, own, EXPERTS, EXPERTS_P, CHUNK, TOKENS)
    else:
        item = (own - EXPERTS).to(tl.int64) * SEVERAL + tl.arange(0, SEVERAL)
        round_groups(item, count, x, given, codes, scales, x_row, column, IN, GROUP, GROUP_P, GROUPS, SEVERAL, STATIC, MODE)


@launched(do_not_specialize=["choices"])
def _count(experts, counts, choices, EXPERTS: tl.constexpr, EXPERTS_P: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """Counts the choices of a segment that fall on each expert."""
    begin(PDL)
    segment = tl.program_id(0)
    index = segment * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(experts + index, mask=index < choices, other=EXPERTS)
    own = tl.arange(0, EXPERTS_P)
    # Those of no expert fall into a place of their own, behind the last, which is not kept.
    found = tl.histogram(tl.minimum(expert, EXPERTS), EXPERTS_P)
    tl.store(counts + segment * EXPERTS + own, found, mask=own < EXPERTS)


@launched(do_not_specialize=["choices", "segments"])
def _sort_segment(
    experts, counts, order, start, table, choices, segments, EXPERTS: tl.constexpr, EXPERTS_P: tl.constexpr,
    CHUNK: tl.constexpr, PART: tl.constexpr, TILES: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Puts a segment's choices into the order, and writes its share of the table of tiles of ``TOKENS`` rows. The first segment
    also writes where each expert's choices begin."""
    begin(PDL)
    segment = tl.program_id(0)
    other = tl.arange(0, EXPERTS_P)
    each = tl.arange(0, PART)
    total = tl.zeros([EXPERTS_P], tl.int32)
    mine = tl.zeros([EXPERTS_P], tl.int32)
    for first in range(0, segments, PART):
        row = first + each
        mask = (row < segments)[:, None] & (other < EXPERTS)[None, :]
        counted = tl.load(counts + row[:, None] * EXPERTS + other[None, :], mask=mask, other=0)
        total += tl.sum(counted, 0)
        mine += tl.sum(tl.where((row < segment)[:, None], counted, 0), 0)
    begins = tl.cumsum(total, 0) - total
    if segment == 0:
        tl.store(start + other, begins, mask=other <= EXPERTS)
    if TILES:
        tile = segment * TILES + tl.arange(0, TILES)
        ends = tl.cumsum((total + TOKENS - 1) // TOKENS, 0)
        passed = (ends[None, :] <= tile[:, None]) & (other < EXPERTS)[None, :]
        owner = tl.sum(passed.to(tl.int32), 1)
        within = tile - tl.max(tl.where(passed, ends[None, :], 0), 1)
        tl.store(table + tile * 4, owner)
        tl.store(table + tile * 4 + 1, tl.gather(begins, owner, 0) + within * TOKENS)
        tl.store(table + tile * 4 + 2, tl.gather(begins + total, owner, 0))
    place = begins + mine
    for first in range(0, CHUNK, PART):
        index = segment * CHUNK + first + each
        # Those of no expert come behind the last, and are not kept.
        expert = tl.minimum(tl.load(experts + index, mask=index < choices, other=EXPERTS), EXPERTS)
        earlier = (expert[None, :] == expert[:, None]) & (each[None, :] < each[:, None])
        at = tl.gather(place, expert, 0) + tl.sum(earlier.to(tl.int32), 1)
        tl.store(order + at, index, mask=expert < EXPERTS)
        place += tl.histogram(expert, EXPERTS_P)


@triton.jit
def _tile(start, tile, EXPERTS: tl.constexpr, EXPERTS_P: tl.constexpr, TOKENS: tl.constexpr):
    """The expert of a tile (EXPERTS: there is no such tile), its first place in the order and the end of its expert's."""
    expert = tl.arange(0, EXPERTS_P)
    present = expert < EXPERTS
    low = tl.load(start + expert, mask=present, other=0)
    high = tl.load(start + expert + 1, mask=present, other=0)
    ends = tl.cumsum((high - low + TOKENS - 1) // TOKENS, 0)
    passed = present & (ends <= tile)
    owner = tl.sum(passed.to(tl.int32), 0)
    skipped = tl.max(tl.where(passed, ends, 0), 0)
    inside = tl.where(owner < EXPERTS, owner, EXPERTS - 1)
    first = tl.load(start + inside) + (tile - skipped) * TOKENS
    return owner, first, tl.load(start + inside + 1)


@triton.jit
def tile_rows(order, start, tile, EXPERTS: tl.constexpr, EXPERTS_P: tl.constexpr, TOKENS: tl.constexpr, SORTED: tl.constexpr):
    """The expert of a tile (EXPERTS: there is none such), its places in the order, which of them count, and their choices.

    Not SORTED, the order is that of the choices, each of which is a tile, and ``start`` is their experts. TABLED: it is the
    table of tiles.
    """
    if SORTED == TABLED:
        expert = tl.load(start + tile * 4)
        place = tl.load(start + tile * 4 + 1) + tl.arange(0, TOKENS)
        used = place < tl.load(start + tile * 4 + 2)
        choice = tl.load(order + place, mask=used, other=0)
    elif SORTED:
        expert, first, end = _tile(start, tile, EXPERTS, EXPERTS_P, TOKENS)
        place = first + tl.arange(0, TOKENS)
        used = place < end
        choice = tl.load(order + place, mask=used, other=0)
    else:
        expert = tl.load(start + tile)
        place = tile + tl.arange(0, TOKENS)
        used = place == tile
        choice = tl.where(used, place, 0)
    return expert, place, used, choice


@dataclasses.dataclass(frozen=True)
class Routing:
    """The choices of tokens."""

    choices: int
    experts: int
    in_order: bool
    """They are sorted by expert; each is a tile of its own otherwise."""
    order: torch.Tensor
    """``[choices]``: choices by expert, or the expert of each"""
    start: torch.Tensor
    """``[experts + 1]``: the first of each expert in the order, or the expert of each choice"""
    table: torch.Tensor | None = None
    """``[tiles, 4]``: of each tile of ``table_tokens`` rows the expert, its first place in the order, and the end of its
    expert's"""
    table_tokens: int = 0

    def tiles(self, tokens: int) -> int:
        """Returns the most tiles of so many rows that there are."""
        return most_tiles(self.choices, self.experts, tokens) if self.in_order else self.choices

    @property
    def sizes(self) -> dict[str, Any]:
        """Constants of ``tile_rows``."""
        return {"EXPERTS": self.experts, "EXPERTS_P": power_of_two(self.experts), "SORTED": int(self.in_order)}

    def begins(self, tokens: int) -> torch.Tensor:
        """Returns ``start`` of ``tile_rows``, for tiles of so many rows."""
        return self.table if self.table is not None and tokens == self.table_tokens else self.start

    def options(self, tiling: MoeTiling, x: torch.Tensor) -> dict[str, Any]:
        """Launch keywords of both products."""
        tabled = self.table is not None and tiling.tokens == self.table_tokens
        return {
            **self.sizes,
            "SORTED": TABLED.value if tabled else int(self.in_order),
            "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
            "MODE": mode(x.device),
            "TOKENS": tiling.tokens,
            "OUTPUTS": tiling.outputs,
            "CHANNELS": tiling.channels,
            "SWAP": tiling.swap,
            "FETCH": tiling.fetch,
            "BAND": max(_BAND // tiling.tokens, 1),
            "num_warps": tiling.num_warps,
            "num_stages": tiling.num_stages,
            **options(x.device),
        }


def is_sorted(tokens: int, choices: int, count: int) -> bool:
    """Whether the choices of so many tokens among ``count`` experts are sorted: few share one."""
    return tokens > 1 and choices > min(_FEW, count // 4)


def sort_choices(
    experts: torch.Tensor, count: int, batch_invariant: bool, rounding: Rounding | None = None, tokens: int = 0
) -> Routing:
    """Sorts the choices ``experts`` of ``count``, and does the ``rounding``, in the same launch if it is short.

    ``tokens``: rows of the tiles of which sorted choices get a table; 0: none.
    """
    choices = experts.numel()
    some = batch_invariant or is_sorted(len(experts), choices, count)
    beside = some and choices <= _LONG
    if rounding is not None and not beside:
        rounding.launch()
    if not some:
        return Routing(choices, count, False, experts, experts)
    order = torch.empty(choices, dtype=torch.int32, device=experts.device)
    start = torch.empty(count + 1, dtype=torch.int32, device=experts.device)
    if not beside:
        table = _sort_segments(experts, order, start, count, tokens)
        return Routing(choices, count, True, order, start, table, tokens)
    tiles = most_tiles(choices, count, tokens) if tokens else 0
    table = torch.empty(tiles, 4, dtype=torch.int32, device=experts.device) if tokens else None
    given = experts, order, start, start if table is None else table
    chunk = min(_CHUNK, power_of_two(choices))
    keywords = {"EXPERTS": count, "EXPERTS_P": power_of_two(count + 1), "CHUNK": chunk, "TOKENS": tokens, "num_warps": 4}
    if rounding is None:
        _sort[(count,)](*given, choices, tiles, **keywords, **options(experts.device))
    else:
        several, x = rounding.several, rounding.x
        _sort_and_round[(count + cdiv(rounding.count, several),)](
            *given, *rounding.tensors(), choices, tiles, rounding.count, x.stride(0), len(x), **rounding.sizes(several),
            **keywords, **options(experts.device),
        )  # fmt: skip
    return Routing(choices, count, True, order, start, table, tokens)


def _sort_segments(
    experts: torch.Tensor, order: torch.Tensor, start: torch.Tensor, count: int, tokens: int
) -> torch.Tensor | None:
    """Sorts many choices, a program for each segment. Returns the table of their tiles."""
    choices, device = experts.numel(), experts.device
    segment = next(size for most, size in _SEGMENTS if choices <= most)
    segments = cdiv(choices, segment)
    counts = torch.empty(segments, count, dtype=torch.int32, device=device)
    tiles = power_of_two(cdiv(most_tiles(choices, count, tokens), segments)) if tokens else 0
    table = torch.empty(segments * tiles, 4, dtype=torch.int32, device=device) if tokens else None
    sizes = {"EXPERTS": count, "EXPERTS_P": power_of_two(count + 1), "CHUNK": segment, "num_warps": 4, **options(device)}
    _count[(segments,)](experts, counts, choices, **sizes)
    _sort_segment[(segments,)](
        experts, counts, order, start, start if table is None else table, choices, segments, PART=min(_PART, segment),
        TILES=tiles, TOKENS=tokens, **sizes,
    )  # fmt: skip
    return table
