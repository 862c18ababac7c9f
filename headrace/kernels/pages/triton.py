"""The blocks of all rows, concatenated, in one launch. Reference: ``headrace.kernels.pages.reference``."""

from __future__ import annotations

import torch
import triton.language as tl

from headrace.kernels.support import cdiv
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options

_BLOCK = 1024
"""Columns of a block table of one program."""


@launched(do_not_specialize=["width"], do_not_specialize_on_alignment=["table", "page_start"])
def _gather_pages(
    table,  # [R, B] int32
    page_start,  # [R + 1] int32
    out,  # [P] int32
    width,
    table_row: tl.int64,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0)
    first = tl.load(page_start + row).to(tl.int64)
    count = tl.load(page_start + row + 1).to(tl.int64) - first
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < tl.minimum(count, width)
    blocks = tl.load(table + row.to(tl.int64) * table_row + column, mask=there, other=0)
    tl.store(out + first + column, blocks, mask=there)


def gather_pages(table: torch.Tensor, page_start: torch.Tensor, out: torch.Tensor) -> None:
    """Kernel version of ``headrace.kernels.pages.gather_pages``."""
    rows, width = table.shape
    _gather_pages[(rows, cdiv(width, _BLOCK))](
        table, page_start, out, width, table.stride(0), BLOCK=_BLOCK, num_warps=4, **options(table.device)
    )
