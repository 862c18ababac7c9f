"""A's products of 2 to 64 rows, on Hopper GPUs, for products that add what adapters add: the kernel of ``shrink.cu``.
Reference: ``headrace.kernels.lora.reference``.

The product that follows polls a cell in which this kernel says that x is complete, and multiplies its weight by x meanwhile.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path

import torch

from headrace.kernels import support
from headrace.kernels.cuda_launch import CudaKernel
from headrace.kernels.lora.reference import PARTS, Factors
from headrace.kernels.support import cdiv

MAX_PLACES = 64
READY = True
_SOURCE = Path(__file__).with_name("shrink.cu")
SIXTEEN = 16
"""Ranks of a block."""
_SHARES, _CHANNELS = 8, 32
"""Blocks that share the channels, as a cluster, and channels that a warp multiplies at once."""
_CELLS, _CELL = 512, 32
"""Cells, more than launches of which one may begin before another is complete, and numbers of one."""
_turn = itertools.count()


@dataclasses.dataclass(frozen=True)
class MaskedLow:
    """What adapters add to the product of a layer: ``B low``."""

    low: torch.Tensor
    """``[T, columns]``: A's products of the places that any token has, zeros where it is not the token's own."""
    b: torch.Tensor
    """``[places, N, rank]``"""
    places: torch.Tensor
    """``[T]`` int32: token -> place of its adapter, or -1."""
    ends: Sequence[int]
    """End of the outputs of each part."""
    ready: int
    """Address of the cell."""


def takes(x: torch.Tensor, factors: Factors) -> bool:
    """Whether the kernel multiplies x ``[T, K]`` of 16 bits by A, and B suits the tensor memory accelerator."""
    a, b = factors.a, factors.b
    whole = support.in_pieces(x, a, b) and not (x.shape[1] | b.shape[2]) & 7
    few = len(a) <= MAX_PLACES and len(factors.ends) <= PARTS
    return factors.places is not None and whole and few and a.dtype == b.dtype == x.dtype


def shrink(x: torch.Tensor, factors: Factors) -> MaskedLow:
    """Multiplies x ``[T, K]`` by A of each token's adapter, where the kernel ``takes`` them."""
    a, places = factors.a, factors.places
    assert places is not None
    (rows, inputs), parts, rank = x.shape, len(factors.ends), factors.b.shape[2]
    groups = parts * cdiv(rank, SIXTEEN)
    low = torch.empty(rows, len(a) * groups * SIXTEEN, dtype=x.dtype, device=x.device)
    ready = _cells(x.device).data_ptr() + next(_turn) % _CELLS * _CELL * 4
    kernel = _kernel(x.dtype, max(8, support.power_of_two(rows)), inputs, rank, parts, len(a))
    grid = (_SHARES * groups * len(a), 1, 1)
    kernel.launch(grid, x.data_ptr(), a.data_ptr(), places.data_ptr(), low.data_ptr(), ready, rows, x.stride(0), a.stride(0))
    return MaskedLow(low, factors.b, places, factors.ends, ready)


@functools.cache
def _cells(device: torch.device) -> torch.Tensor:
    return torch.zeros(_CELLS * _CELL, dtype=torch.int32, device=device)


@functools.cache
def _kernel(kind: torch.dtype, rows: int, inputs: int, rank: int, parts: int, places: int) -> CudaKernel:
    warps = 4 if inputs <= 8192 else 8
    channels = cdiv(inputs, _SHARES * warps * _CHANNELS) * _CHANNELS
    macros = {"KIND": int(kind == torch.float16), "ROWS": rows, "IN": inputs, "RANK": rank, "PARTS": parts, "PLACES": places}
    macros |= {"SHARES": _SHARES, "WARPS": warps, "CHANNELS": channels, "READY": int(READY)}
    return CudaKernel(_SOURCE, "shrink", "PPPPPiqq", macros, warps * 32, 0, _SHARES)
