"""Block tables as FlashInfer takes them: the rows' blocks concatenated without gaps."""

from __future__ import annotations

import torch


def gather_pages(table: torch.Tensor, page_start: torch.Tensor, out: torch.Tensor) -> None:
    """Concatenates the rows' first blocks into ``out [P]`` int32; entries after the last row's keep their values.

    On a GPU nothing waits for ``page_start``, so it can be captured.

    Args:
        table: ``[R, B]`` int32, any stride between rows.
        page_start: ``[R + 1]`` int32: row -> its first place in ``out``. Places beyond B blocks are not written.
    """
    counts = page_start.diff().long()
    row = torch.repeat_interleave(counts)
    column = torch.arange(len(row), device=table.device) - (page_start[:-1].long() - page_start[0])[row]
    there = column < table.shape[1]
    out[(page_start[:-1].long()[row] + column)[there]] = table[row[there], column[there]]
