"""Some rows of a step as FlashInfer wants them: where their queries are, and their keys' pages, from the host's lengths."""

from __future__ import annotations

import numpy as np
import torch

from headrace.attention.backend import StepMetadata
from headrace.kernels.transfer import upload


class Rows:
    """The rows ``first`` to ``end`` of a step whose lengths the host knows exactly. There is one at least."""

    def __init__(self, step: StepMetadata, first: int, end: int, block_size: int) -> None:
        starts = step.query_start_host[first : end + 1]
        self.tokens = slice(int(starts[0]), int(starts[-1]))
        self.num_tokens = int(starts[-1] - starts[0])
        self.num_rows = end - first
        self.most_queries = int(np.diff(starts).max())
        self.lengths = step.seq_lens_host[first:end]
        self.num_keys = int(self.lengths.sum())
        self.query_start = torch.from_numpy((starts - starts[0]).astype(np.int32))
        self.key_start = torch.from_numpy(np.append(0, np.cumsum(self.lengths)).astype(np.int32))
        self._counts = -(-self.lengths // block_size)
        self.page_start = torch.from_numpy(np.append(0, np.cumsum(self._counts)).astype(np.int32))
        self.last_page = torch.from_numpy(((self.lengths - 1) % block_size + 1).astype(np.int32))
        self._first, self._block_size = first, block_size
        self._device = step.seq_lens.device
        self._tables = step.block_tables
        self._pages: dict[int, torch.Tensor] = {}
        self._tokens: dict[int, torch.Tensor] = {}
        self._spans: tuple[torch.Tensor, torch.Tensor] | None = None

    def pages(self, group: int) -> torch.Tensor:
        """``[pages]`` int32: the rows' blocks in a cache group, one row behind the other."""
        if group not in self._pages:
            row, column = places(self._counts)
            table = self._tables[group]
            index = upload((row + self._first) * table.shape[1] + column, self._device)
            self._pages[group] = table.reshape(-1)[index]
        return self._pages[group]

    def key_places(self, group: int) -> torch.Tensor:
        """``[keys]`` int64: where in a cache group's tokens the rows' are, one row behind the other."""
        if group not in self._tokens:
            inside = torch.arange(self._block_size, device=self._device)
            found = (self.pages(group).long().unsqueeze(1) * self._block_size + inside).flatten()
            whole = self._counts * self._block_size
            if (whole != self.lengths).any():
                row, token = places(self.lengths)
                found = found[upload((np.cumsum(whole) - whole)[row] + token, self._device)]
            self._tokens[group] = found
        return self._tokens[group]

    @property
    def page_spans(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each page, the place of its first key among the rows' keys, ``[pages]`` int64, and how many there are, int32."""
        if self._spans is None:
            row, column = places(self._counts)
            before = column * self._block_size
            count = np.minimum(self._block_size, self.lengths[row] - before).astype(np.int32)
            first = self.key_start.numpy()[row].astype(np.int64) + before
            self._spans = upload(first, self._device), upload(count, self._device)
        return self._spans


def places(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of rows that have so many entries each, one row behind the other: every entry's row, and its place in it."""
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
