"""Attention on GPUs with headrace's kernels: Triton's for any geometry, one in CUDA C++ for decode rows of the usual ones."""

from __future__ import annotations

import torch

from headrace.attention.backend import VISIBLE_ENDS, AttentionBackend, AttentionInputs, LayerCache, Scratch, StepMetadata
from headrace.attention.compose import output_of
from headrace.kernels import support
from headrace.kernels.attention import cuda_decode, cuda_ordered
from headrace.kernels.attention.tiling import (
    Geometry,
    Tiling,
    aligned,
    batch_invariant_tiling,
    choose_tiling,
    graph_size,
    partial_size,
    workspace_bound,
)
from headrace.kernels.attention.unfinished import Unfinished
from headrace.model_spec import AttentionSpec

_WIDEST = 1024
"""Widest head whose sums fit in a program."""
INVARIANT_SPLIT = 4096
"""Tokens of a split in batch-invariant mode."""


class TritonAttention(AttentionBackend):
    """Reads lengths on the device; the host's are upper bounds that only size the launch.

    Nothing waits for the device, and the workspace keeps its address, so launches can be captured in a graph.
    """

    name = "triton"
    kinds = frozenset({"window", "chunked", "soft_cap", "sinks"})
    modes = frozenset({VISIBLE_ENDS})
    dtypes = ("bfloat16", "float16", "float32")
    capturable = True
    _invariant = False

    def __init__(self, scratch: Scratch | None = None) -> None:
        super().__init__(scratch)
        # Triton is an optional dependency, which ``supports`` looks for.
        from headrace.kernels.attention.triton import finishes, paged_attention

        self._attend, self._finishes = paged_attention, finishes
        self._parts: list[StepMetadata] = []
        """The rows launched together: decode rows, then prefill rows."""
        self._tilings: dict[object, Tiling] = {}
        self._workspace = torch.empty(0)
        self._waited = False
        """The kernel in CUDA C++ has run in this step."""

    @classmethod
    def refusals(cls, spec: AttentionSpec, device: str, dtype: str, kv_dtype: str | None) -> list[str]:
        reasons = support.refusals(device)
        if dtype == "bfloat16" and support.interpreted():
            reasons.append("Triton's interpreter cannot multiply matrices in bfloat16")
        if max(spec.head_dim, spec.v_head_dim) > _WIDEST:
            reasons.append(f"heads may be {_WIDEST} wide, not {max(spec.head_dim, spec.v_head_dim)}")
        return reasons

    def plan(self, step: StepMetadata) -> None:
        super().plan(step)
        self._tilings.clear()
        self._waited = False
        parts = (step.rows(0, step.num_decode_rows), step.rows(step.num_decode_rows, step.num_rows))
        self._parts = [part for part in parts if part.num_tokens]

    def finishes(self, cache: LayerCache) -> bool:
        single = not self._invariant and all(part.single_query for part in self._parts)
        return single and cache.k_scale is None and self._finishes(cache.keys, cache.values)

    def run(self, inputs: AttentionInputs) -> torch.Tensor:
        q, cache, sinks, visible_ends, _, unfinished = inputs
        spec, out = cache.spec, output_of(self.step, inputs)
        if unfinished is not None and cuda_decode.takes(self.step.num_rows, spec, cache.rows, unfinished, sinks):
            self._decode(unfinished, cache, out)
            return out.flatten(1)
        for number, part in enumerate(self._parts):
            tiling = self._tiling_of(number, part, q, cache)
            in_order = self._invariant and part.single_query
            if in_order and cuda_ordered.takes(part.num_rows, spec, cache.rows, q, sinks):
                self._decode_in_order(part, tiling, q, cache, out)
                continue
            self._attend(
                q,
                cache.keys,
                cache.values,
                part.block_tables[cache.group],
                part.query_start,
                part.seq_lens,
                scale=spec.scale,
                tiling=tiling,
                tokens=range(part.tokens.start, part.tokens.stop),
                single=part.single_query and not self._invariant,
                window=spec.window,
                chunked=spec.chunked,
                soft_cap=spec.soft_cap,
                sinks=sinks,
                k_scale=cache.k_scale,
                v_scale=cache.v_scale,
                dirty=cache.dirty,
                visible_ends=visible_ends,
                unfinished=unfinished,
                out=out,
                workspace=self._workspace,
            )
        return out.flatten(1)

    def _decode(self, unfinished: Unfinished, cache: LayerCache, out: torch.Tensor) -> None:
        """Runs rows of one query each by the kernel in CUDA C++."""
        spec, multiprocessors = cache.spec, support.resources(out.device).multiprocessors
        for part in self._parts:
            cuda_decode.decode_attention(
                unfinished.of_tokens(part.tokens),
                cache.rows,
                part.block_tables[cache.group],
                part.seq_lens,
                out[part.tokens],
                scale=spec.scale,
                tiling=cuda_decode.choose_tiling(part.num_rows * spec.num_kv_heads, multiprocessors),
                early=self._waited,
            )
        # All that wrote lengths and block tables is complete when the next layer's starts.
        self._waited = True

    def _decode_in_order(
        self, part: StepMetadata, tiling: Tiling, q: torch.Tensor, cache: LayerCache, out: torch.Tensor
    ) -> None:
        """Runs rows of one query each by the kernel in CUDA C++ that sums up as Triton's batch-invariant one does."""
        cuda_ordered.decode_attention(
            q[part.tokens],
            cache.rows,
            part.block_tables[cache.group],
            part.seq_lens,
            out[part.tokens],
            self._workspace,
            scale=cache.spec.scale,
            splits=tiling.splits,
            split_tokens=tiling.split_tokens,
            early=self._waited,
        )
        # As in ``_decode``, where the kernel is all that attends.
        self._waited = len(self._parts) == 1

    def _tiling_of(self, number: int, part: StepMetadata, q: torch.Tensor, cache: LayerCache) -> Tiling:
        """Chooses a tiling once a step for all layers of one geometry, and grows the workspace for it."""
        spec = cache.spec
        key = (number, spec.num_kv_heads, spec.group_size, spec.head_dim, spec.v_head_dim, q.dtype, cache.keys.dtype)
        if key not in self._tilings:
            straight = aligned(cache.keys, cache.values)
            geometry = Geometry(*key[1:5], q.itemsize, cache.keys.itemsize, support.resources(q.device), straight)
            max_seq_len = max(int(part.seq_lens_host.max()), 1)
            if self._invariant:
                chosen = batch_invariant_tiling(geometry, max_seq_len=max_seq_len, split_tokens=INVARIANT_SPLIT)
                size = partial_size(chosen, part.num_tokens, spec.num_heads, spec.v_head_dim)
            else:
                # Of bounds that steps have in common with CUDA graphs, whose capture compiles the kernels.
                chosen = choose_tiling(
                    geometry,
                    num_rows=graph_size(part.num_rows) if part.single_query else part.num_rows,
                    num_tokens=part.num_tokens,
                    max_queries=int(part.query_counts.max()),
                    max_seq_len=part.longest or max_seq_len,
                )
                size = workspace_bound(geometry)
            if self._workspace.numel() < size:
                # Doubling bounds the outgrown tensors by the size in use.
                numbers = 1 << (size - 1).bit_length()
                self._workspace = self.scratch.take("partial outputs", 4 * numbers, q.device).view(torch.float32)
            self._tilings[key] = chosen
        return self._tilings[key]


class InvariantAttention(TritonAttention):
    """The same kernel with one tile shape and splits at fixed places: slower, but a token's output is bitwise the same in any
    batch and chunking.
    """

    name = "invariant"
    _invariant = True
