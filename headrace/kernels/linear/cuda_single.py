"""Products of one row in CUDA C++: the kernel of ``single.cu``."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import torch

from headrace.kernels.cuda_launch import CudaKernel, tensor_map

_SOURCE = Path(__file__).with_name("single.cu")
_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float8_e4m3fn: 2}
_OUT_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_PIECE = 128


@dataclasses.dataclass(frozen=True)
class Tiling:
    lines: int
    warps: int


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    out_dtype: torch.dtype,
    tiling: Tiling,
    *,
    scales: tuple[torch.Tensor | None, torch.Tensor] | None = None,
    gated: bool = False,
) -> torch.Tensor:
    outputs, inputs = weight.shape
    groups = 2 if gated else 1
    outputs //= groups
    own = tiling.lines // groups
    y = torch.empty(1, outputs, dtype=out_dtype, device=x.device)
    piece = _PIECE // weight.itemsize
    pieces = weight.view(len(weight), inputs // piece, piece).permute(1, 0, 2)
    mine = inputs // piece // tiling.warps
    rounds = 0 if x.itemsize == weight.itemsize else 1 + _KINDS[x.dtype]
    kernel = _kernel(tiling, _KINDS[weight.dtype], _OUT_KINDS[out_dtype], inputs, groups, rounds)
    x_scale, w_scale = (0 if scale is None else scale.data_ptr() for scale in scales or (None, None))
    grid = (-(-outputs // own), 1, 1)
    kernel.launch(grid, tensor_map(pieces, mine, own, piece), x.data_ptr(), x_scale, w_scale, 0, y.data_ptr(), outputs)
    return y


@functools.cache
def _kernel(tiling: Tiling, kind: int, out_kind: int, inputs: int, groups: int, rounds: int = 0) -> CudaKernel:
    macros = {"KIND": kind, "OUT_KIND": out_kind, "INPUTS": inputs, "LINES": tiling.lines, "GROUPS": groups, "WARPS": tiling.warps, "ROUNDS": rounds}
    size = 1 if kind == 2 else 2
    shared = (tiling.lines + 1) * inputs * size + tiling.warps * (groups * 32 + 8) + 8
    return CudaKernel(_SOURCE, "single", "MPPPPPi", macros, 32 * tiling.warps, shared)
