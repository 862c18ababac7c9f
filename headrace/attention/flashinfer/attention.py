"""FlashInfer backends for prefill rows, for decode rows, and for MLA.

Each runs rows of one class. ``ByRowClass`` combines them with each other or with the Triton backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headrace.attention.backend import LayerCache, ReplayLengths, Scratch, StepMetadata, scales_missing
from headrace.attention.compiled import EAGER_WORKSPACE, CompiledBackend, Launch, compiling
from headrace.attention.flashinfer import kernels
from headrace.attention.flashinfer.kernels import Kernel, MLAKernel, PagedKernel
from headrace.attention.flashinfer.replay import WORKSPACE, MLAReplay, PagedReplay, Place, Replays, partial_bytes, split_mla
from headrace.attention.paged_rows import PagedRows
from headrace.attention.triton import TritonAttention
from headrace.kernels.transfer import Mark
from headrace.model_spec import AttentionSpec

_RING = 3
"""Wrappers of one geometry used in turn: a plan is written to host memory that the device may still read for the last."""


class Wrapper:
    """A FlashInfer wrapper for steps outside captures, and the event after which it may plan again."""

    def __init__(self, run: Any, device: torch.device, paged: bool = True) -> None:
        self.run = run
        self.paged = paged
        self.copied = Mark(device)


class Wrappers:
    """Rings of wrappers by geometry, and those planned for this step."""

    def __init__(self) -> None:
        self._rings: dict[object, list[Wrapper]] = {}
        self._turn = 0
        self._planned: dict[object, Wrapper] = {}

    def next_step(self) -> None:
        self._planned.clear()
        self._turn += 1

    def planned(self, key: object, make: Callable[[], Wrapper], plan: Callable[[Wrapper], None]) -> Wrapper:
        """The wrapper of a geometry, planned once a step."""
        if key not in self._planned:
            if key not in self._rings:
                self._rings[key] = [make() for _ in range(_RING)]
            wrapper = self._planned[key] = self._rings[key][self._turn % _RING]
            wrapper.copied.wait()
            plan(wrapper)
            wrapper.copied.set()
        return self._planned[key]


class FlashInferBackend(CompiledBackend):
    """Base of the FlashInfer backends: their wrappers, and the replays of captured steps."""

    name = "flashinfer"
    kinds = frozenset({"window", "soft_cap"})
    captured_bytes = EAGER_WORKSPACE
    """Size of the workspace of captured steps."""

    def __init__(self, scratch: Scratch | None = None) -> None:
        super().__init__(scratch)
        self._wrappers = Wrappers()
        self._replays = Replays()

    def plan(self, step: StepMetadata) -> None:
        super().plan(step)
        self._wrappers.next_step()
        self._replays.next_step()

    @property
    def graph_version(self) -> int:
        return self._replays.graph_version

    def prepare_replay(self, lengths: ReplayLengths) -> None:
        self._replays.prepare_replay(lengths)

    def reserve(self, device: torch.device) -> None:
        if self.plans_replays:
            self._space(device, self.captured_bytes)


class FlashInferMLA(FlashInferBackend):
    """Absorbed MLA, for ``MLABackend``. Captured steps have only decode rows."""

    kinds = frozenset()
    has_scales = False
    capturable = True
    plans_replays = True

    @classmethod
    def refusals(cls, spec: AttentionSpec, device: str, dtype: str, kv_dtype: str | None) -> list[str]:
        reasons = TritonAttention.supports(spec, device, dtype) + kernels.refusals(device, dtype)
        widths = spec.v_head_dim, spec.head_dim - spec.v_head_dim
        if widths != kernels.MLA_WIDTHS:
            supported, actual = (f"{mla} and {rotated}" for mla, rotated in (kernels.MLA_WIDTHS, widths))
            reasons.append(f"its MLA kernel supports widths {supported}, not {actual}")
        if kernels.MLA_TILE % spec.num_heads:
            # How far a tile of queries sees is rounded down to whole queries (mla_hopper.cuh and mla.cuh of 0.6.14): one whose
            # heads are in two tiles would not see its own key where that is the first of 64.
            reasons.append(f"its MLA kernel supports numbers of heads that divide {kernels.MLA_TILE}, not {spec.num_heads}")
        return reasons

    @classmethod
    def wants(cls, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> list[Kernel]:
        return [kernels.for_mla(dtype, device)]

    def _replay(self, step: StepMetadata, cache: LayerCache, q: torch.Tensor) -> MLAReplay | None:
        spec = cache.spec
        kernel = kernels.for_mla(q.dtype, q.device)
        key = (cache.group, spec.num_heads, spec.scale, kernel)

        def make(place: Place) -> MLAReplay:
            return MLAReplay(kernel, spec, place, self._space(q.device, self.captured_bytes))

        return self._replays.replay(step, cache, kernel, key, make)

    def _launch(self, step: StepMetadata, cache: LayerCache, q: torch.Tensor) -> Launch | None:
        kernel = kernels.for_mla(q.dtype, q.device)
        if not compiling(kernel).ready:
            return None
        run = self._wrapper(step, kernel, cache).run.run
        return lambda q, cache, out: run(*split_mla(q, cache), out=out)

    def _wrapper(self, step: StepMetadata, kernel: MLAKernel, cache: LayerCache) -> Wrapper:
        spec, space = cache.spec, self._space(cache.rows.device)

        def make() -> Wrapper:
            from flashinfer.mla import BatchMLAPagedAttentionWrapper

            return Wrapper(BatchMLAPagedAttentionWrapper(space, backend=kernel.variant), space.device)

        def plan(wrapper: Wrapper) -> None:
            rows = PagedRows(step, cache.block_size)
            lengths = torch.from_numpy(rows.lengths.astype("int32"))
            indices = (rows.query_start, rows.page_start, rows.pages(cache.group), lengths)
            kernel.plan(wrapper.run, spec, indices, cache.block_size)

        return self._wrappers.planned((cache.group, spec.num_heads, spec.scale, kernel), make, plan)


class FlashInferPrefill(FlashInferBackend):
    """Prefill rows by FlashInfer's paged kernel: fa3 on Hopper where K and V are equally wide, else fa2."""

    def __init__(self, scratch: Scratch | None = None) -> None:
        super().__init__(scratch)
        self._rows: PagedRows | None = None
        """The rows of this step."""
        self._launches: dict[tuple[object, ...], Launch | None] = {}
        """Launches of this step, by all that they depend on of a layer."""

    @classmethod
    def refusals(cls, spec: AttentionSpec, device: str, dtype: str, kv_dtype: str | None) -> list[str]:
        reasons = TritonAttention.supports(spec, device, dtype) + kernels.refusals(device, dtype)
        missing = [] if kernels.reads_copies(spec, torch.device(device)) else scales_missing(kv_dtype)
        reasons += [f"{reason}, and copies of numbers are for fa3 alone" for reason in missing]
        if spec.head_dim not in (*kernels.WIDTHS, 192) or spec.v_head_dim not in kernels.WIDTHS:
            reasons.append(f"it has no kernel for heads {spec.head_dim} and {spec.v_head_dim} wide")
        return reasons

    @classmethod
    def wants(cls, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> list[Kernel]:
        return [kernels.for_prompts(spec, dtype, device)]

    def plan(self, step: StepMetadata) -> None:
        super().plan(step)
        self._rows = None
        self._launches.clear()

    def _launch(self, step: StepMetadata, cache: LayerCache, q: torch.Tensor) -> Launch | None:
        spec, stored = cache.spec, (cache.k_scale is None, cache.rows.is_contiguous())
        kind = (*_geometry(cache), spec.head_dim, spec.v_head_dim, *stored, q.dtype)
        if kind not in self._launches:
            self._launches[kind] = self._choose(step, cache, q)
        return self._launches[kind]

    def _choose(self, step: StepMetadata, cache: LayerCache, q: torch.Tensor) -> Launch | None:
        if self._rows is None:
            self._rows = PagedRows(step, cache.block_size)
        rows = self._rows
        kernel = next((kernel for kernel in self._candidates(rows, cache, q) if compiling(kernel).ready), None)
        if kernel is None:
            return None
        wrapper = self._wrapper(kernel, rows, cache, q)
        if wrapper.paged:
            return lambda q, cache, out: wrapper.run.run(q, (cache.keys, cache.values), out=out)

        def over_copies(q: torch.Tensor, cache: LayerCache, out: torch.Tensor) -> None:
            copies, width = rows.copies(cache, q.dtype), cache.spec.head_dim
            wrapper.run.run(q, copies[..., :width], copies[..., width:], out=out)

        return over_copies

    def _candidates(self, rows: PagedRows, cache: LayerCache, q: torch.Tensor) -> list[PagedKernel]:
        """Kernels that may run the rows, the best first."""
        kernel = kernels.for_prompts(cache.spec, q.dtype, q.device)
        return [kernel] if cache.k_scale is None or _gathers(kernel, rows, cache) else []

    def _wrapper(self, kernel: PagedKernel, rows: PagedRows, cache: LayerCache, q: torch.Tensor) -> Wrapper:
        """The wrapper for a kernel, planned once a step for all layers of one geometry."""
        spec, space = cache.spec, self._space(q.device)
        paged = not _gathers(kernel, rows, cache)

        def make() -> Wrapper:
            from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

            kind = BatchPrefillWithPagedKVCacheWrapper if paged else BatchPrefillWithRaggedKVCacheWrapper
            return Wrapper(kind(space, "NHD", backend=kernel.variant), q.device, paged)

        def plan(wrapper: Wrapper) -> None:
            if paged:
                indices = (rows.query_start, rows.page_start, rows.pages(cache.group), rows.last_page)
                kernel.plan(wrapper.run, spec, indices, cache.block_size, max_token_per_sequence=rows.most_queries)
            else:
                kernel.plan(wrapper.run, spec, (rows.query_start, rows.key_start))

        return self._wrappers.planned((*_geometry(cache), kernel, paged), make, plan)


class FlashInferCapturedPrefill(FlashInferPrefill):
    """Also runs prefill rows in CUDA graphs, with fa2, and on Hopper keys wider than values, with fa3 over copies."""

    capturable = True
    plans_replays = True
    captured_bytes = WORKSPACE
    has_scales = False

    @classmethod
    def refusals(cls, spec: AttentionSpec, device: str, dtype: str, kv_dtype: str | None) -> list[str]:
        # What reads an FP8 cache, copies of its numbers, is not for graphs: ``has_scales`` says so.
        return super().refusals(spec, device, dtype, None)

    @classmethod
    def wants(cls, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> list[Kernel]:
        contiguous = kernels.for_contiguous(spec, dtype, device)
        compiled = [kernels.for_few_queries(spec, dtype), *super().wants(spec, dtype, device)]
        return compiled if contiguous is None else [*compiled, contiguous]

    def _candidates(self, rows: PagedRows, cache: LayerCache, q: torch.Tensor) -> list[PagedKernel]:
        contiguous = kernels.for_contiguous(cache.spec, q.dtype, q.device)
        paged = super()._candidates(rows, cache, q)
        return paged if contiguous is None or not _gathers(contiguous, rows, cache) else [contiguous, *paged]

    def _replay(self, step: StepMetadata, cache: LayerCache, q: torch.Tensor) -> PagedReplay | None:
        spec = cache.spec
        kernel = kernels.for_few_queries(spec, q.dtype)
        key = (*_geometry(cache), kernel)

        def make(place: Place) -> PagedReplay | None:
            if partial_bytes(spec, place) > self.captured_bytes:
                return None
            return PagedReplay(kernel, spec, place, self._space(q.device, self.captured_bytes))

        return self._replays.replay(step, cache, kernel, key, make)


class FlashInferDecode(FlashInferCapturedPrefill):
    """Decode rows with fa2: the prefill kernel, whose matrix units also serve groups of query heads."""

    @classmethod
    def wants(cls, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> list[Kernel]:
        return [kernels.for_few_queries(spec, dtype)]

    def _candidates(self, rows: PagedRows, cache: LayerCache, q: torch.Tensor) -> list[PagedKernel]:
        return [kernels.for_few_queries(cache.spec, q.dtype)]


def _geometry(cache: LayerCache) -> tuple[object, ...]:
    """Returns the properties that are equal in layers that share a plan."""
    spec = cache.spec
    return cache.group, spec.num_heads, spec.num_kv_heads, spec.scale, spec.window, spec.soft_cap


def _gathers(kernel: PagedKernel, rows: PagedRows, cache: LayerCache) -> bool:
    """Whether to copy keys and values out of their blocks first."""
    return kernel.variant == "fa3" and not kernel.windowed and rows.copies_pay(cache, kernel.dtype)
