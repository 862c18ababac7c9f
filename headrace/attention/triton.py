"""Attention on GPUs with our own Triton kernel: any geometry, what other backends refuse."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
import torch

from headrace.attention.backend import LayerCache, StepMetadata
from headrace.kernels import support
from headrace.kernels.triton.tiling import (
    Geometry,
    Tiling,
    aligned,
    choose_tiling,
    invariant_tiling,
    partial_size,
    workspace_bound,
)
from headrace.spec import AttentionSpec, Mode

_DTYPES = ("bfloat16", "float16", "float32")
_WIDEST = 1024
"""Channels of a head whose sums a program can keep."""
INVARIANT_SPLIT = 4096
"""Tokens of a split where outputs must not depend on the batch."""


@dataclasses.dataclass(frozen=True)
class _Part:
    """Rows that are launched together: those with one query, or those with more."""

    tokens: range
    query_start: torch.Tensor
    """``[R + 1]`` int32"""
    seq_lens: torch.Tensor
    """``[R]`` int32"""
    tables: tuple[torch.Tensor, ...]
    """Per cache group, ``[R, B]`` int32."""
    max_queries: int
    max_seq_len: int
    """An upper bound."""
    single: bool
    """Each row has one query."""
    decode: bool
    """They are the step's decode rows."""


class TritonAttention:
    """Lengths are read where they are: the host's serve as upper bounds for the number of programs alone.

    Nothing waits for the device, and the workspace stays where it is, so that launches can be captured in a graph.
    """

    name = "triton"
    capturable = True
    _invariant = False
    needs_exact_lengths = False

    def __init__(self) -> None:
        # Triton is an optional dependency, which ``supports`` looks for.
        from headrace.kernels.triton import paged_attention

        self._kernel = paged_attention
        self._step: StepMetadata | None = None
        self._parts: list[_Part] = []
        self._tilings: dict[object, Tiling] = {}
        self._workspace = torch.empty(0)
        self._outgrown: list[torch.Tensor] = []
        """Kept, because a captured graph may write there."""

    @staticmethod
    def supports(spec: AttentionSpec, device: str, dtype: str, mode: Mode = "dense", kv_dtype: str | None = None) -> list[str]:
        reasons = support.refusals(device)
        if dtype not in _DTYPES:
            reasons.append(f"it computes in {', '.join(_DTYPES)}, not in {dtype}")
        if dtype == "bfloat16" and support.interpreted():
            reasons.append("Triton's interpreter cannot multiply matrices in bfloat16")
        if max(spec.head_dim, spec.v_head_dim) > _WIDEST:
            reasons.append(f"heads may be {_WIDEST} wide, not {max(spec.head_dim, spec.v_head_dim)}")
        if mode != "dense":
            reasons.append(f"it attends densely only, not {mode}")
        return reasons

    @property
    def workspace_bytes(self) -> int:
        return self._workspace.nbytes + sum(outgrown.nbytes for outgrown in self._outgrown)

    def plan(self, step: StepMetadata) -> None:
        self._step = step
        self._tilings.clear()
        # One shape of tiles for all rows is what makes outputs invariant; else rows with one query want small ones.
        border = 0 if self._invariant else step.num_decode_rows
        parts = (_part(step, 0, border), _part(step, border, step.num_rows))
        self._parts = [part for part in parts if part is not None]

    def run(self, q: torch.Tensor, cache: LayerCache, sinks: torch.Tensor | None = None) -> torch.Tensor:
        if self._step is None:
            raise RuntimeError("plan() comes before run()")
        spec = cache.spec
        out = torch.empty(len(q), spec.num_heads, spec.v_head_dim, dtype=q.dtype, device=q.device)
        if len(q) > self._step.num_tokens:
            out[self._step.num_tokens :].zero_()
        self.run_into(out, q, cache, sinks)
        return out.flatten(1)

    def run_into(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        cache: LayerCache,
        sinks: torch.Tensor | None,
        *,
        only: Literal["decode", "prompts"] | None = None,
    ) -> None:
        """Fills ``out [T, num_heads, v_head_dim]``, or of it the tokens of decode rows or of prompts alone."""
        spec = cache.spec
        for number, part in enumerate(self._parts):
            if only is not None and part.decode != (only == "decode"):
                continue
            tiling = self._tiling_of(number, part, q, cache)
            self._kernel.paged_attention(
                q,
                cache.keys,
                cache.values,
                part.tables[cache.group],
                part.query_start,
                part.seq_lens,
                scale=spec.scale,
                tiling=tiling,
                tokens=part.tokens,
                single=part.single and not self._invariant,
                window=spec.window,
                soft_cap=spec.soft_cap,
                sinks=sinks,
                k_scale=cache.k_scale,
                v_scale=cache.v_scale,
                dirty=cache.dirty,
                out=out,
                workspace=self._workspace,
            )

    def _tiling_of(self, number: int, part: _Part, q: torch.Tensor, cache: LayerCache) -> Tiling:
        """Chosen once a step for all layers of one geometry; with it, the workspace is large enough."""
        spec = cache.spec
        key = (number, spec.num_kv_heads, spec.group_size, spec.head_dim, spec.v_head_dim, q.dtype, cache.keys.dtype)
        if key not in self._tilings:
            straight = aligned(cache.keys, cache.values)
            geometry = Geometry(*key[1:5], q.itemsize, cache.keys.itemsize, support.resources(q.device), straight)
            if self._invariant:
                chosen = invariant_tiling(geometry, max_seq_len=part.max_seq_len, split_tokens=INVARIANT_SPLIT)
                size = partial_size(chosen, len(part.tokens), spec.num_heads, spec.v_head_dim)
            else:
                chosen = choose_tiling(
                    geometry,
                    num_rows=len(part.seq_lens),
                    num_tokens=len(part.tokens),
                    max_queries=part.max_queries,
                    max_seq_len=part.max_seq_len,
                )
                size = workspace_bound(geometry)
            self._reserve(size, q.device)
            self._tilings[key] = chosen
        return self._tilings[key]

    def _reserve(self, size: int, device: torch.device) -> None:
        if self._workspace.numel() < size:
            self._outgrown.append(self._workspace)
            # Doubling: all that was outgrown is no more than what is in use.
            self._workspace = torch.empty(1 << (size - 1).bit_length(), dtype=torch.float32, device=device)


class InvariantAttention(TritonAttention):
    """The same kernel with tiles of one shape and splits at fixed places: a token comes out bitwise the same in any batch and
    chunking, which takes longer.
    """

    name = "invariant"
    _invariant = True


def _part(step: StepMetadata, first: int, end: int) -> _Part | None:
    """The rows ``first`` to ``end``, None if they have no queries."""
    starts = step.query_start_host[first : end + 1]
    tokens = range(int(starts[0]), int(starts[-1]))
    if not tokens:
        return None
    counts = np.diff(starts)
    return _Part(
        tokens=tokens,
        query_start=step.query_start[first : end + 1],
        seq_lens=step.seq_lens[first:end],
        tables=tuple(table[first:end] for table in step.block_tables),
        max_queries=int(counts.max()),
        max_seq_len=max(int(step.seq_lens_host[first:end].max()), 1),
        single=bool((counts == 1).all()),
        decode=end == step.num_decode_rows,
    )
