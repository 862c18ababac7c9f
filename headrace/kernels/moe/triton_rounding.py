"""Rounding of the rows that experts multiply. Reference: ``headrace.kernels.moe.codes``."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl

from headrace.kernels.kv_cache.triton_fp8 import mode, quantized, scale_of
from headrace.kernels.moe.codes import ExpertCodes
from headrace.kernels.support import cdiv, power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options

_ROUNDED, _SPREAD = 2048, 1024
"""Numbers that a program rounds, and groups of rows up to which it rounds one of them."""


@triton.jit
def round_groups(
    item, count, x, given, codes, scales, x_row, column, IN: tl.constexpr, GROUP: tl.constexpr, GROUP_P: tl.constexpr,
    GROUPS: tl.constexpr, SEVERAL: tl.constexpr, STATIC: tl.constexpr, MODE: tl.constexpr
):  # fmt: skip
    """Rounds ``SEVERAL`` groups of channels of rows, those numbered ``item`` of ``count``."""
    row, group = item // GROUPS, (item % GROUPS).to(tl.int32)
    within = tl.arange(0, GROUP_P)
    channel = group[:, None] * GROUP + within[None, :]
    mask = (item < count)[:, None] & (within < GROUP)[None, :] & (channel < IN)
    value = tl.load(x + row[:, None] * x_row + channel, mask=mask, other=0.0).to(tl.float32)
    if STATIC:
        scale = tl.load(given + group * 0)
    else:
        scale = scale_of(value, 1)
        tl.store(scales + group * column + row, scale, mask=item < count)
    rounded = quantized(value, tl.broadcast_to(scale[:, None], (SEVERAL, GROUP_P)), MODE)
    tl.store(codes + row[:, None] * IN + channel, rounded, mask=mask)


@launched(do_not_specialize=["count", "column"])
def _round_rows(
    x, given, codes, scales, count, x_row: tl.int64, column: tl.int64, IN: tl.constexpr, GROUP: tl.constexpr,
    GROUP_P: tl.constexpr, GROUPS: tl.constexpr, SEVERAL: tl.constexpr, STATIC: tl.constexpr, MODE: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    begin(PDL)
    item = tl.program_id(0).to(tl.int64) * SEVERAL + tl.arange(0, SEVERAL)
    round_groups(item, count, x, given, codes, scales, x_row, column, IN, GROUP, GROUP_P, GROUPS, SEVERAL, STATIC, MODE)


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Rows that a kernel rounds, and where it writes them."""

    x: torch.Tensor
    codes: torch.Tensor
    """``[T, K]`` uint8 that hold e4m3"""
    scales: torch.Tensor
    """``[groups, T]``, or the given one"""
    held: ExpertCodes

    @property
    def group(self) -> int:
        return min(self.held.x_group or self.x.shape[1], self.x.shape[1])

    @property
    def count(self) -> int:
        """Groups of all rows."""
        return len(self.x) * cdiv(self.x.shape[1], self.group)

    @property
    def several(self) -> int:
        """Groups of a program that rounds as many numbers as are fast."""
        return max(_ROUNDED // power_of_two(self.group), 1)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.x, self.scales, self.codes, self.scales

    def sizes(self, several: int) -> dict[str, Any]:
        """Constants of ``round_groups``."""
        width, group = self.x.shape[1], self.group
        return {
            "IN": width,
            "GROUP": group,
            "GROUP_P": power_of_two(group),
            "GROUPS": cdiv(width, group),
            "SEVERAL": several,
            "STATIC": self.held.x_scale is not None,
            "MODE": mode(self.x.device),
        }

    def launch(self) -> None:
        # Few rows are spread over all processors; many are more numbers at a time.
        several = self.several if self.count > _SPREAD else 1
        warps = min(max(several * power_of_two(self.group) // 512, 1), 8)
        _round_rows[(cdiv(self.count, several),)](
            *self.tensors(), self.count, self.x.stride(0), len(self.x), **self.sizes(several), num_warps=warps,
            **options(self.x.device),
        )  # fmt: skip


def rounding_of(x: torch.Tensor, held: ExpertCodes) -> Rounding:
    """Makes the tensors of rounded rows, which nothing has filled yet."""
    (rows, width), given = x.shape, held.x_scale
    codes = torch.empty(rows, width, dtype=torch.uint8, device=x.device)
    groups = cdiv(width, min(held.x_group or width, width))
    scales = torch.empty(groups, rows, dtype=torch.float32, device=x.device) if given is None else given
    return Rounding(x, codes, scales, held)


def round_rows(x: torch.Tensor, held: ExpertCodes) -> tuple[torch.Tensor, torch.Tensor]:
    """Kernel version of ``ExpertCodes.round_rows``.

    Returns:
        codes ``[T, K]`` uint8 that hold e4m3; scales ``[groups, T]``, or the given one.
    """
    made = rounding_of(x, held)
    made.launch()
    return made.codes, made.scales
