"""Rows of a captured step: wrappers of FlashInfer's whose buffers stay where they are, planned anew before each replay.

What FlashInfer launches for a plan depends on the number of rows and of tokens alone where it is told that it is captured;
all else is read from the buffers. Nothing waits for the device: what a plan writes on the host has its turn again only
when the device has read it, and on the device the next plan's copies come behind the step that reads the last one's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from headrace.attention.backend import LayerCache
from headrace.attention.flashinfer.kernels import LATENT_WIDTHS, LatentKernel, PagedKernel
from headrace.kernels.pages import gather_pages
from headrace.kernels.transfer import Mark
from headrace.spec import AttentionSpec

TURNS = 2
"""Places on the host that plans are written to in turn."""
WORKSPACE = 512 << 20
"""Bytes for partial results of rows whose keys are split among programs."""
_INTEGERS = 1 << 20
"""Bytes of a plan: a few integers for each tile of queries, of which there are some thousands at most."""


def capturing() -> bool:
    """Whether what is launched now is captured, not run."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@dataclasses.dataclass(frozen=True)
class Place:
    """What is known of rows before any plan."""

    rows: int
    tokens: int
    """The most that they have in all; the decode rows always have all of them."""
    block_size: int
    table_width: int

    def fullest(self) -> tuple[np.ndarray, np.ndarray]:
        """``[rows + 1]``, ``[rows]``: query starts and lengths of rows that have all the tokens, none with a prefix."""
        starts = np.arange(self.rows + 1) * self.tokens // self.rows
        return starts, np.diff(starts)


@dataclasses.dataclass(frozen=True)
class _Turn:
    """One wrapper with the host memory that its plans are made from."""

    wrapper: Any
    query_start: torch.Tensor
    """``[rows + 1]`` int32, pinned like the others."""
    page_start: torch.Tensor
    """``[rows + 1]`` int32"""
    last_page: torch.Tensor
    """``[rows]`` int32: tokens in each row's last page."""
    read: Mark


class PagedReplay:
    """Rows of one geometry, with FlashInfer's fa2. They are planned as full as can be at first.

    Args:
        place: of rows whose ``partial_bytes`` fit in the workspace.
        workspace: ``WORKSPACE`` bytes, which all share.
    """

    def __init__(self, kernel: PagedKernel, spec: AttentionSpec, place: Place, workspace: torch.Tensor) -> None:
        self._kernel, self._spec, self._place = kernel, spec, place
        device, rows = workspace.device, place.rows
        self._query_start, self.page_start = (torch.zeros(rows + 1, dtype=torch.int32, device=device) for _ in range(2))
        self._last_page = torch.ones(rows, dtype=torch.int32, device=device)
        fullest = int((-(-place.fullest()[1] // place.block_size)).sum()) + rows
        self.pages = torch.zeros(max(rows * place.table_width, fullest), dtype=torch.int32, device=device)
        """Null blocks, and in a replay what ``fill`` puts there."""
        self._integers = torch.empty(_INTEGERS, dtype=torch.uint8, device=device)
        self._turns = [self._make_turn(workspace) for _ in range(TURNS)]
        self._turn = 0
        # The first plan of a wrapper is what says how many tokens there may be.
        for _ in range(TURNS):
            self.plan_fullest()

    def plan_fullest(self) -> None:
        """As a capture wants it, where each row sees null blocks alone."""
        self.plan(*self._place.fullest())

    def plan(self, query_start: np.ndarray, seq_lens: np.ndarray) -> None:
        """For the next replay; ``query_start[0]`` is 0. Rows of length 0 see a key of the null block."""
        self._turn = (self._turn + 1) % TURNS
        turn, size = self._turns[self._turn], self._place.block_size
        turn.read.wait()
        lengths = np.maximum(seq_lens, 1)
        turn.query_start.numpy()[:] = query_start
        turn.page_start.numpy()[1:] = np.cumsum(-(-lengths // size))
        turn.last_page.numpy()[:] = (lengths - 1) % size + 1
        spec = self._spec
        turn.wrapper.plan(
            turn.query_start,
            turn.page_start,
            # The pages are written by a kernel of the captured step.
            self.pages[:0],
            turn.last_page,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            size,
            head_dim_vo=spec.v_head_dim,
            causal=True,
            sm_scale=spec.scale,
            window_left=-1 if spec.window is None else spec.window - 1,
            logits_soft_cap=spec.soft_cap,
            q_data_type=self._kernel.dtype,
            kv_data_type=self._kernel.dtype,
            max_token_per_sequence=int(np.diff(query_start).max()),
        )
        turn.read.set()

    def fill(self, table: torch.Tensor) -> None:
        """The pages of rows with block tables ``[rows, table_width]``, as far as the plan says; captured with the step."""
        gather_pages(table, self.page_start, self.pages)

    def run(self, q: torch.Tensor, cache: LayerCache, out: torch.Tensor) -> None:
        """``q [tokens, num_heads, head_dim]`` to ``out [tokens, num_heads, v_head_dim]``; of tokens of no row nothing."""
        self._turns[self._turn].wrapper.run(q, (cache.keys, cache.values), out=out)

    def _make_turn(self, workspace: torch.Tensor) -> _Turn:
        from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

        wrapper = BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=self._query_start,
            paged_kv_indptr_buf=self.page_start,
            paged_kv_indices_buf=self.pages,
            paged_kv_last_page_len_buf=self._last_page,
            backend=self._kernel.variant,
        )
        # All turns write one plan on the device, each from host memory of its own.
        wrapper.reset_workspace_buffer(workspace, self._integers)
        rows, device = self._place.rows, workspace.device

        def pinned(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, pin_memory=device.type == "cuda")

        return _Turn(wrapper, pinned(rows + 1), pinned(rows + 1), pinned(rows), Mark(device))


def partial_bytes(spec: AttentionSpec, place: Place) -> int:
    """The most that FlashInfer takes of the workspace for rows that are captured, whose keys it always splits (its
    scheduler.cuh, PrefillPlan)."""
    queries = place.tokens * spec.group_size
    most = (place.tokens - place.rows + 1) * spec.group_size
    tile = 16 if most <= 16 else 64 if most <= 64 or spec.v_head_dim >= 256 else 128
    multiprocessors = 256
    tiles = max(2 * multiprocessors // spec.num_kv_heads, -(-queries // tile) + place.rows - 1)
    return 4 * spec.num_heads * tiles * tile * (spec.v_head_dim + 1)


class LatentReplay:
    """Decode rows over compressed KV. A plan says where each row's pages begin, so that block tables serve as they are.

    FlashInfer's wrapper has one place on the host for its plans: it is free again when the device has begun the step before.
    """

    def __init__(self, kernel: LatentKernel, spec: AttentionSpec, place: Place, workspace: torch.Tensor) -> None:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        self._kernel, self._spec, self._place = kernel, spec, place
        rows, device = place.rows, workspace.device
        self.pages = torch.zeros(rows, place.table_width, dtype=torch.int32, device=device)
        starts = [torch.zeros(rows + 1, dtype=torch.int32, device=device) for _ in range(2)]
        self._wrapper = BatchMLAPagedAttentionWrapper(
            workspace,
            use_cuda_graph=True,
            qo_indptr=starts[0],
            kv_indptr=starts[1],
            kv_indices=self.pages.view(-1),
            kv_len_arr=torch.zeros(rows, dtype=torch.int32, device=device),
            backend=kernel.variant,
        )
        pinned = device.type == "cuda"
        self._starts = torch.arange(rows + 1, dtype=torch.int32)
        self._starts = self._starts.pin_memory() if pinned else self._starts
        self._page_start = self._starts * place.table_width
        self._page_start = self._page_start.pin_memory() if pinned else self._page_start
        self._lengths = torch.ones(rows, dtype=torch.int32, pin_memory=pinned)
        self._read = Mark(device)
        self.plan_fullest()

    def plan_fullest(self) -> None:
        self.plan(*self._place.fullest())

    def plan(self, query_start: np.ndarray, seq_lens: np.ndarray) -> None:
        """As ``PagedReplay.plan``, of rows of one query each."""
        if not np.array_equal(query_start, self._starts.numpy()):
            raise ValueError("the decode rows of a captured step have a query each")
        self._read.wait()
        self._lengths.numpy()[:] = np.maximum(seq_lens, 1)
        self._wrapper.plan(
            self._starts,
            self._page_start,
            self.pages.view(-1)[:0],
            self._lengths,
            self._spec.num_heads,
            *LATENT_WIDTHS,
            self._place.block_size,
            True,
            self._spec.scale,
            self._kernel.dtype,
            self._kernel.dtype,
        )
        self._read.set()

    def fill(self, table: torch.Tensor) -> None:
        """As ``PagedReplay.fill``."""
        self.pages.copy_(table)

    def run(self, q: torch.Tensor, cache: LayerCache, out: torch.Tensor) -> None:
        """As ``PagedReplay.run``; rotated channels come first in q."""
        self._wrapper.run(*split_latent(q, cache), out=out)


def split_latent(q: torch.Tensor, cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of q and of the cache ``[blocks, block_size, channels]``, first the channels that are values too, then the rotated."""
    rotated = cache.spec.head_dim - cache.spec.v_head_dim
    rows = cache.rows[:, :, 0]
    return q[..., rotated:], q[..., :rotated], rows[..., rotated:], rows[..., :rotated]
