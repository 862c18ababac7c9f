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
    blocks = min(132 * tiling.resident, tiles)
    turns = -(-tiles // blocks)
    assert turns * own <= 32 * tiling.warps
    kernel = _kernel(tiling, _KINDS[weight.dtype], _OUT_KINDS[out_dtype], inputs, groups, rounds, turns)
    x_scale, w_scale = (0 if scale is None else scale.data_ptr() for scale in scales or (None, None))
    kernel.launch((blocks, 1, 1), tensor_map(pieces, tiling.run, own, piece), x.data_ptr(), x_scale, w_scale, y.data_ptr(), outputs, tiles)
    return y


@functools.cache
def _kernel(tiling: Tiling, kind: int, out_kind: int, inputs: int, groups: int, rounds: int, turns: int) -> CudaKernel:
    macros = {"KIND": kind, "OUT_KIND": out_kind, "INPUTS": inputs, "LINES": tiling.lines, "GROUPS": groups, "WARPS": tiling.warps}
    macros |= {"ROUNDS": rounds, "STAGES": tiling.stages, "RUN": tiling.run, "RESIDENT": tiling.resident}
    size = 1 if kind == 2 else 2
    shared = tiling.warps * tiling.stages * tiling.run * tiling.lines * 128 + inputs * size + (tiling.warps * tiling.stages + 1) * 8
    shared += max(turns, 1) * groups * 8 * tiling.warps * 4
    return CudaKernel(_SOURCE, "single", "MPPPPii", macros, 32 * tiling.warps, shared)
