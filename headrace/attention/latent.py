"""Attention over compressed KV: absorbed for rows of few queries, uncompressed for prompts, by whatever backends there are.

Both compute the same (DeepSeek-V2, 2024). Absorbed, the projections to keys and values go into q and the output, and all
heads share one wide KV head: little to read, much to multiply. Uncompressed, each head gets its own narrow keys and values
first: that pays where many queries meet them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from headrace.attention.backend import (
    AttentionBackend,
    LayerCache,
    Lengths,
    Replanned,
    StepMetadata,
    scales_missing,
    workspace_bytes,
)
from headrace.attention.context import ForwardContext
from headrace.attention.layer import HeadNorm
from headrace.cache.planes import write_compressed
from headrace.kernels import gpu
from headrace.kernels.latent import norm_rotate_and_cache_latent
from headrace.kernels.linear import linear_by_head
from headrace.kernels.rotary import rotate
from headrace.kernels.transfer import upload
from headrace.spec import AttentionSpec, Mode

WORKSPACE_BYTES = 256 << 20
"""For uncompressed keys and values. Where they are more, heads take turns; where one head's are more, rows do too."""


class LatentAttention(nn.Module):
    """The inner attention of a layer that keeps compressed KV: rotates, writes to the cache and attends over it."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec
        if spec.latent is None:
            raise ValueError(f"layer {spec.layer} keeps no compressed KV")
        self._latent = spec.latent

    def forward(
        self,
        q: torch.Tensor,
        compressed: torch.Tensor | None,
        up: torch.Tensor,
        ctx: ForwardContext,
        cos_sin: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one step's tokens.

        Args:
            q: ``[T, num_heads, latent.head_dim]``: a head's rotary_dim channels to rotate, then the others.
            compressed: ``[T, row_width]``: rotary_dim channels to rotate, then the normed latent.
            up: ``[num_heads * (latent.head_dim - rotary_dim + latent.v_head_dim), v_head_dim]``: makes of the latent each
                head's key channels that are not rotated, and then its values.
            cos_sin: ``[T, rotary_dim]`` float32, the cosines and then the sines of each token's position.

        Returns:
            ``[T, num_heads * latent.v_head_dim]``

        Raises:
            ValueError: an argument is missing or of another shape.
        """
        row, backend = self._checked(q, compressed, up).unsqueeze(1), self._backend(ctx)
        if self.spec.rotary_dim:
            q, row = rotate(q, row, self._angles(cos_sin), self.spec.rotary_dim)
        cache = ctx.caches[self.spec.layer]
        write_compressed(cache, row, ctx.step.slot_mapping[cache.group])
        return backend.attend(q, cache, up)

    def of_projection(
        self,
        q: torch.Tensor,
        compressed: torch.Tensor | None,
        norm: HeadNorm,
        up: torch.Tensor,
        ctx: ForwardContext,
        cos_sin: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As ``forward``, with the latent not normed yet: on a GPU norm, rotation and the write to the cache are one kernel.

        Args:
            q: as for ``forward``; it may be changed.
            compressed: ``[T, row_width]``: rotary_dim channels to rotate, then the latent.
            norm: what the latent goes through.
        """
        compressed, rotated = self._checked(q, compressed, up), self.spec.rotary_dim
        if gpu.takes(q) and norm.plain and rotated:
            cache, backend = ctx.caches[self.spec.layer], self._backend(ctx)
            slots, q = ctx.step.slot_mapping[cache.group], q.contiguous()
            given, wide = (norm.weight, norm.eps, self._angles(cos_sin)), backend.absorbed_queries(q)
            norm_rotate_and_cache_latent(q, compressed, *given, cache.rows, slots, wide)
            return backend.attend(q, cache, up, wide)
        normed = torch.cat((compressed[:, :rotated], norm(compressed[:, rotated:])), dim=1)
        return self.forward(q, normed, up, ctx, cos_sin)

    def _checked(self, q: torch.Tensor, compressed: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
        """``compressed``, if it is there and all arguments are of their shapes."""
        spec, latent = self.spec, self._latent
        where = f"layer {spec.layer}"
        if compressed is None:
            raise ValueError(f"{where} keeps compressed KV: compressed is missing")
        made = latent.head_dim - spec.rotary_dim + latent.v_head_dim
        expected = {
            "q": (q, (len(q), spec.num_heads, latent.head_dim)),
            "compressed": (compressed, (len(q), spec.row_width)),
            "up": (up, (spec.num_heads * made, spec.v_head_dim)),
        }
        for name, (tensor, shape) in expected.items():
            if tensor.shape != shape:
                raise ValueError(f"{where}: {name} must be {list(shape)}, not {list(tensor.shape)}")
        return compressed

    def _backend(self, ctx: ForwardContext) -> LatentBackend:
        backend = ctx.backends[self.spec.layer]
        if not isinstance(backend, LatentBackend):
            raise ValueError(f"layer {self.spec.layer} keeps compressed KV, which {backend.name} alone does not attend over")
        return backend

    def _angles(self, cos_sin: torch.Tensor | None) -> torch.Tensor:
        if cos_sin is None:
            raise ValueError(f"layer {self.spec.layer} rotates q and k: cos_sin is missing")
        return cos_sin


@dataclasses.dataclass(frozen=True)
class _Part:
    """Some rows of a step."""

    step: StepMetadata
    tokens: slice | torch.Tensor
    """Where their tokens stand in the step."""


@dataclasses.dataclass(frozen=True)
class _Prompts(_Part):
    """Rows that see uncompressed KV, in blocks that are made for them, numbered row after row from 0."""

    places: torch.Tensor
    """``[blocks]`` int64: of each, where its number stands in a flattened block table of the whole step."""
    backend: AttentionBackend
    """Planned for them."""


class LatentBackend:
    """Runs layers of compressed KV with two backends that know nothing of it. One instance serves layers of one geometry.

    Args:
        absorbed: supports the layers' spec.
        uncompressed: makes backends that support ``spec.uncompressed``. None: all rows are absorbed, and what a token comes
            to depends on its own row alone if it does with ``absorbed``.
    """

    def __init__(
        self, spec: AttentionSpec, absorbed: AttentionBackend, uncompressed: Callable[[], AttentionBackend] | None
    ) -> None:
        if spec.latent is None:
            raise ValueError(f"layer {spec.layer} keeps no compressed KV")
        self._spec, self._latent = spec, spec.latent
        self._absorbed = absorbed
        self._invariant = uncompressed is None
        self._make = uncompressed
        self._made = [] if uncompressed is None else [uncompressed()]
        self.name = absorbed.name
        self.capturable = absorbed.capturable
        self.needs_exact_lengths = any(backend.needs_exact_lengths for backend in (absorbed, *self._made))
        self._step: StepMetadata | None = None
        self._few: _Part | None = None
        self._many = np.empty(0, dtype=np.int64)
        """The rows that see uncompressed KV."""
        self._prompts: list[_Prompts] = []
        """Rows that are uncompressed together."""
        self._workspace = torch.empty(0)

    @staticmethod
    def supports(spec: AttentionSpec, device: str, dtype: str, mode: Mode = "dense", kv_dtype: str | None = None) -> list[str]:
        """It is made of backends that were asked."""
        return scales_missing(kv_dtype) + ([] if spec.latent is not None else ["it is for compressed KV"])

    def plan(self, step: StepMetadata) -> None:
        """Decode rows are absorbed, and so are prompts' rows for which that is less work, or whose lengths are not known."""
        self._step, self._prompts, self._few = step, [], None
        if self._make is None or step.bounded:
            self._many = np.empty(0, dtype=np.int64)
        else:
            self._many = self._worth_uncompressing(step)
        few = np.setdiff1d(np.arange(step.num_rows), self._many, assume_unique=True)
        if len(few):
            self._few = _rows_of(step, few)
            self._absorbed.plan(self._few.step)

    @property
    def workspace_bytes(self) -> int:
        return self._workspace.nbytes + workspace_bytes((self._absorbed, *self._made))

    @property
    def uncompressed_rows(self) -> list[int]:
        """Of the planned step: those whose keys and values are uncompressed."""
        return [int(row) for row in self._many]

    def run(self, q: torch.Tensor, cache: LayerCache, sinks: torch.Tensor | None = None) -> torch.Tensor:
        raise ValueError(f"layer {cache.spec.layer} keeps compressed KV: attend() is for it")

    def absorbed_queries(self, q: torch.Tensor) -> torch.Tensor | None:
        """``[T, num_heads, head_dim]``, not filled: for the queries of a step whose rows are all absorbed; else None."""
        if self._few is None or len(self._many):
            return None
        return q.new_empty(len(q), self._spec.num_heads, self._spec.head_dim)

    def attend(self, q: torch.Tensor, cache: LayerCache, up: torch.Tensor, wide: torch.Tensor | None = None) -> torch.Tensor:
        """As ``LatentAttention.forward``, with the step's KV in the cache and q rotated.

        Args:
            wide: of ``absorbed_queries``, with the rotated channels of q; those of ``q`` itself do not count then.
        """
        step, spec = self._step, self._spec
        if step is None:
            raise RuntimeError("plan() comes before attend()")
        width = spec.rotary_dim + spec.v_head_dim
        if (cache.spec.num_heads, cache.spec.row_width, cache.spec.latent) != (spec.num_heads, width, spec.latent):
            raise ValueError(f"layer {cache.spec.layer} is not of the geometry that this instance was made for")
        if self._few is not None and not len(self._many):
            return self._attend_absorbed(q, cache, up, wide)
        out = q.new_zeros(len(q), spec.out_size)
        if self._few is not None:
            out[self._few.tokens] = self._attend_absorbed(q[self._few.tokens], cache, up)
        for prompts in self._planned_prompts(step, cache.block_size, q.itemsize):
            out[prompts.tokens] = self._attend_uncompressed(q[prompts.tokens], cache, up, step, prompts)
        return out

    def _worth_uncompressing(self, step: StepMetadata) -> np.ndarray:
        """The rows, of those that prefill, for which multiplying less saves more than uncompressing costs."""
        first, spec, latent = step.num_decode_rows, self._spec, self._latent
        counts = np.diff(step.query_start_host[first:]).astype(np.int64)
        lengths = step.seq_lens_host[first:].astype(np.int64)
        pairs = counts * (lengths - counts) + counts * (counts + 1) // 2
        made = latent.head_dim - spec.rotary_dim + latent.v_head_dim
        saved = pairs * (2 * spec.v_head_dim - made)
        return first + np.nonzero(saved > lengths * spec.v_head_dim * made)[0]

    # ---------------------------------------------------------------------------------------------------------- absorbed

    def _attend_absorbed(
        self, q: torch.Tensor, cache: LayerCache, up: torch.Tensor, wide: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``[T, num_heads, latent.head_dim] -> [T, out_size]``"""
        spec, rotated = self._spec, self._spec.rotary_dim
        to_keys, to_values = self._projections(up)
        if wide is None:
            wide = q.new_empty(len(q), spec.num_heads, spec.head_dim)
            wide[..., :rotated] = q[..., :rotated]
        linear_by_head(q[..., rotated:], to_keys.transpose(1, 2), wide[..., rotated:], invariant=self._invariant)
        mixed = self._absorbed.run(wide, cache).view(len(q), spec.num_heads, spec.v_head_dim)
        out = q.new_empty(len(q), spec.num_heads, self._latent.v_head_dim)
        linear_by_head(mixed, to_values, out, invariant=self._invariant)
        return out.flatten(1)

    def _projections(self, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[num_heads, key channels that are not rotated, v_head_dim]`` and ``[num_heads, latent.v_head_dim, v_head_dim]``"""
        spec, latent = self._spec, self._latent
        parts = [latent.head_dim - spec.rotary_dim, latent.v_head_dim]
        to_keys, to_values = torch.split(up.view(spec.num_heads, sum(parts), spec.v_head_dim), parts, dim=1)
        return to_keys, to_values

    # ------------------------------------------------------------------------------------------------------ uncompressed

    def _planned_prompts(self, step: StepMetadata, block_size: int, itemsize: int) -> list[_Prompts]:
        """Planned by the first layer of a step, which knows the size of blocks."""
        if not self._prompts:
            most = WORKSPACE_BYTES // (self._head_width() * itemsize)
            for rows in _together(self._many, -(-step.seq_lens_host[self._many] // block_size) * block_size, most):
                if len(self._prompts) == len(self._made) and self._make is not None:
                    self._made.append(self._make())
                prompts = _with_own_blocks(step, rows, block_size, self._made[len(self._prompts)])
                prompts.backend.plan(prompts.step)
                self._prompts.append(prompts)
        return self._prompts

    def _head_width(self) -> int:
        """What one head takes of the workspace for a token: its row, and before that what is made of the latent."""
        full = self._spec.uncompressed
        return 2 * full.row_width - full.rotary_dim

    def _attend_uncompressed(
        self, q: torch.Tensor, cache: LayerCache, up: torch.Tensor, step: StepMetadata, prompts: _Prompts
    ) -> torch.Tensor:
        """``[T, num_heads, latent.head_dim] -> [T, out_size]`` of the prompts' tokens, prefix in the cache included."""
        full, rotated = self._spec.uncompressed, self._spec.rotary_dim
        table = step.block_tables[cache.group]
        blocks = table.reshape(-1).index_select(0, prompts.places)
        held = cache.rows.index_select(0, blocks).flatten(0, 2)
        tokens, made, width = len(held), full.row_width - rotated, self._head_width()
        space = self._space(tokens * width, held)
        at_once = min(full.num_heads, space.numel() // (tokens * width))
        out = q.new_empty(len(q), full.num_heads, full.v_head_dim)
        for first in range(0, full.num_heads, at_once):
            heads = min(at_once, full.num_heads - first)
            others, rows = torch.split(
                space[: tokens * heads * width], [tokens * heads * made, tokens * heads * full.row_width]
            )
            rows = rows.view(tokens, heads, full.row_width)
            here = up[first * made : (first + heads) * made]
            others = torch.mm(held[:, rotated:], here.T, out=others.view(tokens, heads * made))
            rows[..., :rotated] = held[:, None, :rotated]
            # A head's other key channels and its values come out side by side, as a row wants them.
            rows[..., rotated:] = others.view(tokens, heads, made)
            part = dataclasses.replace(full, num_heads=heads, num_kv_heads=heads)
            paged = LayerCache(part, 0, rows.view(len(blocks), cache.block_size, heads, full.row_width))
            mixed = prompts.backend.run(q[:, first : first + heads].contiguous(), paged)
            out[:, first : first + heads] = mixed.view(len(q), heads, full.v_head_dim)
        return out.flatten(1)

    def _space(self, least: int, like: torch.Tensor) -> torch.Tensor:
        """Numbers of a type, ``least`` of them or more. On a GPU all that there may be, so that it is there when memory is
        measured; elsewhere what is needed."""
        most = max(least, WORKSPACE_BYTES // like.itemsize)
        wanted = most if like.is_cuda else min(least * self._spec.num_heads, most)
        if self._workspace.numel() < wanted or self._workspace.dtype != like.dtype:
            self._workspace = torch.empty(wanted, dtype=like.dtype, device=like.device)
        return self._workspace


class ReplannedLatentBackend(LatentBackend):
    """With an absorbed one that plans for captured steps. Those are absorbed whole."""

    def __init__(
        self, spec: AttentionSpec, absorbed: AttentionBackend, uncompressed: Callable[[], AttentionBackend] | None
    ) -> None:
        super().__init__(spec, absorbed, uncompressed)
        if not isinstance(absorbed, Replanned):
            raise ValueError(f"{absorbed.name} does not plan for captured steps")
        self._replanned: Replanned = absorbed

    @property
    def edition(self) -> int:
        return self._replanned.edition

    def replan(self, lengths: Lengths) -> None:
        self._replanned.replan(lengths)

    def reserve(self, device: torch.device) -> None:
        self._replanned.reserve(device)


def _together(rows: np.ndarray, sizes: np.ndarray, most: int) -> list[np.ndarray]:
    """The rows in groups of at most ``most`` in size, or of a single row, in their order."""
    groups: list[list[int]] = []
    left = 0
    for row, size in zip(rows.tolist(), sizes.tolist(), strict=True):
        if not groups or size > left:
            groups.append([])
            left = most
        groups[-1].append(row)
        left -= size
    return [np.array(group, dtype=np.int64) for group in groups]


def _rows_of(step: StepMetadata, rows: np.ndarray) -> _Part:
    """The step of some rows alone. All of them, or the first: nothing is copied, so that it can be captured in a graph."""
    if int(rows[-1]) == len(rows) - 1:
        end = len(rows)
        tokens = slice(0, int(step.query_start_host[end]))
        if end == step.num_rows:
            return _Part(step, slice(0, None))
        chosen: slice | torch.Tensor = slice(0, end)
        starts = step.query_start[: end + 1]
        return _Part(_step_of(step, rows, chosen, tokens, starts), tokens)
    device = step.seq_lens.device
    return _Part(
        _step_of(step, rows, upload(rows, device), upload(_tokens_of(step, rows), device), None),
        upload(_tokens_of(step, rows), device),
    )


def _step_of(
    step: StepMetadata,
    rows: np.ndarray,
    chosen: slice | torch.Tensor,
    tokens: slice | torch.Tensor,
    starts: torch.Tensor | None,
) -> StepMetadata:
    starts_host = np.concatenate(([0], np.cumsum(np.diff(step.query_start_host)[rows]))).astype(np.int32)
    return StepMetadata(
        num_decode_rows=int((rows < step.num_decode_rows).sum()),
        query_start=upload(starts_host, step.seq_lens.device) if starts is None else starts,
        seq_lens=step.seq_lens[chosen],
        positions=step.positions[tokens],
        slot_mapping=tuple(slots[tokens] for slots in step.slot_mapping),
        block_tables=tuple(table[chosen] for table in step.block_tables),
        query_start_host=starts_host,
        seq_lens_host=step.seq_lens_host[rows],
    )


def _with_own_blocks(step: StepMetadata, rows: np.ndarray, block_size: int, backend: AttentionBackend) -> _Prompts:
    """The rows' step with block tables of its own, where each row's blocks follow the row's before."""
    device = step.seq_lens.device
    lengths = step.seq_lens_host[rows]
    counts = -(-lengths // block_size)
    ends = np.cumsum(counts)
    column = np.arange(int(ends[-1])) - np.repeat(ends - counts, counts)
    width = step.block_tables[0].shape[1]
    places = np.repeat(rows, counts) * width + column
    own = (ends - counts)[:, None] + np.arange(int(counts.max()))
    table = np.where(own < ends[:, None], own, 0).astype(np.int32)
    part = _rows_of(step, rows)
    return _Prompts(
        dataclasses.replace(part.step, num_decode_rows=0, block_tables=(upload(table, device),)),
        part.tokens,
        upload(places.astype(np.int64), device),
        backend,
    )


def _tokens_of(step: StepMetadata, rows: np.ndarray) -> np.ndarray:
    """Indices of the rows' tokens, row after row."""
    starts = step.query_start_host
    return np.concatenate([np.arange(starts[row], starts[row + 1]) for row in rows]).astype(np.int64)
