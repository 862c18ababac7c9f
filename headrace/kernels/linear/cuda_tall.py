"""Products of many rows in 16 bits on Hopper GPUs: gate and up with their activation, and any with what adapters add. The
kernel of ``tall.cu``. References: ``torch.nn.functional.linear``, ``headrace.kernels.activation.reference.silu_mul_ref`` and
``headrace.kernels.lora.reference``."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from headrace.kernels import support
from headrace.kernels.cuda_launch import CudaKernel, refusals, tensor_map
from headrace.kernels.linear.cuda_wide import adds
from headrace.kernels.lora import Factors, shrink_rounded
from headrace.kernels.lora.reference import PARTS
from headrace.kernels.support import cdiv

_SOURCE = Path(__file__).with_name("tall.cu")
_KINDS = {torch.bfloat16: 0, torch.float16: 1}
"""Numbers that ``tall.cu`` has for the dtypes."""
_TILES = {True: (256, 192), False: (128, 256)}
"""Rows and lines of a block's tile, with the activation and without it, as ``tall.cu`` has them, ..."""
_CHANNELS, _STAGES, _THREADS = 64, 4, 384
"""... and a block's steps and threads."""
_SIXTEEN = 16
"""Columns of B in a tile."""
_BAND = 8
"""Pairs of tiles that take turns, as measured on an H200; 3 to 6 are as fast within 1 %."""
_FILLED = 0.94
"""Share of what the blocks multiply, in as many turns as they take, that is part of the product: from here on the kernel is
faster than cuBLAS and a kernel for the activation, as measured on an H200 with weights of 6 to 147 million numbers."""
_FILLED_ADAPTED = 0.85, 0.8
"""The same with adapters, which kernels before and behind cuBLAS add, without the activation and with it. Measured with 512 to
8,192 rows of Qwen3 8B."""
_FEW_ROWS = 2048
"""Rows up to which these kernels and cuBLAS are as fast without the activation."""


def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """``silu(gate) * up`` of the halves of ``x W^T``: ``[rows, in] -> [rows, out / 2]``, rounded where separate kernels round.
    None: this one is no faster, or does not take them."""
    if not _takes(x, weight, True, _FILLED):
        return None
    return _product(x, weight, True)


def adapted(x: torch.Tensor, weight: torch.Tensor, factors: Factors) -> torch.Tensor | None:
    """``x W^T`` and what adapters add, to parts of whole tiles: ``[rows, in] -> [rows, out]``. None likewise."""
    if len(x) <= _FEW_ROWS or any(end % _TILES[False][1] for end in factors.ends[:-1]):
        return None
    return _adapted(x, weight, factors, False)


def adapted_gated(x: torch.Tensor, weight: torch.Tensor, factors: Factors) -> torch.Tensor | None:
    """``gated`` of ``adapted``, of parts that are gate and up. None likewise."""
    half = len(weight) // 2
    return _adapted(x, weight, factors, True) if tuple(factors.ends) == (half, 2 * half) else None


def _adapted(x: torch.Tensor, weight: torch.Tensor, factors: Factors, gated: bool) -> torch.Tensor | None:
    b, places = factors.b, factors.places
    if places is None or x.ndim != 2 or not adds(x, weight, factors) or not _takes(x, weight, gated, _FILLED_ADAPTED[gated]):
        return None
    low = shrink_rounded(x, factors.a, places)
    ends = (*factors.ends, *[len(weight)] * PARTS)[: PARTS - 1]
    b_map = tensor_map(b, _TILES[gated][1] // 2, _SIXTEEN)
    return _product(x, weight, gated, b_map, low.data_ptr(), places.data_ptr(), b.shape[2], len(factors.ends), *ends)


def _takes(x: torch.Tensor, weight: torch.Tensor, gated: bool, filled: float) -> bool:
    """Whether the kernel takes the product, and blocks are filled so far."""
    (rows, inputs), lines = x.shape, len(weight)
    if x.dtype not in _KINDS or lines % 16 or inputs % 8 or not support.in_pieces(x, weight) or refusals(x.device):
        return False
    height, width = _TILES[gated]
    tiles, pairs = _tiles(rows, lines, gated), _pairs(x.device)
    return rows * lines > filled * cdiv(tiles, pairs) * pairs * 2 * height * width


def _tiles(rows: int, lines: int, gated: bool) -> int:
    """Tiles of pairs of blocks."""
    height, width = _TILES[gated]
    return cdiv(rows, 2 * height) * cdiv(lines, width)


def _pairs(device: torch.device) -> int:
    return support.resources(device).multiprocessors // 2


def _product(x: torch.Tensor, weight: torch.Tensor, gated: bool, *added: bytes | int) -> torch.Tensor:
    """``added``: the kernel's arguments for what adapters add."""
    (rows, inputs), lines = x.shape, len(weight)
    height, width = _TILES[gated]
    out = lines // 2 if gated else lines
    y = torch.empty(rows, out, dtype=x.dtype, device=x.device)
    maps = tensor_map(x, height, _CHANNELS), tensor_map(weight, width // 2, _CHANNELS)
    sizes = rows, out, cdiv(inputs, _CHANNELS), _BAND
    blocks = 2 * min(_pairs(x.device), _tiles(rows, lines, gated))
    _kernel(x.dtype, gated, bool(added)).launch((blocks, 1, 1), *maps, y.data_ptr(), *sizes, *added)
    return y


@functools.cache
def _kernel(kind: torch.dtype, gated: bool = True, adapted: bool = False) -> CudaKernel:
    height, width = _TILES[gated]
    shared = 1024 + _STAGES * ((height + width) * _CHANNELS * 2 + 16)
    macros = {"KIND": _KINDS[kind], "GATED": int(gated), "ADAPTED": int(adapted)}
    return CudaKernel(_SOURCE, "tall_product", "MMPiiii" + "MPPiiii" * adapted, macros, _THREADS, shared, 2)
