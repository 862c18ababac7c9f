"""A step's rows as kernels take them that read no block tables: query starts, pages of keys, copies of keys and values."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from headrace.attention.backend import LayerCache, StepMetadata
from headrace.kernels.kv_cache import gather_numbers
from headrace.kernels.transfer import upload
from headrace.model_spec import AttentionSpec

_COPY_QUERIES = 768
"""Average queries per row from which copying keys and values out of their blocks pays off: fa3 does 677 TFLOP/s on contiguous
ones and 607 on paged ones (32k tokens, 32 and 8 heads of 128, H200)."""
_COPY_BYTES = 512 << 20
"""Largest size of such a copy, which lives for one layer's attention."""


def most_copied(spec: AttentionSpec, dtype: torch.dtype) -> int:
    """The keys of a layer, with their values, that may be copied at once."""
    return _COPY_BYTES // (spec.num_kv_heads * spec.row_width * dtype.itemsize)


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

    def copies_pay(self, cache: LayerCache, dtype: torch.dtype) -> bool:
        """Whether to copy keys and values out of their blocks first."""
        return self.are_long(cache, dtype) and (cache.k_scale is not None or cache.rows.is_contiguous())

    def are_long(self, cache: LayerCache, dtype: torch.dtype) -> bool:
        """Whether rows have so many queries that copies of their keys and values pay off, and there is room for these."""
        return self.num_tokens >= _COPY_QUERIES * self.num_rows and self.num_keys <= most_copied(cache.spec, dtype)

    def copied_pages(self, cache: LayerCache) -> torch.Tensor:
        """``[pages * block_size, kv_heads, head_dim + v_head_dim]``: the rows' blocks, concatenated."""
        # Few wide numbers: where blocks are apart, each has its place computed.
        return cache.rows.view(torch.int64).index_select(0, self.pages(cache.group)).view(cache.rows.dtype).flatten(0, 1)

    def copies(self, cache: LayerCache, dtype: torch.dtype, multiple: int = 1) -> torch.Tensor:
        """``[keys, kv_heads, head_dim + v_head_dim]``: the rows' keys and values, concatenated.

        Up to a multiple of ``multiple`` keys, the last one is repeated: a masked value that is NaN would spoil a sum.
        """
        spec, behind = cache.spec, -self.num_keys % multiple
        if cache.k_scale is None or cache.v_scale is None:
            index = self.key_places(cache.group)
            if behind:
                index = torch.cat((index, index[-1:].expand(behind)))
            # With a given output index_select takes fifteen times as long.
            return cache.rows.flatten(0, 1).index_select(0, index)
        size = (self.num_keys + behind, spec.num_kv_heads, spec.row_width)
        copies = torch.empty(size, dtype=dtype, device=cache.rows.device)
        scales = (cache.k_scale, cache.v_scale)
        written = copies[: self.num_keys]
        gather_numbers(cache.keys, cache.values, *scales, self.pages(cache.group), *self.page_spans, written)
        copies[self.num_keys :] = written[-1:]
        return copies


def places(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row and index in the row of every entry, for concatenated rows of ``counts`` entries."""
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
