"""Multi-head latent attention (MLA): absorbed for rows of few queries, uncompressed for prompts, on top of other backends.

Both forms compute the same (DeepSeek-V2, 2024). Absorbed, the projections to keys and values are applied to q and the output,
and all heads share one wide KV head: little to read, much to multiply. Uncompressed, each head first gets its own narrow keys
and values, which pays off where many queries share them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import nn

from headrace.attention.backend import AttentionBackend, AttentionInputs, LayerCache, StepMetadata
from headrace.attention.compose import Composition, StepPart, part_of
from headrace.attention.context import ForwardContext
from headrace.attention.indexed import IndexedRows, chosen_for
from headrace.attention.layer import HeadNorm, required_angles
from headrace.cache.planes import write_mla
from headrace.kernels import gpu
from headrace.kernels.linear import linear_by_head
from headrace.kernels.mla import norm_rotate_and_cache_mla
from headrace.kernels.rotary import rotate
from headrace.kernels.transfer import upload
from headrace.model_spec import AttentionSpec

WORKSPACE_BYTES = 256 << 20
"""Bytes for uncompressed keys and values. If they exceed it, heads take turns; if one head's do, rows do too."""


class MLAAttention(nn.Module):
    """The inner attention of an MLA layer: rotates, writes to the cache and attends over it."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(
        self,
        q: torch.Tensor,
        compressed: torch.Tensor,
        up: torch.Tensor,
        ctx: ForwardContext,
        cos_sin: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one step's tokens.

        Args:
            q: ``[T, num_heads, mla.head_dim]``: a head's rotary_dim channels to rotate, then the others.
            compressed: ``[T, row_width]``: rotary_dim channels to rotate, then the normed latent channels.
            up: ``[num_heads * (mla.head_dim - rotary_dim + mla.v_head_dim), v_head_dim]``: projects the latent
                to each head's unrotated key channels, then to its values.
            cos_sin: ``[T, rotary_dim]`` float32, the cosines and then the sines of each token's position.

        Returns:
            ``[T, num_heads * mla.v_head_dim]``

        Raises:
            ValueError: ``cos_sin`` is missing.
        """
        row = compressed.unsqueeze(1)
        angles = required_angles(self.spec, cos_sin)
        if angles is not None:
            q, row = rotate(q, row, angles, self.spec.rotary_dim)
        cache = ctx.caches[self.spec.layer]
        write_mla(cache, row, ctx.step.slot_mapping[cache.group])
        return self._backend(ctx).attend(q, cache, up, chosen=self._chosen(ctx))

    def forward_qkv(
        self,
        q: torch.Tensor,
        compressed: torch.Tensor,
        norm: HeadNorm,
        up: torch.Tensor,
        ctx: ForwardContext,
        cos_sin: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes ``forward`` for a latent before its norm. On a GPU norm, rotation and cache write are one kernel.

        Args:
            q: as for ``forward``; it may be changed.
            compressed: ``[T, row_width]``: rotary_dim channels to rotate, then the latent.
            norm: applied to the latent.
        """
        rotated = self.spec.rotary_dim
        angles = required_angles(self.spec, cos_sin)
        if gpu.takes(q) and norm.plain and angles is not None:
            cache, backend = ctx.caches[self.spec.layer], self._backend(ctx)
            slots, q = ctx.step.slot_mapping[cache.group], q.contiguous()
            wide = backend.absorbed_queries(q)
            norm_rotate_and_cache_mla(q, compressed, norm.weight, norm.eps, angles, cache.rows, slots, wide)
            return backend.attend(q, cache, up, wide, self._chosen(ctx))
        normed = torch.cat((compressed[:, :rotated], norm(compressed[:, rotated:])), dim=1)
        return self.forward(q, normed, up, ctx, cos_sin)

    def _chosen(self, ctx: ForwardContext) -> torch.Tensor | None:
        indexed = self._backend(ctx).indexed
        return None if indexed is None or indexed.part is None else chosen_for(self.spec, ctx)

    def _backend(self, ctx: ForwardContext) -> MLABackend:
        return cast("MLABackend", ctx.backends[self.spec.layer])


class _Prompts(NamedTuple):
    """Rows attended over uncompressed KV, in temporary blocks numbered row after row from 0."""

    part: StepPart
    places: torch.Tensor
    """``[blocks]`` int64: index of each block in the flattened block table of the whole step."""
    backend: AttentionBackend
    """Planned for these rows."""


class MLABackend(Composition):
    """Runs MLA layers with two ordinary backends. One instance serves layers of one geometry.

    Rows for which the layers' indexer chooses are absorbed, and attend to what was chosen.

    Args:
        absorbed: supports the layers' spec.
        uncompressed: creates backends that support ``spec.uncompressed``. None: all rows are absorbed, so the result is
            batch-invariant if ``absorbed`` is.
    """

    kinds = frozenset({"window", "soft_cap", "sinks"})  # Those of its parts, which are asked too.

    def __init__(
        self, spec: AttentionSpec, absorbed: AttentionBackend, uncompressed: Callable[[], AttentionBackend] | None
    ) -> None:
        super().__init__((absorbed,))
        if spec.mla is None:
            raise ValueError(f"layer {spec.layer} keeps no compressed KV")
        self._spec, self._mla = spec, spec.mla
        self._absorbed = absorbed
        self._invariant = uncompressed is None
        self._create_uncompressed = uncompressed
        self._uncompressed = [] if uncompressed is None else [uncompressed()]
        self.name = absorbed.name
        self._few: StepPart | None = None
        self._many = np.empty(0, dtype=np.int64)
        """The rows attended over uncompressed KV."""
        self._prompts: list[_Prompts] = []
        """Groups of rows that are uncompressed together."""
        self._workspace = torch.empty(0)
        self.indexed: IndexedRows | None = None
        """None: the layers have no indexer."""
        if spec.indexer is not None:
            # A captured step has no rows of other backends.
            self._captured, self.plans_replays = (), False

    def plan(self, step: StepMetadata) -> None:
        """Absorbs decode rows, and prompt rows for which that is less work or whose exact lengths are unknown."""
        super().plan(step)
        self._prompts, self._few = [], None
        rows = np.arange(step.num_rows)
        if self._spec.indexer is not None:
            self.indexed = IndexedRows(step, self._spec.indexer, invariant=self._invariant)
            rows = self.indexed.others
        if self._create_uncompressed is None or step.bounded:
            self._many = np.empty(0, dtype=np.int64)
        else:
            self._many = np.intersect1d(self._worth_uncompressing(step), rows, assume_unique=True)
        few = np.setdiff1d(rows, self._many, assume_unique=True)
        if len(few):
            self._few = part_of(step, few)
            self._absorbed.plan(self._few.step)

    @property
    def workspaces(self) -> list[torch.Tensor]:
        return [self._workspace, *(space for backend in (self._absorbed, *self._uncompressed) for space in backend.workspaces)]

    @property
    def uncompressed_rows(self) -> list[int]:
        """Rows of the planned step whose keys and values are uncompressed."""
        return [int(row) for row in self._many]

    def run(self, inputs: AttentionInputs) -> torch.Tensor:
        raise NotImplementedError("an MLA layer calls attend()")

    def absorbed_queries(self, q: torch.Tensor) -> torch.Tensor | None:
        """Uninitialised ``[T, num_heads, head_dim]`` for the queries of a step whose rows are all absorbed; else None."""
        if self._few is None or len(self._many) or self._indexes:
            return None
        return q.new_empty(len(q), self._spec.num_heads, self._spec.head_dim)

    @property
    def _indexes(self) -> bool:
        """Whether the planned step has rows for which an indexer chooses."""
        return self.indexed is not None and self.indexed.part is not None

    def attend(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        up: torch.Tensor,
        wide: torch.Tensor | None = None,
        chosen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends like ``MLAAttention.forward``, with the step's KV in the cache and q rotated.

        Args:
            wide: from ``absorbed_queries``, holding the rotated channels of q; those of ``q`` itself are then ignored.
            chosen: of the rows for which an indexer chooses.
        """
        step, spec = self.step, self._spec
        if self._few is not None and not len(self._many) and chosen is None:
            return self._attend_absorbed(q, cache, up, wide)
        out = q.new_zeros(len(q), spec.out_size)
        if self.indexed is not None and chosen is not None:
            rows, tokens = self.indexed, self.indexed.tokens
            out[tokens] = self._absorbed_by(lambda absorbed: rows.attend(absorbed, cache, chosen), q[tokens], up)
        if self._few is not None:
            out[self._few.tokens] = self._attend_absorbed(q[self._few.tokens], cache, up)
        for prompts in self._planned_prompts(step, cache.block_size, q.itemsize):
            tokens = prompts.part.tokens
            out[tokens] = self._attend_uncompressed(q[tokens], cache, up, step, prompts)
        return out

    def _worth_uncompressing(self, step: StepMetadata) -> np.ndarray:
        """The prefill rows for which uncompressed attention saves more than uncompressing costs."""
        first, spec, mla = step.num_decode_rows, self._spec, self._mla
        counts = np.diff(step.query_start_host[first:]).astype(np.int64)
        lengths = step.seq_lens_host[first:].astype(np.int64)
        pairs = counts * (lengths - counts) + counts * (counts + 1) // 2
        per_head = mla.head_dim - spec.rotary_dim + mla.v_head_dim
        saved = pairs * (2 * spec.v_head_dim - per_head)
        return first + np.nonzero(saved > lengths * spec.v_head_dim * per_head)[0]

    # ---------------------------------------------------------------------------------------------------------- absorbed

    def _attend_absorbed(
        self, q: torch.Tensor, cache: LayerCache, up: torch.Tensor, wide: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``[T, num_heads, mla.head_dim] -> [T, out_size]``"""
        return self._absorbed_by(lambda absorbed: self._absorbed.run(AttentionInputs(absorbed, cache)), q, up, wide)

    def _absorbed_by(
        self,
        attend: Callable[[torch.Tensor], torch.Tensor],
        q: torch.Tensor,
        up: torch.Tensor,
        wide: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[T, num_heads, mla.head_dim] -> [T, out_size]``, where ``attend`` is the attention of absorbed queries to the
        latent."""
        spec, rotated = self._spec, self._spec.rotary_dim
        to_keys, to_values = self._projections(up)
        if wide is None:
            wide = q.new_empty(len(q), spec.num_heads, spec.head_dim)
            wide[..., :rotated] = q[..., :rotated]
        linear_by_head(q[..., rotated:], to_keys.transpose(1, 2), wide[..., rotated:], batch_invariant=self._invariant)
        mixed = attend(wide).view(len(q), spec.num_heads, spec.v_head_dim)
        out = q.new_empty(len(q), spec.num_heads, self._mla.v_head_dim)
        linear_by_head(mixed, to_values, out, batch_invariant=self._invariant)
        return out.flatten(1)

    def _projections(self, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[num_heads, key channels that are not rotated, v_head_dim]`` and ``[num_heads, mla.v_head_dim, v_head_dim]``"""
        spec, mla = self._spec, self._mla
        parts = [mla.head_dim - spec.rotary_dim, mla.v_head_dim]
        to_keys, to_values = torch.split(up.view(spec.num_heads, sum(parts), spec.v_head_dim), parts, dim=1)
        return to_keys, to_values

    # ------------------------------------------------------------------------------------------------------ uncompressed

    def _planned_prompts(self, step: StepMetadata, block_size: int, itemsize: int) -> list[_Prompts]:
        """Plans the uncompressed rows at the first layer of a step, which knows the block size."""
        if not self._prompts:
            most = WORKSPACE_BYTES // (self._head_width() * itemsize)
            for rows in _grouped(self._many, -(-step.seq_lens_host[self._many] // block_size) * block_size, most):
                if len(self._prompts) == len(self._uncompressed) and self._create_uncompressed is not None:
                    self._uncompressed.append(self._create_uncompressed())
                prompts = _with_own_blocks(step, rows, block_size, self._uncompressed[len(self._prompts)])
                prompts.backend.plan(prompts.part.step)
                self._prompts.append(prompts)
        return self._prompts

    def _head_width(self) -> int:
        """Workspace numbers of one head and token: its row, and the projection of the latent."""
        full = self._spec.uncompressed
        return 2 * full.row_width - full.rotary_dim

    def _attend_uncompressed(
        self, q: torch.Tensor, cache: LayerCache, up: torch.Tensor, step: StepMetadata, prompts: _Prompts
    ) -> torch.Tensor:
        """``[T, num_heads, mla.head_dim] -> [T, out_size]`` of the prompts' tokens, prefix in the cache included."""
        full, rotated = self._spec.uncompressed, self._spec.rotary_dim
        table = step.block_tables[cache.group]
        blocks = table.reshape(-1).index_select(0, prompts.places)
        stored = cache.rows.index_select(0, blocks).flatten(0, 2)
        tokens, projected, width = len(stored), full.row_width - rotated, self._head_width()
        space = self._space(tokens * width, stored)
        at_once = min(full.num_heads, space.numel() // (tokens * width))
        out = q.new_empty(len(q), full.num_heads, full.v_head_dim)
        for first in range(0, full.num_heads, at_once):
            heads = min(at_once, full.num_heads - first)
            others, rows = torch.split(
                space[: tokens * heads * width], [tokens * heads * projected, tokens * heads * full.row_width]
            )
            rows = rows.view(tokens, heads, full.row_width)
            weight = up[first * projected : (first + heads) * projected]
            others = torch.mm(stored[:, rotated:], weight.T, out=others.view(tokens, heads * projected))
            rows[..., :rotated] = stored[:, None, :rotated]
            # A head's unrotated key channels and its values come out side by side, as in a cache row.
            rows[..., rotated:] = others.view(tokens, heads, projected)
            part = dataclasses.replace(full, num_heads=heads, num_kv_heads=heads)
            paged = LayerCache(part, 0, rows.view(len(blocks), cache.block_size, heads, full.row_width))
            mixed = prompts.backend.run(AttentionInputs(q[:, first : first + heads].contiguous(), paged))
            out[:, first : first + heads] = mixed.view(len(q), heads, full.v_head_dim)
        return out.flatten(1)

    def _space(self, least: int, like: torch.Tensor) -> torch.Tensor:
        """Returns space for at least ``least`` numbers of the dtype of ``like``. On a GPU it has the maximum size, so that it
        is allocated when memory is measured."""
        most = max(least, WORKSPACE_BYTES // like.itemsize)
        wanted = most if like.is_cuda else min(least * self._spec.num_heads, most)
        if self._workspace.numel() < wanted or self._workspace.dtype != like.dtype:
            self._workspace = torch.empty(wanted, dtype=like.dtype, device=like.device)
        return self._workspace


def _grouped(rows: np.ndarray, sizes: np.ndarray, most: int) -> list[np.ndarray]:
    """Splits the rows, in order, into groups of at most ``most`` in total size, or of a single row."""
    groups: list[list[int]] = []
    left = 0
    for row, size in zip(rows.tolist(), sizes.tolist(), strict=True):
        if not groups or size > left:
            groups.append([])
            left = most
        groups[-1].append(row)
        left -= size
    return [np.array(group, dtype=np.int64) for group in groups]


def _with_own_blocks(step: StepMetadata, rows: np.ndarray, block_size: int, backend: AttentionBackend) -> _Prompts:
    """The rows as a step with its own block tables, in which each row's blocks follow those of the row before."""
    device = step.seq_lens.device
    lengths = step.seq_lens_host[rows]
    counts = -(-lengths // block_size)
    ends = np.cumsum(counts)
    column = np.arange(int(ends[-1])) - np.repeat(ends - counts, counts)
    width = step.block_tables[0].shape[1]
    places = np.repeat(rows, counts) * width + column
    own = (ends - counts)[:, None] + np.arange(int(counts.max()))
    table = np.where(own < ends[:, None], own, 0).astype(np.int32)
    part = part_of(step, rows)
    alone = dataclasses.replace(part.step, num_decode_rows=0, block_tables=(upload(table, device),))
    return _Prompts(StepPart(alone, part.tokens), upload(places.astype(np.int64), device), backend)
