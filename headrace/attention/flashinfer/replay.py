"""Rows of a captured step: FlashInfer wrappers with persistent buffers, planned anew before each replay.

In CUDA graph mode FlashInfer's launch depends only on the number of rows and of tokens; all else is read from the buffers.
Nothing waits for the device: a plan's host memory is reused only after the device has read it, and on the device the next
plan's copies run after the step that reads the last plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from headrace.attention.backend import LayerCache, ReplayLengths, StepMetadata
from headrace.attention.compiled import compiling
from headrace.attention.flashinfer.kernels import Kernel, MLAKernel, PagedKernel
from headrace.kernels.pages import gather_pages
from headrace.kernels.transfer import Mark
from headrace.model_spec import AttentionSpec

TURNS = 2
"""Host buffers that plans are written to in turn."""
WORKSPACE = 512 << 20
"""Bytes for partial results of split rows."""
_INTEGERS = 1 << 20
"""Bytes of a plan: a few integers for each of at most some thousand query tiles."""


def capturing() -> bool:
    """Whether the current stream is capturing."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@dataclasses.dataclass(frozen=True)
class Place:
    """The shape of captured rows."""

    rows: int
    tokens: int
    """The most tokens of all rows; decode rows always have all of them."""
    block_size: int
    table_width: int

    def fullest(self) -> tuple[np.ndarray, np.ndarray]:
        """``[rows + 1]``, ``[rows]``: query starts and lengths of rows with all tokens and no prefix."""
        starts = np.arange(self.rows + 1) * self.tokens // self.rows
        return starts, np.diff(starts)


@dataclasses.dataclass(frozen=True)
class _Turn:
    """One wrapper and the host memory of its plans."""

    wrapper: Any
    query_start: torch.Tensor
    """``[rows + 1]`` int32, pinned like the others."""
    page_start: torch.Tensor
    """``[rows + 1]`` int32"""
    last_page: torch.Tensor
    """``[rows]`` int32: tokens in each row's last page."""
    read: Mark


class PagedReplay:
    """Replays rows of one geometry with FlashInfer's fa2. The first plan is the fullest.

    Args:
        place: shape of the rows; their ``partial_bytes`` fit in the workspace.
        workspace: ``WORKSPACE`` bytes, shared by all replays.
    """

    def __init__(self, kernel: PagedKernel, spec: AttentionSpec, place: Place, workspace: torch.Tensor) -> None:
        self._kernel, self._spec, self._place = kernel, spec, place
        device, rows = workspace.device, place.rows
        self._query_start, self.page_start = (torch.zeros(rows + 1, dtype=torch.int32, device=device) for _ in range(2))
        self._last_page = torch.ones(rows, dtype=torch.int32, device=device)
        fullest = int((-(-place.fullest()[1] // place.block_size)).sum()) + rows
        self.pages = torch.zeros(max(rows * place.table_width, fullest), dtype=torch.int32, device=device)
        """Null blocks until ``fill``."""
        self._integers = torch.empty(_INTEGERS, dtype=torch.uint8, device=device)
        self._turns = [self._make_turn(workspace) for _ in range(TURNS)]
        self._turn = 0
        # A wrapper's first plan fixes its maximum number of tokens.
        for _ in range(TURNS):
            self.plan_fullest()

    def plan_fullest(self) -> None:
        """Plans for a capture, in which every row sees only null blocks."""
        self.plan(*self._place.fullest())

    def plan(self, query_start: np.ndarray, seq_lens: np.ndarray) -> None:
        """Plans the next replay; ``query_start[0]`` is 0. Rows of length 0 see a key of the null block."""
        self._turn = (self._turn + 1) % TURNS
        turn, size = self._turns[self._turn], self._place.block_size
        turn.read.wait()
        lengths = np.maximum(seq_lens, 1)
        turn.query_start.numpy()[:] = query_start
        turn.page_start.numpy()[1:] = np.cumsum(-(-lengths // size))
        turn.last_page.numpy()[:] = (lengths - 1) % size + 1
        # A kernel of the captured step writes the pages.
        indices = (turn.query_start, turn.page_start, self.pages[:0], turn.last_page)
        most_queries = int(np.diff(query_start).max())
        self._kernel.plan(turn.wrapper, self._spec, indices, size, max_token_per_sequence=most_queries)
        turn.read.set()

    def fill(self, table: torch.Tensor) -> None:
        """Writes the planned rows' pages from block tables ``[rows, table_width]``; captured with the step."""
        gather_pages(table, self.page_start, self.pages)

    def run(self, q: torch.Tensor, cache: LayerCache, out: torch.Tensor) -> None:
        """``q [tokens, num_heads, head_dim]`` to ``out [tokens, num_heads, v_head_dim]``; skips tokens of no row."""
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
        # All turns write the same device plan, each from its own host memory.
        wrapper.reset_workspace_buffer(workspace, self._integers)
        rows, device = self._place.rows, workspace.device
        query_start, page_start = (_pinned(rows + 1, device) for _ in range(2))
        return _Turn(wrapper, query_start, page_start, _pinned(rows, device), Mark(device))


def _pinned(size: int, device: torch.device) -> torch.Tensor:
    """``[size]`` int32 zeros on the host, which a CUDA device copies asynchronously."""
    return torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")


def partial_bytes(spec: AttentionSpec, place: Place) -> int:
    """The most workspace that FlashInfer uses for captured rows, whose keys it always splits (PrefillPlan in its
    scheduler.cuh)."""
    queries = place.tokens * spec.group_size
    most = (place.tokens - place.rows + 1) * spec.group_size
    tile = 16 if most <= 16 else 64 if most <= 64 or spec.v_head_dim >= 256 else 128
    multiprocessors = 256
    tiles = max(2 * multiprocessors // spec.num_kv_heads, -(-queries // tile) + place.rows - 1)
    return 4 * spec.num_heads * tiles * tile * (spec.v_head_dim + 1)


class MLAReplay:
    """Replays MLA decode rows. A plan holds the start of each row's pages, so block tables serve unchanged.

    FlashInfer's wrapper has one host buffer for its plans, which is free once the device has begun the step before.
    """

    def __init__(self, kernel: MLAKernel, spec: AttentionSpec, place: Place, workspace: torch.Tensor) -> None:
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
        self._starts, self._page_start = (_pinned(rows + 1, device) for _ in range(2))
        torch.arange(rows + 1, dtype=torch.int32, out=self._starts)
        torch.mul(self._starts, place.table_width, out=self._page_start)
        self._lengths = _pinned(rows, device)
        self._read = Mark(device)
        self.plan_fullest()

    def plan_fullest(self) -> None:
        self.plan(*self._place.fullest())

    def plan(self, query_start: np.ndarray, seq_lens: np.ndarray) -> None:
        """Plans like ``PagedReplay.plan``, for rows of one query each."""
        if not np.array_equal(query_start, self._starts.numpy()):
            raise ValueError("the decode rows of a captured step must have one query each")
        self._read.wait()
        self._lengths.numpy()[:] = np.maximum(seq_lens, 1)
        indices = (self._starts, self._page_start, self.pages.view(-1)[:0], self._lengths)
        self._kernel.plan(self._wrapper, self._spec, indices, self._place.block_size)
        self._read.set()

    def fill(self, table: torch.Tensor) -> None:
        """Copies the table like ``PagedReplay.fill``."""
        self.pages.copy_(table)

    def run(self, q: torch.Tensor, cache: LayerCache, out: torch.Tensor) -> None:
        """Attends like ``PagedReplay.run``; rotated channels come first in q."""
        self._wrapper.run(*split_mla(q, cache), out=out)


def split_mla(q: torch.Tensor, cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Splits q and the cache ``[blocks, block_size, channels]`` into latent channels and rotated ones."""
    rotated = cache.spec.head_dim - cache.spec.v_head_dim
    rows = cache.rows[:, :, 0]
    return q[..., rotated:], q[..., :rotated], rows[..., rotated:], rows[..., :rotated]


Replay = TypeVar("Replay", PagedReplay, MLAReplay)


class Replays:
    """Replays of captured steps by shape and geometry. Each is created, and planned, before its step is captured."""

    def __init__(self) -> None:
        self._by_shape: dict[tuple[int, int], dict[object, Any]] = {}
        """Replays by numbers of rows and tokens. Captured rows of equal counts are never in one step, so they share plans."""
        self._filled: set[object] = set()
        """Keys whose pages were filled in this step."""
        self._missed: set[Kernel] = set()
        """Kernels that were not ready when a step that could use them was captured."""

    @property
    def graph_version(self) -> int:
        """See ``AttentionBackend.graph_version``."""
        return sum(compiling(kernel).ready for kernel in self._missed)

    def next_step(self) -> None:
        self._filled.clear()

    def replay(
        self, step: StepMetadata, cache: LayerCache, kernel: Kernel, key: object, make: Callable[[Place], Replay | None]
    ) -> Replay | None:
        """Replay for a bounded step, its pages filled; None if the kernel is not ready or does not fit such rows.

        Args:
            key: layers of equal keys share plans.
            make: returns None where the kernel does not fit such rows.
        """
        shape = (step.num_rows, step.num_tokens)
        by_key = self._by_shape.setdefault(shape, {})
        first = key not in self._filled
        if first and not capturing():
            if not compiling(kernel).ready:
                self._missed.add(kernel)
            elif key not in by_key:
                by_key[key] = make(Place(*shape, cache.block_size, step.block_tables[cache.group].shape[1]))
            elif by_key[key] is not None:
                by_key[key].plan_fullest()
        replay: Replay | None = by_key.get(key)
        if first and replay is not None:
            self._filled.add(key)
            replay.fill(step.block_tables[cache.group])
        return replay

    def prepare_replay(self, lengths: ReplayLengths) -> None:
        """See ``AttentionBackend.prepare_replay``."""
        starts = lengths.query_start
        shape = (len(lengths.seq_lens), lengths.end - int(starts[0]))
        for replay in filter(None, self._by_shape.get(shape, {}).values()):
            replay.plan(starts - starts[0], lengths.seq_lens)
