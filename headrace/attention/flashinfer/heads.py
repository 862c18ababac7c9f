"""Dense and streaming heads of a prompt by FlashInfer, where only the device knows which heads these are."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import numpy as np
import torch

from headrace.attention.backend import Scratch
from headrace.attention.compiled import compiling
from headrace.attention.flashinfer import kernels
from headrace.attention.flashinfer.attention import Wrapper, Wrappers
from headrace.attention.flashinfer.kernels import PagedKernel
from headrace.attention.paged_rows import PagedRows
from headrace.kernels.transfer import upload
from headrace.model_spec import AttentionSpec

_QUERIES = 16384
"""Queries of the row from which a launch for each KV head is worth its while."""
_INTEGERS = 4 << 20
"""Bytes of a plan: room for 128 bytes of each of 32768 tiles."""
_UNUSED = 1 << 10
"""Bytes of the workspace for partial results, which fa3 has none of."""


class HeadsByFlashInfer(abc.ABC):
    """Runs fa3 once for each KV head, with its query heads, over copies of keys and values.

    FlashInfer's plan lists the tiles of queries that each program computes. Multiplied by 0 it lists none: so a head is
    switched off without waiting for the device.
    """

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._wrappers = Wrappers()
        self._plans: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Integers of a wrapper's plan, by wrapper's id: those that it runs by, and those that it planned."""

    def next_step(self) -> None:
        self._wrappers.next_step()

    def kernel(self, spec: AttentionSpec, rows: PagedRows, q: torch.Tensor) -> PagedKernel | None:
        """The kernel that runs the rows; None: there is none yet, or it does not pay off."""
        if rows.num_rows > 1 or rows.num_tokens < _QUERIES or kernels.refusals(str(q.device), str(q.dtype)[6:]):
            return None
        kernel = self.wanted(spec, q.dtype, q.device)
        return kernel if kernel.variant == "fa3" and compiling(kernel).ready else None

    @abc.abstractmethod
    def wanted(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> PagedKernel:
        """The kernel of a layer, which is of no use unless it is fa3."""

    def run(
        self,
        kernel: PagedKernel,
        spec: AttentionSpec,
        rows: PagedRows,
        q: torch.Tensor,
        copies: torch.Tensor,
        chosen: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Fills the output of the chosen heads.

        Args:
            q: ``[T, num_heads, head_dim]``, of the one row.
            copies: ``[keys, kv_heads, head_dim + v_head_dim]``, contiguous, and more up to a multiple of a block.
            chosen: ``[kv_heads]`` int32: 1 or 0.
            out: ``[T, num_heads, v_head_dim]``
        """
        group = spec.group_size
        wrapper = self._wrapper(kernel, spec, rows, q)
        active, planned = self._plans[id(wrapper)]
        for head in range(spec.num_kv_heads):
            torch.mul(planned, chosen[head], out=active)
            own = slice(head * group, (head + 1) * group)
            self._launch(wrapper.run, rows, q[:, own], copies[:, head : head + 1], spec.head_dim, out[:, own])

    def _wrapper(self, kernel: PagedKernel, spec: AttentionSpec, rows: PagedRows, q: torch.Tensor) -> Wrapper:
        space = self._scratch.take("FlashInfer, heads of one KV head", _UNUSED, q.device)
        single = dataclasses.replace(spec, num_heads=spec.group_size, num_kv_heads=1)

        def make() -> Wrapper:
            wrapper = Wrapper(self._make(space, kernel.variant), q.device, False)
            integers = torch.zeros(_INTEGERS, dtype=torch.uint8, device=q.device)
            wrapper.run.reset_workspace_buffer(space, integers)
            self._plans[id(wrapper)] = integers.view(torch.int32), torch.empty_like(integers).view(torch.int32)
            return wrapper

        def plan(wrapper: Wrapper) -> None:
            self._plan(wrapper.run, kernel, single, rows, q.device)
            active, planned = self._plans[id(wrapper)]
            planned.copy_(active)

        return self._wrappers.planned((spec.group_size, spec.scale, kernel), make, plan)

    @abc.abstractmethod
    def _make(self, space: torch.Tensor, variant: str) -> Any:
        """FlashInfer's wrapper."""

    @abc.abstractmethod
    def _plan(self, run: Any, kernel: PagedKernel, single: AttentionSpec, rows: PagedRows, device: torch.device) -> None:
        """Plans a wrapper for the query heads of one KV head."""

    @abc.abstractmethod
    def _launch(
        self, run: Any, rows: PagedRows, q: torch.Tensor, key_values: torch.Tensor, width: int, out: torch.Tensor
    ) -> None:
        """Runs a planned wrapper.

        Args:
            key_values: ``[keys, 1, head_dim + v_head_dim]``, and more up to a multiple of a block.
            width: ``head_dim``.
        """


class DenseHeads(HeadsByFlashInfer):
    """Heads that attend to all keys."""

    def wanted(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> PagedKernel:
        return kernels.for_contiguous(spec, dtype, device) or kernels.for_prompts(spec, dtype, device)

    def _make(self, space: torch.Tensor, variant: str) -> Any:
        from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper

        return BatchPrefillWithRaggedKVCacheWrapper(space, "NHD", backend=variant)

    def _plan(self, run: Any, kernel: PagedKernel, single: AttentionSpec, rows: PagedRows, device: torch.device) -> None:
        kernel.plan(run, single, (rows.query_start, rows.key_start))

    def _launch(
        self, run: Any, rows: PagedRows, q: torch.Tensor, key_values: torch.Tensor, width: int, out: torch.Tensor
    ) -> None:
        keys = key_values[: rows.num_keys]
        run.run(q, keys[..., :width], keys[..., width:], out=out)


class StreamingHeads(HeadsByFlashInfer):
    """Heads that attend to the first and the nearest blocks.

    To FlashInfer each block of queries is a separate sequence, whose page table lists the blocks that it sees. The queries
    are the sequence's last tokens, so its causal mask is the prompt's.
    """

    def __init__(self, scratch: Scratch, block: int, sink_blocks: int, local_blocks: int) -> None:
        super().__init__(scratch)
        self._block, self._sink_blocks, self._local_blocks = block, sink_blocks, local_blocks

    def kernel(self, spec: AttentionSpec, rows: PagedRows, q: torch.Tensor) -> PagedKernel | None:
        aligned = (int(rows.lengths[0]) - rows.num_tokens) % self._block == 0
        return super().kernel(spec, rows, q) if aligned else None

    def wanted(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> PagedKernel:
        return kernels.for_prompts(spec, dtype, device)

    def _make(self, space: torch.Tensor, variant: str) -> Any:
        from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

        return BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend=variant)

    def _plan(self, run: Any, kernel: PagedKernel, single: AttentionSpec, rows: PagedRows, device: torch.device) -> None:
        block, length = self._block, int(rows.lengths[0])
        query_start, page_start, pages, last = streamed_pages(
            rows.num_tokens, length, block, self._sink_blocks, self._local_blocks
        )
        indices = (torch.from_numpy(query_start), torch.from_numpy(page_start), upload(pages, device), torch.from_numpy(last))
        kernel.plan(run, single, indices, block, max_token_per_sequence=min(block, rows.num_tokens))

    def _launch(
        self, run: Any, rows: PagedRows, q: torch.Tensor, key_values: torch.Tensor, width: int, out: torch.Tensor
    ) -> None:
        pages = key_values.view(-1, self._block, *key_values.shape[1:])
        run.run(q, (pages[..., :width], pages[..., width:]), out=out)


def streamed_pages(
    num_tokens: int, length: int, block: int, sink_blocks: int, local_blocks: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the keys that streaming heads see, by blocks of a prompt's last ``num_tokens`` tokens; the first is a block's
    first.

    Returns:
        Where each block's queries begin and where its pages begin, both ``[blocks + 1]``; its pages, concatenated; and the
        tokens of its last page, ``[blocks]``. All int32.
    """
    first, end = (length - num_tokens) // block, -(-length // block)
    own = np.arange(first, end)
    nearest = np.maximum(own - local_blocks + 1, 0)
    sinks = np.minimum(nearest, sink_blocks)
    counts = sinks + own + 1 - nearest
    page_start = np.append(0, np.cumsum(counts))
    index = np.arange(page_start[-1]) - np.repeat(page_start[:-1], counts)
    gap = np.repeat(nearest - sinks, counts)
    pages = index + np.where(index < np.repeat(sinks, counts), 0, gap)
    query_start = np.minimum(np.arange(len(own) + 1) * block, num_tokens)
    last = np.minimum(length - own * block, block)
    return tuple(numbers.astype(np.int32) for numbers in (query_start, page_start, pages, last))  # type: ignore[return-value]
