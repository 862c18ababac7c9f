"""FlashInfer's kernels: which there are for a layer, and how they are built in the background.

FlashInfer compiles a kernel for each combination of widths when it is first wanted, which takes a minute or more unless the
disk has it. That happens in a thread: until it is done, our own kernel does its work.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging
import threading
import time
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from headrace.kernels import support
from headrace.spec import AttentionSpec

logger = logging.getLogger(__name__)

DTYPES = ("bfloat16", "float16")
WIDTHS = (64, 128, 256)
LATENT_WIDTHS = (512, 64)
"""Channels of a compressed key that are values too, and its rotated ones."""
LATENT_TILE = 128
"""Queries times heads that two programs of the kernel for compressed KV do together, or, each alone, half of them."""
_HOPPER = 90


class Kernel(Protocol):
    """Something that FlashInfer compiles. Equal ones are the same."""

    def __hash__(self) -> int: ...

    @property
    def variant(self) -> str:
        """fa2 or fa3."""
        ...

    def build(self) -> None:
        """Compiles and loads it, which takes its time. Raises whatever FlashInfer, its compiler and the loader raise."""
        ...


@dataclasses.dataclass(frozen=True)
class PagedKernel:
    """Attention over keys and values of so many channels. It is FlashInfer's kernel for prompts, and serves decode too."""

    variant: str
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    windowed: bool
    capped: bool

    def build(self) -> None:
        from flashinfer.prefill import get_batch_prefill_module

        # The arguments with which FlashInfer's own plan() asks for its module.
        kinds = (self.dtype, self.dtype, self.dtype, torch.int32)
        get_batch_prefill_module(self.variant, *kinds, self.head_dim, self.v_head_dim, 0, self.windowed, self.capped, False)


@dataclasses.dataclass(frozen=True)
class LatentKernel:
    """Absorbed attention over compressed KV."""

    variant: str
    dtype: torch.dtype

    def build(self) -> None:
        from flashinfer.mla import get_batch_mla_module

        # As FlashInfer's own plan() asks for its module; without its profiler.
        get_batch_mla_module(self.variant, self.dtype, self.dtype, self.dtype, torch.int32, *LATENT_WIDTHS, False)


class Compiling:
    """A kernel on its way, in a thread of its own."""

    def __init__(self, kernel: Kernel) -> None:
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
            self._kernel.build()
        except Exception as error:
            self.outcome = f"its {self._kernel.variant} kernel cannot be built, headrace's own is used"
            logger.warning("FlashInfer's %s cannot be built, headrace's own is used: %s", self._kernel, error)
            return
        self.outcome = f"{self._kernel.variant} kernel ready after {time.perf_counter() - start:.0f} s"
        self.ready = True
        logger.info("FlashInfer: %s", self.outcome)


@functools.cache
def compiling(kernel: Kernel) -> Compiling:
    """Begins to compile it, unless that was begun before."""
    return Compiling(kernel)


def compile_ahead(kernels: Iterable[Kernel]) -> list[Compiling]:
    """Begins to compile kernels, each once; nothing waits for them."""
    return [compiling(kernel) for kernel in dict.fromkeys(kernels)]


def for_prompts(spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> PagedKernel:
    """fa3 on Hopper where keys and values are equally wide: it refuses others where they are paged."""
    hopper = support.compute_capability(device) == _HOPPER and spec.head_dim == spec.v_head_dim
    return _paged("fa3" if hopper else "fa2", spec, dtype)


def for_contiguous(spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> PagedKernel | None:
    """fa3 for keys wider than values, of the widths that it has, where they are not paged; None: there is none."""
    hopper = support.compute_capability(device) == _HOPPER
    return _paged("fa3", spec, dtype) if hopper and (spec.head_dim, spec.v_head_dim) == (192, 128) else None


def reads_copies(spec: AttentionSpec, device: torch.device) -> bool:
    """Whether long prompts of a layer are attended to where they were copied, as numbers, out of their blocks."""
    return for_prompts(spec, torch.bfloat16, device).variant == "fa3" and spec.window is None


def for_few_queries(spec: AttentionSpec, dtype: torch.dtype) -> PagedKernel:
    """For decode rows and steps that are captured: of few queries a row, fa3 reads a quarter as fast (H200)."""
    return _paged("fa2", spec, dtype)


def _paged(variant: str, spec: AttentionSpec, dtype: torch.dtype) -> PagedKernel:
    return PagedKernel(
        variant, dtype, spec.head_dim, spec.v_head_dim, windowed=spec.window is not None, capped=spec.soft_cap is not None
    )


def for_latent(dtype: torch.dtype, device: torch.device) -> LatentKernel:
    return LatentKernel("fa3" if support.compute_capability(device) == _HOPPER else "fa2", dtype)


def refusals(device: str, dtype: str) -> list[str]:
    """Reasons why no kernel of FlashInfer's can be used."""
    reasons = []
    if importlib.util.find_spec("flashinfer") is None:
        reasons.append("FlashInfer is not installed: pip install 'headrace[cuda]'")
    if torch.device(device).type != "cuda":
        reasons.append(f"it runs on CUDA devices, not on {device}")
    if dtype not in DTYPES:
        reasons.append(f"it computes in {' and '.join(DTYPES)}, not in {dtype}")
    return reasons


def no_kernel(spec: AttentionSpec) -> list[str]:
    """Reasons why there is none for keys and values that are not compressed."""
    reasons: list[Any] = []
    if spec.head_dim not in (*WIDTHS, 192) or spec.v_head_dim not in WIDTHS:
        reasons.append(f"it has no kernel for heads {spec.head_dim} and {spec.v_head_dim} wide")
    if spec.sinks:
        reasons.append("it has no sinks")
    return reasons
