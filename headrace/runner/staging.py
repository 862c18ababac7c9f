"""StagedTable: a device table whose cells the host writes in runs, all of a step's at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from headrace.kernels.transfer import upload


class StagedTable:
    """``tensor [rows, width]`` int32, zeros at first. Between two ``apply`` a cell may be staged once."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.tensor = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self.width = width
        self._starts: list[int] = []
        self._runs: list[Sequence[int]] = []

    def stage(self, row: int, start: int, values: Sequence[int]) -> None:
        """``tensor[row, start : start + len(values)] = values``, later."""
        self._starts.append(row * self.width + start)
        self._runs.append(values)

    def clear(self, rows: torch.Tensor) -> None:
        """Zeros whole rows, at once."""
        self.tensor.index_fill_(0, rows, 0)

    def apply(self) -> None:
        """Does what was staged."""
        if not self._runs:
            return
        lengths = np.fromiter(map(len, self._runs), dtype=np.int64, count=len(self._runs))
        total = int(lengths.sum())
        first = np.array(self._starts, dtype=np.int64) - (np.cumsum(lengths) - lengths)
        places = np.repeat(first, lengths) + np.arange(total)
        values = np.empty(total, dtype=np.int32)
        end = 0
        for run in self._runs:
            start, end = end, end + len(run)
            values[start:end] = run
        device = self.tensor.device
        self.tensor.view(-1).index_copy_(0, upload(places, device), upload(values, device))
        self._starts.clear()
        self._runs.clear()
