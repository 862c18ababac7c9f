"""Gate and up of many rows in 16 bits, with their activation, on Hopper GPUs: the kernel of ``tall.cu``. References:
``torch.nn.functional.linear`` and ``headrace.kernels.activation.reference.silu_mul_ref``."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from headrace.kernels import support
from headrace.kernels.cuda_launch import CudaKernel, refusals, tensor_map
from headrace.kernels.support import cdiv

_SOURCE = Path(__file__).with_name("tall.cu")
_KINDS = {torch.bfloat16: 0, torch.float16: 1}
"""Numbers that ``tall.cu`` has for the dtypes."""
_ROWS, _LINES, _CHANNELS, _STAGES, _THREADS = 256, 192, 64, 4, 384
"""A block's tile and steps, as ``tall.cu`` has them."""
_SHARED = 1024 + _STAGES * ((_ROWS + _LINES) * _CHANNELS * 2 + 16)
_BAND = 8
"""Pairs of tiles that take turns, as measured on an H200; 3 to 6 are as fast within 1 %."""
_FILLED = 0.94
"""Share of what the blocks multiply, in as many turns as they take, that is part of the product: from here on the kernel is
faster than cuBLAS and a kernel for the activation, as measured on an H200 with weights of 6 to 147 million numbers."""


def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """``silu(gate) * up`` of the halves of ``x W^T``: ``[rows, in] -> [rows, out / 2]``, rounded where separate kernels round.
    None: this one is no faster, or does not take them."""
    (rows, inputs), lines = x.shape, len(weight)
    if x.dtype not in _KINDS or lines % 16 or inputs % 8 or not support.in_pieces(x, weight) or refusals(x.device):
        return None
    pairs = support.resources(x.device).multiprocessors // 2
    tiles = cdiv(rows, 2 * _ROWS) * cdiv(lines, _LINES)
    if rows * lines <= _FILLED * cdiv(tiles, pairs) * pairs * 2 * _ROWS * _LINES:
        return None
    y = torch.empty(rows, lines // 2, dtype=x.dtype, device=x.device)
    maps = tensor_map(x, _ROWS, _CHANNELS), tensor_map(weight, _LINES // 2, _CHANNELS)
    sizes = rows, lines // 2, cdiv(inputs, _CHANNELS), _BAND
    _kernel(x.dtype).launch((2 * min(pairs, tiles), 1, 1), *maps, y.data_ptr(), *sizes)
    return y


@functools.cache
def _kernel(kind: torch.dtype) -> CudaKernel:
    return CudaKernel(_SOURCE, "tall_gated", "MMPiiii", {"KIND": _KINDS[kind]}, _THREADS, _SHARED, 2)
