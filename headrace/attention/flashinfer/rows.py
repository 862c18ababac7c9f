"""A step's rows as FlashInfer takes them: query starts and pages of keys, from the host's lengths."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from headrace.attention.backend import StepMetadata
from headrace.kernels.transfer import upload


class PagedRows:
    """The rows of a step whose lengths the host knows exactly; at least one."""

    def __init__(self, step: StepMetadata, block_size: int) -> None:
        starts = step.query_start_host
        self.num_tokens = step.num_tokens
        self.num_rows = step.num_rows
        self.most_queries = int(step.query_counts.max())
        self.lengths = step.seq_lens_host
        self.num_keys = int(self.lengths.sum())
        self.query_start = torch.from_numpy((starts - starts[0]).astype(np.int32))
        self.key_start = torch.from_numpy(np.append(0, np.cumsum(self.lengths)).astype(np.int32))
        self._counts = -(-self.lengths // block_size)
        self.page_start = torch.from_numpy(np.append(0, np.cumsum(self._counts)).astype(np.int32))
        self.last_page = torch.from_numpy(((self.lengths - 1) % block_size + 1).astype(np.int32))
        self._block_size = block_size
        self._device = step.seq_lens.device
        self._tables = step.block_tables
        self._pages: dict[int, torch.Tensor] = {}
        self._tokens: dict[int, torch.Tensor] = {}

    def pages(self, group: int) -> torch.Tensor:
        """``[pages]`` int32: the rows' blocks in a cache group, concatenated."""
        if group not in self._pages:
            row, column = places(self._counts)
            table = self._tables[group]
            index = upload(row * table.shape[1] + column, self._device)
            self._pages[group] = table.reshape(-1)[index]
        return self._pages[group]

    def key_places(self, group: int) -> torch.Tensor:
        """``[keys]`` int64: indices of the rows' keys in a cache group's tokens, concatenated."""
        if group not in self._tokens:
            inside = torch.arange(self._block_size, device=self._device)
            tokens = (self.pages(group).long().unsqueeze(1) * self._block_size + inside).flatten()
            whole = self._counts * self._block_size
            if (whole != self.lengths).any():
                row, token = places(self.lengths)
                tokens = tokens[upload((np.cumsum(whole) - whole)[row] + token, self._device)]
            self._tokens[group] = tokens
        return self._tokens[group]

    @cached_property
    def page_spans(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Index of each page's first key among the rows' keys, ``[pages]`` int64, and its number of keys, int32."""
        row, column = places(self._counts)
        before = column * self._block_size
        count = np.minimum(self._block_size, self.lengths[row] - before).astype(np.int32)
        first = self.key_start.numpy()[row].astype(np.int64) + before
        return upload(first, self._device), upload(count, self._device)


def places(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row and index in the row of every entry, for concatenated rows of ``counts`` entries."""
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
