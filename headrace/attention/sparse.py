"""Block-sparse attention in prompts: the backend of rows that attend sparsely, and its composition with a layer's usual one."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from headrace.attention import selectors
from headrace.attention.backend import AttentionBackend, AttentionInputs, LayerCache, Scratch, StepMetadata
from headrace.attention.compose import WithUsual, output_of
from headrace.attention.flashinfer.heads import DenseHeads, HeadsByFlashInfer, StreamingHeads
from headrace.attention.paged_rows import PagedRows
from headrace.attention.sparse_rows import SparseRows
from headrace.config import SparseConfig
from headrace.kernels import support
from headrace.kernels.sparse import (
    ELSEWHERE,
    BlockMeans,
    KeyCopies,
    PagedKV,
    PromptRows,
    first_query_blocks,
    sparse_prefill_attention,
)
from headrace.kernels.transfer import upload
from headrace.model_spec import BLOCK_SPARSE, DENSE, STREAMING, AttentionSpec

_DTYPES = ("bfloat16", "float16", "float32")
TENSOR_MEMORY = 90
"""First generation with a tensor memory unit."""


class Watch(Protocol):
    """Gets what one row attends to."""

    def __call__(self, layer: int, first: int, attended: torch.Tensor) -> None:
        """``attended [heads, Qb, Kb]`` bool on the host: of the prompt's blocks of queries from number ``first`` on."""
        ...


class SparsePrefillAttention(AttentionBackend):
    """Attends by the type of each head: to all keys, to selected blocks, or to the first and the nearest blocks.

    All rows and heads of a layer run in the same launches, and nothing waits for the device.
    """

    name = "sparse"
    kinds = frozenset({"window", "soft_cap", "sinks"})  # Refused below, in the layer's words.

    def __init__(self, config: SparseConfig, scratch: Scratch | None = None) -> None:
        super().__init__(scratch)
        self._config = config
        self._selector = selectors.create(config)
        self._query_start = self._first_blocks = torch.empty(0)
        """Starts of the planned rows' queries and of their blocks, as if their tokens were the whole batch."""
        self._paged: PagedRows | None = None
        """The planned rows."""
        self._key_start = torch.empty(0)
        """``[R]`` int32: the first key of each, in copies."""
        blocks = (config.block, config.sink_blocks, config.local_blocks)
        self._by_flashinfer: dict[int, HeadsByFlashInfer] = {
            DENSE: DenseHeads(self.scratch),
            STREAMING: StreamingHeads(self.scratch, *blocks),
        }
        """FlashInfer's kernels by type of head."""
        self.watch: Watch | None = None
        """Looks at what the first row attends to, for explanations: waits for the device."""

    @classmethod
    def refusals(cls, spec: AttentionSpec, device: str, dtype: str, kv_dtype: str | None) -> list[str]:
        refused = {
            "it keeps compressed KV": spec.mla is not None,
            "its indexer chooses its keys": spec.indexer is not None,
            "it has a sliding window": spec.window is not None,
            "it has sinks": spec.sinks,
            "it has a soft cap": spec.soft_cap is not None,
            f"it reads the KV of layer {spec.kv_source}": spec.kv_source is not None,
            f"sparse prefill computes in {', '.join(_DTYPES)}, not in {dtype}": dtype not in _DTYPES,
        }
        return [reason for reason, applies in refused.items() if applies]

    def plan(self, step: StepMetadata) -> None:
        super().plan(step)
        self._query_start = step.query_start - int(step.query_start_host[0])
        self._first_blocks = first_query_blocks(self._query_start, self._config.block).long()
        self._paged = None
        for heads in self._by_flashinfer.values():
            heads.next_step()

    @property
    def rows(self) -> SparseRows:
        """Raises ValueError if the planned step has none."""
        if self.step.sparse is None:
            raise ValueError("the step has no rows that attend sparsely")
        return self.step.sparse

    def run(self, inputs: AttentionInputs) -> torch.Tensor:
        q, cache, *_ = inputs
        step, spec, rows, out = self.step, cache.spec, self.rows, output_of(self.step, inputs)
        own, out_own = q[step.tokens], out[step.tokens]
        types = self._types_of(rows, spec, q.device)
        kv = PagedKV(cache.keys, cache.values, step.block_tables[cache.group], cache.k_scale, cache.v_scale)
        longest = int(step.seq_lens_host.max())
        blocks = PromptRows(self._query_start, step.seq_lens, types, longest, self._config.block)
        mask, means = self._select(own, kv, blocks, spec.scale)
        copies = self._copies(own, cache)
        left = types if copies is None else self._attend_by_flashinfer(own, cache, copies, types, out_own)
        if left is not None:
            sparse_prefill_attention(
                own,
                kv,
                blocks._replace(types=left),
                mask,
                scale=spec.scale,
                sink_blocks=self._config.sink_blocks,
                local_blocks=self._config.local_blocks,
                means=means,
                copies=copies,
                out=out_own,
            )
        rows.kept[spec.layer] = self._kept(rows, types, mask)
        if self.watch is not None:
            self._show(self.watch, spec.layer, types[0].tolist(), mask)
        return out.flatten(1)

    def _copies(self, q: torch.Tensor, cache: LayerCache) -> KeyCopies | None:
        """Keys and values out of their blocks, for the tensor memory unit; None: there is none, or they do not pay off."""
        token = cache.spec.num_kv_heads * cache.spec.row_width * q.itemsize
        if not loads_tiles(q) or token % 16:
            return None
        if self._paged is None:
            self._paged = PagedRows(self.step, cache.block_size)
            self._key_start = upload(self._paged.key_start.numpy()[:-1], q.device)
        if not self._paged.copies_pay(cache, q.dtype):
            return None
        return KeyCopies(self._paged.copies(cache, q.dtype, self._config.block), self._key_start)

    def _attend_by_flashinfer(
        self, q: torch.Tensor, cache: LayerCache, copies: KeyCopies, types: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor | None:
        """Leaves heads that select nothing to FlashInfer where that is faster, and returns the types that are left; None: all
        heads are done."""
        spec, left = cache.spec, set(self._config.types or (BLOCK_SPARSE,))
        for kind in left & set(self._by_flashinfer):
            heads = self._by_flashinfer[kind]
            kernel = None if self._paged is None else heads.kernel(spec, self._paged, q)
            if kernel is None or self._paged is None:
                continue
            chosen = types == kind
            heads.run(kernel, spec, self._paged, q, copies.rows, chosen[0, :: spec.group_size].int(), out)
            types = types.masked_fill(chosen, ELSEWHERE)
            left.discard(kind)
        return types if left else None

    def _types_of(self, rows: SparseRows, spec: AttentionSpec, device: torch.device) -> torch.Tensor:
        """``[R, num_heads]`` int8"""
        if self._config.types is None:
            return torch.full((len(rows.slots), spec.num_heads), BLOCK_SPARSE, dtype=torch.int8, device=device)
        first, second = self._config.types
        classes = rows.classes_of(spec.layer, spec.num_kv_heads)
        types = torch.full(classes.shape, first, dtype=torch.int8, device=device).masked_fill_(classes != 0, second)
        return types.repeat_interleave(spec.group_size, dim=1)

    def _select(
        self, q: torch.Tensor, kv: PagedKV, rows: PromptRows, scale: float
    ) -> tuple[torch.Tensor | None, BlockMeans | None]:
        """``[N, num_heads, Kb]`` bool: the key blocks of each query block; and means of those that are left out."""
        if not self._config.selects:
            return None, None
        return self._selector(q, kv, rows, self.rows.prompt_lens, scale)

    def _show(self, watch: Watch, layer: int, types: list[int], mask: torch.Tensor | None) -> None:
        config, step = self._config, self.step
        tokens, length = int(step.query_counts[0]), int(step.seq_lens_host[0])
        first, end = (length - tokens) // config.block, -(-length // config.block)
        queries, keys = torch.arange(first, end)[:, None], torch.arange(end)
        causal = keys <= queries
        streamed = causal & ((keys < config.sink_blocks) | (keys > queries - config.local_blocks))
        selected = None if mask is None else mask[: end - first, :, :end].transpose(0, 1).cpu()
        shown = [
            selected[head] if kind == BLOCK_SPARSE and selected is not None else causal if kind == DENSE else streamed
            for head, kind in enumerate(types)
        ]
        watch(layer, first, torch.stack(shown))

    def _kept(self, rows: SparseRows, types: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """``[R]`` int64: pairs of blocks that are attended, over all heads."""
        kept = (types == DENSE).sum(1) * rows.pairs + (types == STREAMING).sum(1) * rows.streamed
        if mask is None:
            return kept
        by_place = torch.nn.functional.pad(mask.sum((1, 2)).cumsum(0), (1, 0))
        ends = torch.cat((self._first_blocks[1:], self._first_blocks.new_full((1,), len(mask))))
        return kept + by_place[ends] - by_place[self._first_blocks]


def loads_tiles(q: torch.Tensor) -> bool:
    """Whether q's device loads tiles of q's type by a tensor memory unit."""
    return q.itemsize == 2 and (support.compute_capability(q.device) or 0) >= TENSOR_MEMORY


class WithSparsePrompts(WithUsual):
    """Splits a step between a layer's usual backend and the one of rows that attend sparsely, which are its last.

    A step without such rows is the usual backend's alone, in a CUDA graph too.
    """

    def __init__(self, usual: AttentionBackend, sparse: SparsePrefillAttention) -> None:
        super().__init__(usual, sparse)
        self.sparse = sparse

    def plan(self, step: StepMetadata) -> None:
        super().plan(step)
        if step.sparse is None:
            self._active = [self.usual]
            self.usual.plan(step)
            return
        self._active = [self.sparse]
        self.sparse.plan(step.rows(step.sparse.first, step.num_rows))
        if step.sparse.first:
            self._active.append(self.usual)
            self.usual.plan(step.rows(0, step.sparse.first).densely())


def streamed_pairs(start: np.ndarray, end: np.ndarray, block: int, sink: int, local: int) -> np.ndarray:
    """Pairs of a query block and a key block that a streaming head attends to in the tokens ``[start, end)``."""
    return np.array([_streamed(first // block, -(-last // block), sink, local) for first, last in zip(start, end, strict=True)])


def _streamed(first: int, last: int, sink: int, local: int) -> int:
    own = np.arange(first + 1, last + 1)
    return int(np.minimum(own, sink + local).sum())
