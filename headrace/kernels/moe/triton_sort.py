"""Order of tokens by their experts: a stable counting sort, and the tiles of rows that it makes. Only the device knows how many
tiles an expert has: the host launches the most there can be, and each program finds its expert's tile, or that there is none.
"""

# A kernel's arguments have no types of Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl

from headrace.kernels.kv_cache.triton_fp8 import mode
from headrace.kernels.moe.tiling import MoeTiling, most_tiles
from headrace.kernels.support import power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options

_CHUNK, _LONG_CHUNK = 2048, 8192
"""Choices counted at a time, and where there are more than that."""
_FEW = 32
"""Choices up to which none are sorted: each gets its own tile, if there are enough experts that few tokens share one."""
_BAND = 1024
"""Rows of the tiles that go through the outputs together, so that both factors stay in the cache."""


@launched(do_not_specialize=["choices"])
def _sort(experts, order, start, choices, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """One expert: where its choices begin in the order, and which they are."""
    begin(PDL)
    own = tl.program_id(0)
    before = 0
    mine = 0
    for first in range(0, choices, CHUNK):
        index = first + tl.arange(0, CHUNK)
        expert = tl.load(experts + index, mask=index < choices, other=EXPERTS)
        before += tl.sum((expert < own).to(tl.int32), 0)
        mine += tl.sum((expert == own).to(tl.int32), 0)
    tl.store(start + own, before)
    if own == EXPERTS - 1:
        tl.store(start + EXPERTS, before + mine)
    if mine > 0:
        done = before
        for first in range(0, choices, CHUNK):
            index = first + tl.arange(0, CHUNK)
            hit = (tl.load(experts + index, mask=index < choices, other=EXPERTS) == own).to(tl.int32)
            tl.store(order + done + tl.cumsum(hit, 0) - 1, index, mask=hit == 1)
            done += tl.sum(hit, 0)


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

    Not SORTED, the order is that of the choices, each of which is a tile, and ``start`` is their experts.
    """
    if SORTED:
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

    def tiles(self, tokens: int) -> int:
        """Returns the most tiles of so many rows that there are."""
        return most_tiles(self.choices, self.experts, tokens) if self.in_order else self.choices

    @property
    def sizes(self) -> dict[str, Any]:
        """Constants of ``tile_rows``."""
        return {"EXPERTS": self.experts, "EXPERTS_P": power_of_two(self.experts), "SORTED": self.in_order}

    def options(self, tiling: MoeTiling, x: torch.Tensor) -> dict[str, Any]:
        """Launch keywords of both products."""
        return {
            **self.sizes,
            "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
            "MODE": mode(x.device),
            "TOKENS": tiling.tokens,
            "OUTPUTS": tiling.outputs,
            "CHANNELS": tiling.channels,
            "SWAP": tiling.swap,
            "BAND": max(_BAND // tiling.tokens, 1),
            "num_warps": tiling.num_warps,
            "num_stages": tiling.num_stages,
            **options(x.device),
        }


def sort_choices(experts: torch.Tensor, count: int, batch_invariant: bool) -> Routing:
    choices = experts.numel()
    if not batch_invariant and (len(experts) == 1 or choices <= min(_FEW, count // 4)):
        return Routing(choices, count, False, experts, experts)
    order = torch.empty(choices, dtype=torch.int32, device=experts.device)
    start = torch.empty(count + 1, dtype=torch.int32, device=experts.device)
    many = choices > _LONG_CHUNK
    chunk = _LONG_CHUNK if many else min(_CHUNK, power_of_two(choices))
    warps = 16 if many else 4
    _sort[(count,)](experts, order, start, choices, EXPERTS=count, CHUNK=chunk, num_warps=warps, **options(experts.device))
    return Routing(choices, count, True, order, start)
