"""Attention on the CPU with PyTorch's own kernels: batched over sequences, paged, of any geometry."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from headrace.attention.backend import VISIBLE_ENDS, AttentionBackend, AttentionInputs, LayerCache, Scratch, StepMetadata
from headrace.attention.compose import output_of
from headrace.model_spec import AttentionSpec

_PART_BYTES = 2 << 20
"""KV gathered at a time for rows with one query: small enough to stay in the core's cache until it is used."""
_PART_WASTE = 512
"""Padded key positions in a part, beyond which another part costs less."""
_MASK_ENTRIES = 1 << 21
_MASK_QUERIES = (16, 256)


@dataclasses.dataclass(frozen=True)
class _Part:
    """Rows with one query token each, attended together, padded to the longest of them."""

    tokens: slice | torch.Tensor
    """Places of the R tokens in the packed batch."""
    blocks: torch.Tensor
    """``[R * B]``: the blocks that hold what each row may see."""
    num_rows: int
    length: int
    """Keys taken of each row's blocks, at most ``B * block_size``."""
    mask: torch.Tensor | None
    """``[R, 1, 1, length]``, 0 or -inf; None: every row sees all."""


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Consecutive queries of one row, and the keys that any of them sees."""

    queries: slice
    """Places in the packed batch."""
    keys: slice
    """Places among the keys gathered for the row."""
    mask: torch.Tensor | None
    """``[n, keys]``, 0 or -inf; None: causal, query i sees keys 0 to i."""


@dataclasses.dataclass(frozen=True)
class _Row:
    """A row with several query tokens."""

    blocks: torch.Tensor
    """``[B]``: the blocks that hold what any of its queries may see."""
    pieces: list[_Piece]


class Staircases:
    """Additive causal masks for queries at the end of a longer row of keys, kept between steps.

    In a causal mask whose last query sees the last key, each query sees one key more than the one before: every such mask
    is a view of one wide staircase, so only a few are ever allocated.
    """

    def __init__(self) -> None:
        self._by_shape: dict[object, torch.Tensor] = {}

    @staticmethod
    def num_queries(length: int) -> int:
        """Returns the number of queries with ``length`` keys to take at a time, so that a mask stays small."""
        fewest, most = _MASK_QUERIES
        return max(fewest, min(most, _MASK_ENTRIES // length))

    def mask(self, queries: int, length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The last of ``queries`` consecutive queries sees the last of ``length`` keys, and ``window`` at most.

        Returns:
            ``[queries, length]``, 0 or -inf: a view.
        """
        steps = 1 << max(length - 1, 0).bit_length()
        key = (steps, window, dtype, device)
        wide = self._by_shape.get(key)
        if wide is None or len(wide) < queries:
            wide = self._by_shape[key] = _staircase(max(queries, self.num_queries(steps)), steps, window, dtype, device)
        # Row i of the staircase sees up to column steps + i; row i of the mask sees up to key length - queries + i.
        shift = steps - (length - queries)
        return wide[:queries, shift : shift + length]


def _staircase(queries: int, steps: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``[queries, steps + queries]``: row i sees columns up to ``steps + i``."""
    mask = torch.full((queries, steps + queries), -torch.inf, dtype=dtype, device=device).triu_(steps + 1)
    if window is not None:
        mask += torch.full_like(mask, -torch.inf).tril_(steps - window)
    return mask


class TorchAttention(AttentionBackend):
    """Rows with one query are gathered in cache-sized groups and attended together, the others one by one.

    Plain layers go through ``scaled_dot_product_attention``; the query heads that share a KV head are its query positions,
    so that keys are never repeated. Soft caps and sinks use explicit matrix products.
    """

    name = "torch"
    kinds = frozenset({"window", "chunked", "soft_cap", "sinks"})
    modes = frozenset({VISIBLE_ENDS})
    dtypes = ("float32", "bfloat16", "float16", "float64")
    only_on_cpu = True
    has_scales = False

    def __init__(self, scratch: Scratch | None = None) -> None:
        super().__init__(scratch)
        self._layouts: dict[object, tuple[list[_Part], list[_Row]]] = {}
        self._staircases = Staircases()
        self._workspace = torch.empty(0, dtype=torch.uint8)

    @property
    def workspaces(self) -> list[torch.Tensor]:
        return [self._workspace]

    def plan(self, step: StepMetadata) -> None:
        super().plan(step)
        self._layouts.clear()

    def run(self, inputs: AttentionInputs) -> torch.Tensor:
        q, cache, sinks, visible_ends, *_ = inputs
        spec = cache.spec
        parts, rows = self._layout(cache, q.dtype, visible_ends)
        whole = output_of(self.step, inputs)
        out = whole.view(len(q), spec.num_kv_heads, spec.group_size, spec.v_head_dim)
        for part in parts:
            kv = self._gather(cache, part.blocks)
            kv = kv.view(part.num_rows, -1, *kv.shape[1:])[:, : part.length]
            out[part.tokens] = _attend_single(q[part.tokens], kv, part.mask, spec, sinks)
        for row in rows:
            kv = self._gather(cache, row.blocks)
            for piece in row.pieces:
                out[piece.queries] = _attend_piece(q[piece.queries], kv[piece.keys], piece.mask, spec, sinks)
        return whole.flatten(1)

    def _gather(self, cache: LayerCache, blocks: torch.Tensor) -> torch.Tensor:
        """``[len(blocks) * block_size, num_kv_heads, row_width]``, valid until the next call."""
        num_blocks, block_size, heads, width = cache.rows.shape
        shape = (len(blocks), block_size * heads * width)
        size = math.prod(shape) * cache.rows.itemsize
        if size > len(self._workspace):
            self._workspace = torch.empty(size, dtype=torch.uint8, device=cache.rows.device)
        rows = self._workspace[:size].view(cache.rows.dtype).view(shape)
        torch.index_select(cache.rows.view(num_blocks, -1), 0, blocks, out=rows)
        return rows.view(-1, heads, width)

    def _layout(
        self, cache: LayerCache, dtype: torch.dtype, visible_ends: torch.Tensor | None
    ) -> tuple[list[_Part], list[_Row]]:
        """The layout of the step's rows, computed once a step for all layers of one geometry."""
        spec = cache.spec
        token_bytes = spec.num_kv_heads * cache.rows.shape[-1] * cache.rows.itemsize
        key = (cache.group, cache.block_size, spec.window, spec.chunked, token_bytes, dtype, visible_ends is None)
        layout = self._layouts.get(key)
        if layout is None:
            planner = _Planner(self.step, cache, dtype, self._staircases, visible_ends)
            layout = planner.parts(max(1, _PART_BYTES // token_bytes)), planner.rows()
            self._layouts[key] = layout
        return layout


class _Planner:
    """Lays out one step for the layers of one geometry."""

    def __init__(
        self,
        step: StepMetadata,
        cache: LayerCache,
        dtype: torch.dtype,
        staircases: Staircases,
        visible_ends: torch.Tensor | None,
    ) -> None:
        self._table = step.block_tables[cache.group]
        self._block_size = cache.block_size
        self._window, self._chunked = cache.spec.window, cache.spec.chunked
        self._dtype = dtype
        self._device = cache.rows.device
        self._staircases = staircases
        self._starts = step.query_start_host[:-1].astype(np.int64)
        self._counts = step.query_counts.astype(np.int64)
        # A padding row has no tokens in the cache: it attends to the null block, and its result is discarded.
        self._lengths = np.maximum(step.seq_lens_host.astype(np.int64), self._counts)
        self._visible_ends = None if visible_ends is None else visible_ends.numpy()

    def _first_seen(self, positions: np.ndarray) -> np.ndarray:
        """The first key position that a query at each position sees."""
        if self._window is None:
            return np.zeros_like(positions)
        if self._chunked:
            return positions - positions % self._window
        return np.maximum(positions + 1 - self._window, 0)

    def parts(self, budget: int) -> list[_Part]:
        """The rows with one query, in groups of at most ``budget`` padded keys (or a single row)."""
        (rows,) = np.nonzero(self._counts == 1)
        if not len(rows):
            return []
        lengths = self._lengths[rows]
        first = self._first_seen(lengths - 1)
        skipped = first // self._block_size
        spans = lengths - skipped * self._block_size
        return [
            self._part(rows[group], first[group], skipped[group], lengths[group])
            for group in partition(spans.tolist(), budget, _PART_WASTE)
        ]

    def _part(self, rows: np.ndarray, first: np.ndarray, skipped: np.ndarray, lengths: np.ndarray) -> _Part:
        spans = lengths - skipped * self._block_size
        length = int(spans.max())
        columns = skipped[:, None] + np.arange(-(-length // self._block_size))
        columns = np.minimum(columns, self._table.shape[1] - 1)
        blocks = self._table[self._tensor(rows)[:, None], self._tensor(columns)]
        mask = None
        if (spans != length).any() or (first != skipped * self._block_size).any():
            keys = np.arange(length)
            hidden = (keys >= spans[:, None]) | (keys < (first - skipped * self._block_size)[:, None])
            mask = torch.zeros(len(rows), 1, 1, length, dtype=self._dtype, device=self._device)
            mask.masked_fill_(self._tensor(hidden)[:, None, None], -torch.inf)
        return _Part(self._tokens(self._starts[rows]), blocks.flatten(), len(rows), length, mask)

    def _tokens(self, tokens: np.ndarray) -> slice | torch.Tensor:
        start = int(tokens[0])
        if np.array_equal(tokens, np.arange(start, start + len(tokens))):
            return slice(start, start + len(tokens))
        return self._tensor(tokens)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def rows(self) -> list[_Row]:
        """The rows with several queries."""
        return [self._row(int(row)) for row in np.nonzero(self._counts > 1)[0]]

    def _row(self, row: int) -> _Row:
        start, count, length = int(self._starts[row]), int(self._counts[row]), int(self._lengths[row])
        prefix = length - count
        first_block = int(self._first_seen(np.array(prefix))) // self._block_size
        base = first_block * self._block_size
        blocks = self._table[row, first_block : -(-length // self._block_size)]
        ends = self._ends_beyond(start, count, prefix)
        if ends is None and prefix == 0 and (self._window is None or count <= self._window):
            whole = _Piece(slice(start, start + count), slice(0, count), None)
            return _Row(blocks, [whole])
        pieces, done = [], 0
        step = self._staircases.num_queries(min(length, self._window or length))
        sliding = None if self._chunked else self._window
        while done < count:
            queries = min(step, count - done)
            position = prefix + done
            if self._chunked and self._window is not None:
                # All that a piece's queries see begins at one position.
                queries = min(queries, self._window - position % self._window)
            first = int(self._first_seen(np.array(position)))
            if ends is None:
                end = position + queries
                mask = self._staircases.mask(queries, end - first, sliding, self._dtype, self._device)
            else:
                end = int(ends[done : done + queries].max())
                mask = self._mask(position, ends[done : done + queries], np.arange(first, end))
            pieces.append(_Piece(slice(start + done, start + done + queries), slice(first - base, end - base), mask))
            done += queries
        return _Row(blocks, pieces)

    def _ends_beyond(self, start: int, count: int, prefix: int) -> np.ndarray | None:
        """``[count]``: the visible ends of a row's queries; None: they are causal."""
        if self._visible_ends is None:
            return None
        ends = self._visible_ends[start : start + count]
        return None if np.array_equal(ends, prefix + 1 + np.arange(count)) else ends

    def _mask(self, position: int, ends: np.ndarray, keys: np.ndarray) -> torch.Tensor:
        """``[n, keys]``, 0 or -inf, of the n queries from ``position`` on."""
        first = self._first_seen(position + np.arange(len(ends)))
        hidden = (keys >= ends[:, None]) | (keys < first[:, None])
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(self._tensor(hidden), -torch.inf)


def partition(sizes: Sequence[int], budget: int, waste: int) -> list[list[int]]:
    """Groups items that will be padded to the largest of their group.

    A group holds at most ``budget`` when padded (or one item), and at most ``waste`` of it is padding. One pass from
    large to small; equal sizes keep their order, and a single group keeps it too.

    Returns:
        Indices of ``sizes``, each once.
    """
    groups: list[list[int]] = []
    widest = wasted = 0
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        wasted += widest - sizes[index]
        if groups and (len(groups[-1]) + 1) * widest <= budget and wasted <= waste:
            groups[-1].append(index)
            continue
        groups.append([index])
        widest, wasted = sizes[index], 0
    return [sorted(group) for group in groups]


def _plain(spec: AttentionSpec, sinks: torch.Tensor | None) -> bool:
    return spec.soft_cap is None and sinks is None


def _widen(q: torch.Tensor, kv: torch.Tensor, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, keys and values of one width, as PyTorch's fused kernel wants them.

    Where K and V differ in width, whole rows serve as both: zeros in q leave V out of the logits, and the leading columns
    of the result, which are K's, are for the caller to drop. Whole rows also serve as both for MLA, where V is a part of K.
    """
    if spec.mla is not None:
        return q, kv, kv
    if spec.head_dim == spec.v_head_dim:
        return q, kv[..., : spec.head_dim], kv[..., spec.head_dim :]
    return pad(q, (0, spec.v_head_dim)), kv, kv


def _attend_single(
    q: torch.Tensor, kv: torch.Tensor, mask: torch.Tensor | None, spec: AttentionSpec, sinks: torch.Tensor | None
) -> torch.Tensor:
    """One query a row.

    Args:
        q: ``[R, num_heads, head_dim]``
        kv: ``[R, length, num_kv_heads, row_width]``
        mask: ``[R, 1, 1, length]``

    Returns:
        ``[R, num_kv_heads, group_size, v_head_dim]``
    """
    q = q.view(-1, spec.num_kv_heads, spec.group_size, spec.head_dim)
    kv = kv.transpose(1, 2)
    if not _plain(spec, sinks):
        wide_mask = None if mask is None else mask.unsqueeze(3)
        return _attend_in_full(q.unsqueeze(3), kv, wide_mask, spec, sinks).squeeze(3)
    q, keys, values = _widen(q, kv, spec)
    out = scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=spec.scale)
    return out[..., -spec.v_head_dim :]


def _attend_piece(
    q: torch.Tensor, kv: torch.Tensor, mask: torch.Tensor | None, spec: AttentionSpec, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Consecutive queries of one row.

    Args:
        q: ``[n, num_heads, head_dim]``
        kv: ``[length, num_kv_heads, row_width]``
        mask: ``[n, length]``; None: causal.

    Returns:
        ``[n, num_kv_heads, group_size, v_head_dim]``
    """
    kv = kv.transpose(0, 1).unsqueeze(0)
    if not _plain(spec, sinks):
        if mask is None:
            mask = torch.full((len(q), kv.shape[2]), -torch.inf, dtype=q.dtype, device=q.device).triu_(1)
        grouped = q.view(-1, spec.num_kv_heads, spec.group_size, spec.head_dim).permute(1, 2, 0, 3).unsqueeze(0)
        return _attend_in_full(grouped, kv, mask, spec, sinks)[0].permute(2, 0, 1, 3)
    q, keys, values = _widen(q.transpose(0, 1).unsqueeze(0), kv, spec)
    out = scaled_dot_product_attention(
        q, keys, values, attn_mask=mask, is_causal=mask is None, scale=spec.scale, enable_gqa=True
    )
    out = out[0, ..., -spec.v_head_dim :].transpose(0, 1)
    return out.reshape(-1, spec.num_kv_heads, spec.group_size, spec.v_head_dim)


def _attend_in_full(
    q: torch.Tensor, kv: torch.Tensor, mask: torch.Tensor | None, spec: AttentionSpec, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attention with explicit logits, in float32 or wider: for soft caps and sinks.

    Args:
        q: ``[R, num_kv_heads, group_size, n, head_dim]``
        kv: ``[R, num_kv_heads, length, head_dim + v_head_dim]``
        mask: expands to ``[R, num_kv_heads, group_size, n, length]``.

    Returns:
        ``[R, num_kv_heads, group_size, n, v_head_dim]`` in q's dtype.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    kv = kv.to(dtype)
    keys, values = kv[..., : spec.head_dim], kv[..., spec.row_width - spec.v_head_dim :]
    logits = (q.to(dtype).flatten(2, 3) @ keys.transpose(-1, -2)).view(*q.shape[:4], -1).mul_(spec.scale)
    if spec.soft_cap is not None:
        logits = logits.div_(spec.soft_cap).tanh_().mul_(spec.soft_cap)
    if mask is not None:
        logits += mask
    length = logits.shape[-1]
    if sinks is not None:
        sink = sinks.to(dtype).view(spec.num_kv_heads, spec.group_size, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat((logits, sink), dim=-1)
    shares = logits.softmax(dim=-1)[..., :length]
    return (shares.flatten(2, 3) @ values).view(*q.shape[:4], -1).to(q.dtype)
