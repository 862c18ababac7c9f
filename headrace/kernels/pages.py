"""Block tables without gaps: the rows' blocks one row behind the other, as FlashInfer takes them."""

from __future__ import annotations

import torch

from headrace.kernels import gpu


def gather_pages(table: torch.Tensor, page_start: torch.Tensor, out: torch.Tensor) -> None:
    """Writes row after row's first blocks into ``out [P]`` int32; what is behind the last row's stays as it is.

    On a GPU nothing waits for ``page_start``, so that it can be captured.

    Args:
        table: ``[R, B]`` int32, any stride between rows.
        page_start: ``[R + 1]`` int32: row -> its first place in ``out``. Of places beyond B blocks none is written.
    """
    if gpu.takes(table):
        gpu.kernels("pages").gather_pages(table, page_start, out)
        return
    counts = page_start.diff().long()
    row = torch.repeat_interleave(counts)
    column = torch.arange(len(row), device=table.device) - (page_start[:-1].long() - page_start[0])[row]
    there = column < table.shape[1]
    out[(page_start[:-1].long()[row] + column)[there]] = table[row[there], column[there]]
