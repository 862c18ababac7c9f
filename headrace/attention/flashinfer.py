"""Attention on GPUs with FlashInfer's kernels for prompts, beside our own for decode rows.

FlashInfer (Ye et al., 2025) compiles a kernel for each combination of widths when it is first wanted, which takes a minute
or more unless the disk has it. That happens in a thread: until it is done, our own kernel does prompts too.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from headrace.attention.backend import LayerCache, StepMetadata, scales_missing
from headrace.attention.triton import TritonAttention
from headrace.kernels import support
from headrace.kernels.transfer import upload
from headrace.spec import AttentionSpec, Mode

logger = logging.getLogger(__name__)

_DTYPES = ("bfloat16", "float16")
_WIDTHS = (64, 128, 256)
_HOPPER = 90
_WORKSPACE = 256 << 20
"""Bytes for partial results; FlashInfer's advice is 128 MiB and more."""
_GATHER_QUERIES = 768
"""Queries a row on average from which copying keys and values out of their blocks pays: fa3 does 677 TFLOP/s on contiguous
ones and 607 on paged ones (32k tokens, 32 and 8 heads of 128, H200)."""
_GATHER_BYTES = 512 << 20
"""The most that such a copy, which lives as long as one layer's attention, may take."""
_RING = 3
"""Wrappers of one geometry that take turns: a plan is written to host memory, from which the device may still read the last."""


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """What FlashInfer compiles for."""

    variant: str
    """fa2 or fa3."""
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    windowed: bool
    capped: bool

    def arguments(self) -> tuple[Any, ...]:
        """As FlashInfer's own ``plan`` asks for its module."""
        kinds = (self.dtype, self.dtype, self.dtype, torch.int32)
        return self.variant, *kinds, self.head_dim, self.v_head_dim, 0, self.windowed, self.capped, False


class Compiling:
    """A kernel on its way, in a thread of its own."""

    def __init__(self, kernel: _Kernel) -> None:
        self.ready = False
        self.outcome = ""
        """Once it is not ``pending`` any more."""
        self._kernel = kernel
        self._thread = threading.Thread(target=self._compile, name="flashinfer", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> bool:
        return self._thread.is_alive()

    def join(self, seconds: float | None) -> None:
        """Waits for it, at most so long."""
        self._thread.join(seconds)

    def _compile(self) -> None:
        start = time.perf_counter()
        try:
            from flashinfer.prefill import get_batch_prefill_module

            get_batch_prefill_module(*self._kernel.arguments())
        except Exception as error:
            self.outcome = "its kernel cannot be built, headrace's own is used"
            logger.warning("FlashInfer's prefill kernel cannot be built, headrace's own is used: %s", error)
            return
        self.outcome = f"{self._kernel.variant} kernel ready after {time.perf_counter() - start:.0f} s"
        self.ready = True
        logger.info("FlashInfer: %s", self.outcome)


@functools.cache
def _compiling(kernel: _Kernel) -> Compiling:
    return Compiling(kernel)


def compile_ahead(specs: Sequence[AttentionSpec], backends: Sequence[str], device: str, dtype: str) -> list[Compiling]:
    """Begins to compile what the layers that chose FlashInfer will want; nothing waits for it.

    Args:
        backends: the name of each layer's.
    """
    chosen = [spec for spec, name in zip(specs, backends, strict=True) if name == FlashInferAttention.name]
    kind, place = getattr(torch, dtype), torch.device(device)
    return [_compiling(kernel) for kernel in dict.fromkeys(_kernel_of(spec, kind, place) for spec in chosen)]


class _Wrapper:
    """A wrapper of FlashInfer's and the mark in the stream behind which its host memory may be written again."""

    def __init__(self, variant: str, workspace: torch.Tensor, paged: bool) -> None:
        from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

        kind = BatchPrefillWithPagedKVCacheWrapper if paged else BatchPrefillWithRaggedKVCacheWrapper
        self.paged = paged
        self.run = kind(workspace, "NHD", backend=variant)
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]


class _Prompts:
    """The prefill rows of a step, as FlashInfer wants them."""

    def __init__(self, step: StepMetadata, block_size: int) -> None:
        first = step.num_decode_rows
        starts = step.query_start_host[first:]
        lengths = step.seq_lens_host[first:]
        self.first_token = int(starts[0])
        self.end_token = int(starts[-1])
        self.most_queries = int(np.diff(starts).max())
        self._counts = -(-lengths // block_size)
        self._first_row = first
        self._block_size = block_size
        self._device = step.seq_lens.device
        self.key_start = torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32))
        self.num_keys = int(lengths.sum())
        self.num_rows = len(lengths)
        self._lengths = lengths
        self._tokens: dict[int, torch.Tensor] = {}
        self.query_start = torch.from_numpy((starts - starts[0]).astype(np.int32))
        self.page_start = torch.from_numpy(np.append(0, np.cumsum(self._counts)).astype(np.int32))
        self.last_page = torch.from_numpy(((lengths - 1) % block_size + 1).astype(np.int32))
        self._tables = step.block_tables
        self._pages: dict[int, torch.Tensor] = {}

    def pages(self, group: int) -> torch.Tensor:
        """``[pages]`` int32: the rows' blocks in a cache group, one row behind the other."""
        if group not in self._pages:
            row, column = _places(self._counts)
            table = self._tables[group]
            self._pages[group] = table.reshape(-1)[upload((row + self._first_row) * table.shape[1] + column, self._device)]
        return self._pages[group]

    def tokens(self, group: int) -> torch.Tensor:
        """``[keys]`` int64: where in a cache group's tokens the rows' are, one row behind the other."""
        if group not in self._tokens:
            inside = torch.arange(self._block_size, device=self._device)
            places = (self.pages(group).long().unsqueeze(1) * self._block_size + inside).flatten()
            whole = self._counts * self._block_size
            if (whole != self._lengths).any():
                row, token = _places(self._lengths)
                places = places[upload((np.cumsum(whole) - whole)[row] + token, self._device)]
            self._tokens[group] = places
        return self._tokens[group]


def _places(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of rows that have so many entries each, one row behind the other: every entry's row, and its place in it."""
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)


class FlashInferAttention:
    """Prompts by FlashInfer's paged prefill (fa3 on Hopper where K and V are equally wide, else fa2), decode rows by ours."""

    name = "flashinfer"
    capturable = True
    needs_exact_lengths = True

    def __init__(self) -> None:
        self._own = TritonAttention()
        self._step: StepMetadata | None = None
        self._prompts: _Prompts | None = None
        self._workspace: torch.Tensor | None = None
        self._rings: dict[object, list[_Wrapper]] = {}
        self._turn = 0
        self._planned: dict[object, _Wrapper] = {}
        """Of this step."""

    @staticmethod
    def supports(spec: AttentionSpec, device: str, dtype: str, mode: Mode = "dense", kv_dtype: str | None = None) -> list[str]:
        reasons = TritonAttention.supports(spec, device, dtype, mode, kv_dtype) + scales_missing(kv_dtype)
        if importlib.util.find_spec("flashinfer") is None:
            reasons.append("FlashInfer is not installed: pip install 'headrace[cuda]'")
        if torch.device(device).type != "cuda":
            reasons.append(f"it runs on CUDA devices, not on {device}")
        if dtype not in _DTYPES:
            reasons.append(f"it computes in {' and '.join(_DTYPES)}, not in {dtype}")
        if spec.head_dim not in (*_WIDTHS, 192) or spec.v_head_dim not in _WIDTHS:
            reasons.append(f"it has no kernel for heads {spec.head_dim} and {spec.v_head_dim} wide")
        if spec.sinks:
            reasons.append("it has no sinks")
        return reasons

    def plan(self, step: StepMetadata) -> None:
        self._own.plan(step)
        self._step, self._prompts = step, None
        self._planned.clear()
        self._turn += 1

    def run(self, q: torch.Tensor, cache: LayerCache, sinks: torch.Tensor | None = None) -> torch.Tensor:
        step, spec = self._step, cache.spec
        if step is None:
            raise RuntimeError("plan() comes before run()")
        if step.bounded or step.num_rows == step.num_decode_rows:
            return self._own.run(q, cache, sinks)
        kernel = _kernel_of(spec, q.dtype, q.device)
        if not _compiling(kernel).ready:
            return self._own.run(q, cache, sinks)
        if self._prompts is None:
            self._prompts = _Prompts(step, cache.block_size)
        prompts = self._prompts
        out = torch.empty(len(q), spec.num_heads, spec.v_head_dim, dtype=q.dtype, device=q.device)
        if prompts.first_token:
            self._own.run_into(out, q, cache, sinks, decode_only=True)
        part = slice(prompts.first_token, prompts.end_token)
        wrapper = self._wrapper(kernel, prompts, cache, q)
        if wrapper.paged:
            wrapper.run.run(q[part], (cache.keys, cache.values), out=out[part])
        else:
            rows = cache.rows.flatten(0, 1).index_select(0, prompts.tokens(cache.group))
            wrapper.run.run(q[part], rows[..., : spec.head_dim], rows[..., spec.head_dim :], out=out[part])
        return out.flatten(1)

    def _wrapper(self, kernel: _Kernel, prompts: _Prompts, cache: LayerCache, q: torch.Tensor) -> _Wrapper:
        """Planned once a step for all layers of one geometry."""
        spec = cache.spec
        paged = not _gathers(kernel, prompts, cache)
        key = (cache.group, spec.num_heads, spec.num_kv_heads, spec.scale, spec.window, spec.soft_cap, kernel, paged)
        if key in self._planned:
            return self._planned[key]
        if key not in self._rings:
            if self._workspace is None:
                self._workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=q.device)
            self._rings[key] = [_Wrapper(kernel.variant, self._workspace, paged) for _ in range(_RING)]
        wrapper = self._planned[key] = self._rings[key][self._turn % _RING]
        wrapper.copied.synchronize()
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        if paged:
            keys = (prompts.page_start, prompts.pages(cache.group), prompts.last_page)
            where: tuple[Any, ...] = (prompts.query_start, *keys, *heads, cache.block_size)
        else:
            where = (prompts.query_start, prompts.key_start, *heads)
        wrapper.run.plan(
            *where,
            head_dim_vo=spec.v_head_dim,
            causal=True,
            sm_scale=spec.scale,
            window_left=-1 if spec.window is None else spec.window - 1,
            logits_soft_cap=spec.soft_cap,
            q_data_type=q.dtype,
            kv_data_type=cache.keys.dtype,
            **({"max_token_per_sequence": prompts.most_queries} if paged else {}),
        )
        wrapper.copied.record()
        return wrapper


def _gathers(kernel: _Kernel, prompts: _Prompts, cache: LayerCache) -> bool:
    """Whether keys and values are copied out of their blocks first."""
    long = prompts.end_token - prompts.first_token >= _GATHER_QUERIES * prompts.num_rows
    rows = cache.rows
    nbytes = prompts.num_keys * rows.shape[2] * rows.shape[3] * rows.itemsize
    return kernel.variant == "fa3" and long and not kernel.windowed and rows.is_contiguous() and nbytes <= _GATHER_BYTES


def _kernel_of(spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> _Kernel:
    hopper = support.compute_capability(device) == _HOPPER and spec.head_dim == spec.v_head_dim
    return _Kernel(
        variant="fa3" if hopper else "fa2",
        dtype=dtype,
        head_dim=spec.head_dim,
        v_head_dim=spec.v_head_dim,
        windowed=spec.window is not None,
        capped=spec.soft_cap is not None,
    )
