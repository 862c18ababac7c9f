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
    stages: int = 3
    run: int = 4
    resident: int = 2
    draws: bool = False


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
    rounds = 0 if x.itemsize == weight.itemsize else 1 + _KINDS[x.dtype]
    tiles = -(-outputs // own)
    most = min(132 * tiling.resident, tiles)
    turns = -(-tiles // most)
    blocks = -(-tiles // turns)
    loads = inputs // piece // tiling.warps // tiling.run
    fixed = tiling.stages // loads + 1
    draws = tiling.draws and tiling.stages % loads == 0 and tiles > fixed * most
    if draws:
        blocks, flush = most, 16
    else:
        fixed = flush = turns
    assert flush * own <= 32 * tiling.warps
    kernel = _kernel(tiling, _KINDS[weight.dtype], _OUT_KINDS[out_dtype], inputs, groups, rounds, fixed, draws, flush)
    x_scale, w_scale = (0 if scale is None else scale.data_ptr() for scale in scales or (None, None))
    kernel.launch((blocks, 1, 1), tensor_map(pieces, tiling.run, own, piece), x.data_ptr(), x_scale, w_scale, y.data_ptr(), outputs, tiles,
        _cells(x.device).data_ptr(),
    )
    return y


@functools.cache
def _cells(device):
    return torch.zeros(64, dtype=torch.int32, device=device)


@functools.cache
def _kernel(tiling, kind, out_kind, inputs, groups, rounds, fixed, draws, flush) -> CudaKernel:
    macros = {"KIND": kind, "OUT_KIND": out_kind, "INPUTS": inputs, "LINES": tiling.lines, "GROUPS": groups, "WARPS": tiling.warps}
    macros |= {"ROUNDS": rounds, "STAGES": tiling.stages, "RUN": tiling.run, "RESIDENT": tiling.resident}
    macros |= {"FIXED": fixed, "DRAWS": int(draws), "FLUSH": flush}
    size = 1 if kind == 2 else 2
    shared = tiling.warps * tiling.stages * tiling.run * tiling.lines * 128 + inputs * size + (tiling.warps * tiling.stages + 1) * 8
    shared += flush * groups * 8 * tiling.warps * 4 + 32 * 4 + flush * tiling.lines * 4
    return CudaKernel(_SOURCE, "single", "MPPPPiiP", macros, 32 * tiling.warps, shared)
