"""The backends: FlashInfer for prompts beside our own kernel for decode rows, FlashInfer for both, and for compressed KV."""

from __future__ import annotations

from typing import Any

import torch

from headrace.attention.backend import LayerCache, Lengths, StepMetadata, scales_missing
from headrace.attention.flashinfer import kernels
from headrace.attention.flashinfer.bounded import Bounded, Part
from headrace.attention.flashinfer.kernels import Kernel, LatentKernel, PagedKernel, compiling
from headrace.attention.flashinfer.replay import WORKSPACE, LatentReplay, PagedReplay, Place, partial_bytes, split_latent
from headrace.attention.flashinfer.rows import Rows
from headrace.attention.triton import TritonAttention
from headrace.kernels.kv_cache import gather_numbers
from headrace.kernels.transfer import Mark
from headrace.spec import AttentionSpec, Mode

_WORKSPACE = 256 << 20
"""Bytes for partial results where no steps are captured; FlashInfer's advice is 128 MiB and more."""
_GATHER_QUERIES = 768
"""Queries a row on average from which copying keys and values out of their blocks pays: fa3 does 677 TFLOP/s on contiguous
ones and 607 on paged ones (32k tokens, 32 and 8 heads of 128, H200)."""
_GATHER_BYTES = 512 << 20
"""The most that such a copy, which lives as long as one layer's attention, may take."""
_RING = 3
"""Wrappers of one geometry that take turns: a plan is written to host memory, from which the device may still read the last."""


class _Wrapper:
    """A wrapper of FlashInfer's for steps that are not captured, and the mark behind which it may plan again."""

    def __init__(self, run: Any, device: torch.device, paged: bool = True) -> None:
        self.run = run
        self.paged = paged
        self.copied = Mark(device)


class _Wrappers:
    """Those of each kind, in turn, and which are planned for this step."""

    def __init__(self) -> None:
        self._rings: dict[object, list[_Wrapper]] = {}
        self._turn = 0
        self._planned: dict[object, _Wrapper] = {}

    def next_step(self) -> None:
        self._planned.clear()
        self._turn += 1

    def planned(self, key: object) -> _Wrapper | None:
        return self._planned.get(key)

    def take(self, key: object, make: Any) -> _Wrapper:
        """One to be planned for this step; ``make()`` makes them."""
        if key not in self._rings:
            self._rings[key] = [make() for _ in range(_RING)]
        wrapper = self._planned[key] = self._rings[key][self._turn % _RING]
        wrapper.copied.wait()
        return wrapper


class _OnFlashInfer:
    """What the backends have in common: our own kernel for what FlashInfer has none for yet, and the workspace."""

    capturable = True
    needs_exact_lengths = True
    _captures = False
    """It plans for captured steps."""

    def __init__(self) -> None:
        self._own = TritonAttention()
        self._step: StepMetadata | None = None
        self._wrappers = _Wrappers()
        self._bounded = Bounded()
        self._workspaces: dict[int, torch.Tensor] = {}

    @property
    def workspace_bytes(self) -> int:
        return self._own.workspace_bytes + sum(space.nbytes for space in self._workspaces.values())

    def plan(self, step: StepMetadata) -> None:
        if not step.bounded:
            # Whether or not a kernel is ready to use it: one that becomes ready later finds no memory taken by the KV cache.
            self._space(step.seq_lens.device)
        self._own.plan(step)
        self._step = step
        self._wrappers.next_step()
        self._bounded.next_step()

    def run(self, q: torch.Tensor, cache: LayerCache, sinks: torch.Tensor | None = None) -> torch.Tensor:
        step, spec = self._step, cache.spec
        if step is None:
            raise RuntimeError("plan() comes before run()")
        if step.bounded and not self._captures:
            return self._own.run(q, cache, sinks)
        out = torch.empty(len(q), spec.num_heads, spec.v_head_dim, dtype=q.dtype, device=q.device)
        if len(q) > step.num_tokens:
            out[step.num_tokens :].zero_()
        (self._run_bounded if step.bounded else self._run_exact)(step, out, q, cache)
        return out.flatten(1)

    def _run_bounded(self, step: StepMetadata, out: torch.Tensor, q: torch.Tensor, cache: LayerCache) -> None:
        for part in Part.of(step):
            replay = self._replay(step, part, cache, q)
            if replay is None:
                self._own.run_into(out, q, cache, None, only=part.kind)
                continue
            if part.kind == "prompts":
                # There may be fewer tokens than there is room for.
                out[part.tokens].zero_()
            replay.run(q[part.tokens], cache, out[part.tokens])

    def _replay(self, step: StepMetadata, part: Part, cache: LayerCache, q: torch.Tensor) -> PagedReplay | LatentReplay | None:
        """None: it is for our own kernel."""
        raise NotImplementedError

    def _run_exact(self, step: StepMetadata, out: torch.Tensor, q: torch.Tensor, cache: LayerCache) -> None:
        raise NotImplementedError

    def _space(self, device: torch.device, size: int = _WORKSPACE) -> torch.Tensor:
        """Bytes that all wrappers share that asked for so many."""
        if size not in self._workspaces:
            self._workspaces[size] = torch.zeros(size, dtype=torch.uint8, device=device)
        return self._workspaces[size]


class _Replanned(_OnFlashInfer):
    """Those that plan for captured steps too."""

    _captures = True
    _captured_bytes = _WORKSPACE
    """Of the workspace of captured steps."""

    @property
    def edition(self) -> int:
        return self._bounded.edition

    def replan(self, lengths: Lengths) -> None:
        self._bounded.replan(lengths)

    def reserve(self, device: torch.device) -> None:
        self._space(device, self._captured_bytes)


class FlashInferLatent(_Replanned):
    """Absorbed attention over compressed KV, as ``LatentBackend`` asks for it. Prompts of captured steps are ours."""

    name = "flashinfer"
    does = "FlashInfer's MLA kernel for absorbed rows, but for prompts within a graph"

    @staticmethod
    def supports(spec: AttentionSpec, device: str, dtype: str, mode: Mode = "dense", kv_dtype: str | None = None) -> list[str]:
        reasons = TritonAttention.supports(spec, device, dtype, mode, kv_dtype) + scales_missing(kv_dtype)
        reasons += kernels.refusals(device, dtype)
        widths = spec.v_head_dim, spec.head_dim - spec.v_head_dim
        if widths != kernels.LATENT_WIDTHS:
            wanted, found = (f"{latent} and {rotated}" for latent, rotated in (kernels.LATENT_WIDTHS, widths))
            reasons.append(f"its kernel for compressed KV is for widths {wanted}, not {found}")
        if kernels.LATENT_TILE % spec.num_heads:
            # How far a tile of queries sees is rounded down to whole queries (mla_hopper.cuh and mla.cuh of 0.6.14): one whose
            # heads are in two tiles would not see its own key where that is the first of 64.
            reasons.append(f"its kernel for compressed KV is for heads that divide {kernels.LATENT_TILE}, not {spec.num_heads}")
        if spec.window is not None or spec.soft_cap is not None:
            reasons.append("its kernel for compressed KV has no windows and no soft caps")
        return reasons

    @staticmethod
    def wants(spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> list[Kernel]:
        return [kernels.for_latent(dtype, device)]

    def _replay(self, step: StepMetadata, part: Part, cache: LayerCache, q: torch.Tensor) -> LatentReplay | None:
        if part.kind == "prompts":
            # How the kernel is launched depends on how many queries a row has on average, which a capture would freeze.
            return None
        spec = cache.spec
        kernel = kernels.for_latent(q.dtype, q.device)
        key = (cache.group, spec.num_heads, spec.scale, kernel)

        def make(place: Place) -> LatentReplay:
            return LatentReplay(kernel, spec, place, self._space(q.device, self._captured_bytes))

        return self._bounded.replay(part, step, cache, kernel, key, make)

    def _run_exact(self, step: StepMetadata, out: torch.Tensor, q: torch.Tensor, cache: LayerCache) -> None:
        kernel = kernels.for_latent(q.dtype, q.device)
        if not compiling(kernel).ready:
            self._own.run_into(out, q, cache, None)
            return
        part = slice(0, step.num_tokens)
        self._wrapper(step, kernel, cache).run.run(*split_latent(q[part], cache), out=out[part])

    def _wrapper(self, step: StepMetadata, kernel: LatentKernel, cache: LayerCache) -> _Wrapper:
        spec, space = cache.spec, self._space(cache.rows.device)
        key = (cache.group, spec.num_heads, spec.scale, kernel)
        found = self._wrappers.planned(key)
        if found is not None:
            return found

        def make() -> _Wrapper:
            from flashinfer.mla import BatchMLAPagedAttentionWrapper

            return _Wrapper(BatchMLAPagedAttentionWrapper(space, backend=kernel.variant), space.device)

        wrapper = self._wrappers.take(key, make)
        rows = Rows(step, 0, step.num_rows, cache.block_size)
        wrapper.run.plan(
            rows.query_start,
            rows.page_start,
            rows.pages(cache.group),
            torch.from_numpy(rows.lengths.astype("int32")),
            spec.num_heads,
            *kernels.LATENT_WIDTHS,
            cache.block_size,
            True,
            spec.scale,
            kernel.dtype,
            kernel.dtype,
        )
        wrapper.copied.set()
        return wrapper


class FlashInferPrompts(_OnFlashInfer):
    """Prompts by FlashInfer's paged prefill (fa3 on Hopper where K and V are equally wide, else fa2), decode rows by ours."""

    name = "flashinfer+triton"
    does = "prompts by FlashInfer, decode rows and CUDA graphs by headrace's kernel, which reads KV faster"
    _decodes = False

    def __init__(self) -> None:
        super().__init__()
        self._rows: dict[str, Rows] = {}
        """Of this step, by kind."""

    @staticmethod
    def supports(spec: AttentionSpec, device: str, dtype: str, mode: Mode = "dense", kv_dtype: str | None = None) -> list[str]:
        reasons = TritonAttention.supports(spec, device, dtype, mode, kv_dtype) + kernels.refusals(device, dtype)
        missing = [] if kernels.reads_copies(spec, torch.device(device)) else scales_missing(kv_dtype)
        reasons += [f"{reason}, and copies of numbers are for fa3 alone" for reason in missing]
        return reasons + kernels.no_kernel(spec)

    @staticmethod
    def wants(spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> list[Kernel]:
        """What it will have compiled for a layer."""
        return [kernels.for_prompts(spec, dtype, device)]

    def plan(self, step: StepMetadata) -> None:
        super().plan(step)
        self._rows.clear()

    def _run_exact(self, step: StepMetadata, out: torch.Tensor, q: torch.Tensor, cache: LayerCache) -> None:
        for part in Part.of(step):
            if part.kind == "decode" and not self._decodes:
                self._own.run_into(out, q, cache, None, only=part.kind)
                continue
            if part.kind not in self._rows:
                self._rows[part.kind] = Rows(step, part.first, part.end, cache.block_size)
            rows = self._rows[part.kind]
            kernel = self._kernel(part, rows, cache, q)
            if kernel is None:
                self._own.run_into(out, q, cache, None, only=part.kind)
                continue
            wrapper = self._wrapper(kernel, part, rows, cache, q)
            if wrapper.paged:
                wrapper.run.run(q[rows.tokens], (cache.keys, cache.values), out=out[rows.tokens])
            else:
                own, width = _copied(rows, cache, q.dtype), cache.spec.head_dim
                wrapper.run.run(q[rows.tokens], own[..., :width], own[..., width:], out=out[rows.tokens])

    def _kernel(self, part: Part, rows: Rows, cache: LayerCache, q: torch.Tensor) -> PagedKernel | None:
        """The best one that is ready; None: none is."""
        wanted: list[PagedKernel | None] = []
        if cache.k_scale is not None:
            kernel = kernels.for_prompts(cache.spec, q.dtype, q.device)
            wanted.append(kernel if _gathers(kernel, rows, cache) else None)
        elif part.kind == "prompts":
            other = kernels.for_contiguous(cache.spec, q.dtype, q.device) if self._decodes else None
            wanted.append(other if other is not None and _gathers(other, rows, cache) else None)
            wanted.append(kernels.for_prompts(cache.spec, q.dtype, q.device))
        else:
            wanted.append(kernels.for_few_queries(cache.spec, q.dtype))
        return next((kernel for kernel in wanted if kernel is not None and compiling(kernel).ready), None)

    def _wrapper(self, kernel: PagedKernel, part: Part, rows: Rows, cache: LayerCache, q: torch.Tensor) -> _Wrapper:
        """Planned once a step for all layers of one geometry."""
        spec, space = cache.spec, self._space(q.device)
        paged = not _gathers(kernel, rows, cache)
        geometry = (cache.group, spec.num_heads, spec.num_kv_heads, spec.scale, spec.window, spec.soft_cap)
        key = (part.kind, *geometry, kernel, paged)
        found = self._wrappers.planned(key)
        if found is not None:
            return found

        def make() -> _Wrapper:
            from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

            kind = BatchPrefillWithPagedKVCacheWrapper if paged else BatchPrefillWithRaggedKVCacheWrapper
            return _Wrapper(kind(space, "NHD", backend=kernel.variant), q.device, paged)

        wrapper = self._wrappers.take(key, make)
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        if paged:
            keys = (rows.page_start, rows.pages(cache.group), rows.last_page)
            where: tuple[Any, ...] = (rows.query_start, *keys, *heads, cache.block_size)
        else:
            where = (rows.query_start, rows.key_start, *heads)
        wrapper.run.plan(
            *where,
            head_dim_vo=spec.v_head_dim,
            causal=True,
            sm_scale=spec.scale,
            window_left=-1 if spec.window is None else spec.window - 1,
            logits_soft_cap=spec.soft_cap,
            q_data_type=q.dtype,
            kv_data_type=q.dtype,
            **({"max_token_per_sequence": rows.most_queries} if paged else {}),
        )
        wrapper.copied.set()
        return wrapper


class FlashInferAttention(FlashInferPrompts, _Replanned):
    """Decode rows by FlashInfer too, within CUDA graphs as well; for the asking."""

    name = "flashinfer"
    does = "prompts, decode rows and CUDA graphs by FlashInfer"
    for_latent = FlashInferLatent
    """What goes by the same name where KV is compressed."""
    _decodes = True
    _captured_bytes = WORKSPACE

    @staticmethod
    def supports(spec: AttentionSpec, device: str, dtype: str, mode: Mode = "dense", kv_dtype: str | None = None) -> list[str]:
        return FlashInferPrompts.supports(spec, device, dtype, mode) + scales_missing(kv_dtype)

    @staticmethod
    def wants(spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> list[Kernel]:
        contiguous = kernels.for_contiguous(spec, dtype, device)
        wanted: list[Kernel] = [kernels.for_few_queries(spec, dtype), *FlashInferPrompts.wants(spec, dtype, device)]
        return wanted if contiguous is None else [*wanted, contiguous]

    def _replay(self, step: StepMetadata, part: Part, cache: LayerCache, q: torch.Tensor) -> PagedReplay | None:
        spec = cache.spec
        kernel = kernels.for_few_queries(spec, q.dtype)
        key = (cache.group, spec.num_heads, spec.num_kv_heads, spec.scale, spec.window, spec.soft_cap, kernel)

        def make(place: Place) -> PagedReplay | None:
            if partial_bytes(spec, place) > self._captured_bytes:
                return None
            return PagedReplay(kernel, spec, place, self._space(q.device, self._captured_bytes))

        return self._bounded.replay(part, step, cache, kernel, key, make)


def _gathers(kernel: PagedKernel, rows: Rows, cache: LayerCache) -> bool:
    """Whether keys and values are copied out of their blocks first."""
    long = rows.num_tokens >= _GATHER_QUERIES * rows.num_rows
    nbytes = rows.num_keys * cache.spec.num_kv_heads * cache.spec.row_width * kernel.dtype.itemsize
    whole = cache.k_scale is not None or cache.rows.is_contiguous()
    return kernel.variant == "fa3" and long and not kernel.windowed and whole and nbytes <= _GATHER_BYTES


def _copied(rows: Rows, cache: LayerCache, dtype: torch.dtype) -> torch.Tensor:
    """``[keys, kv_heads, head_dim + v_head_dim]``: the rows' keys and values, one row behind the other."""
    if cache.k_scale is None or cache.v_scale is None:
        return cache.rows.flatten(0, 1).index_select(0, rows.key_places(cache.group))
    spec = cache.spec
    own = torch.empty(rows.num_keys, spec.num_kv_heads, spec.row_width, dtype=dtype, device=cache.rows.device)
    gather_numbers(cache.keys, cache.values, cache.k_scale, cache.v_scale, rows.pages(cache.group), *rows.page_spans, own)
    return own
