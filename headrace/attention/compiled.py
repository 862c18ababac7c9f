"""Attention by kernels of other libraries, which a thread compiles while headrace's Triton kernel takes their place.

A library compiles a kernel for each combination of widths or sizes on first use, which takes a minute or more unless it is
cached on disk.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch

from headrace.attention.backend import AttentionBackend, AttentionInputs, LayerCache, Scratch, StepMetadata
from headrace.attention.compose import output_of
from headrace.attention.triton import TritonAttention
from headrace.model_spec import AttentionSpec

logger = logging.getLogger(__name__)

EAGER_WORKSPACE = 256 << 20
"""Bytes for partial results outside captures; FlashInfer recommends 128 MiB or more."""
_DTYPES = ("bfloat16", "float16")


class Buildable(Protocol):
    """A kernel of another library that compiles it for the kernel's fields."""

    @property
    def variant(self) -> str: ...

    def build(self) -> None: ...

    def __hash__(self) -> int: ...


_may_begin = threading.Event()
"""Clear while the threads of this process shall not import FlashInfer."""
_may_begin.set()


@contextlib.contextmanager
def held_back(seconds: float) -> Iterator[None]:
    """Lets no thread begin meanwhile, nor for so many seconds after: importing FlashInfer takes the interpreter for two seconds
    from whatever else runs, such as the first request."""
    _may_begin.clear()
    try:
        yield
    finally:
        later = threading.Timer(seconds, _may_begin.set)
        later.daemon = True
        later.start()


class Compiling:
    """A kernel that a background thread compiles."""

    def __init__(self, kernel: Buildable) -> None:
        self.ready = False
        self.outcome = ""
        """Set when ``pending`` becomes false."""
        self._kernel = kernel
        self._thread = threading.Thread(target=self._compile, name="flashinfer", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> bool:
        return self._thread.is_alive()

    def join(self, seconds: float | None) -> None:
        """Waits for the compilation, at most ``seconds``; with None, until it is done, which may be held back no longer."""
        if seconds is None:
            _may_begin.set()
        self._thread.join(seconds)

    def _compile(self) -> None:
        _may_begin.wait()
        start = time.perf_counter()
        try:
            self._kernel.build()
        except Exception as error:
            self.outcome = f"its {self._kernel.variant} kernel cannot be built, headrace's own is used"
            logger.warning("%s cannot be built, headrace's own kernel is used: %s", self._kernel, error)
            return
        self.outcome = f"{self._kernel.variant} kernel ready after {time.perf_counter() - start:.0f} s"
        self.ready = True
        logger.info("%s", self.outcome)


@functools.cache
def compiling(kernel: Buildable) -> Compiling:
    """Starts compiling a kernel unless that was started before."""
    return Compiling(kernel)


def start_compiling(kernels: Iterable[Buildable]) -> list[Compiling]:
    """Starts compiling each distinct kernel; does not wait."""
    return [compiling(kernel) for kernel in dict.fromkeys(kernels)]


def dtype_refusals(dtype: str) -> list[str]:
    """Reasons why such kernels cannot compute in a dtype."""
    return [] if dtype in _DTYPES else [f"it computes in {' and '.join(_DTYPES)}, not in {dtype}"]


Launch = Callable[[torch.Tensor, LayerCache, torch.Tensor], None]
"""Called with q, the cache and the output to fill; q and output are ``[tokens, num_heads, ...]`` of the planned rows."""


class Replay(Protocol):
    """A captured step whose kernel is planned anew for other rows."""

    def run(self, q: torch.Tensor, cache: LayerCache, out: torch.Tensor) -> None: ...


class CompiledBackend(AttentionBackend):
    """Base of these backends: the Triton fallback while kernels compile, and the workspaces."""

    eager_bytes = EAGER_WORKSPACE
    """Size of the workspace of other steps than captured ones."""

    def __init__(self, scratch: Scratch | None = None) -> None:
        super().__init__(scratch)
        self._fallback = TritonAttention(self.scratch)
        self._fallback_planned = False

    @classmethod
    @abc.abstractmethod
    def wants(cls, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> Sequence[Buildable]:
        """The kernels to compile for a layer."""

    def plan(self, step: StepMetadata) -> None:
        super().plan(step)
        if not step.bounded:
            # Even if no kernel is ready: a later one would find the memory taken by the KV cache.
            self._space(step.seq_lens.device, self.eager_bytes)
        self._fallback_planned = False

    def run(self, inputs: AttentionInputs) -> torch.Tensor:
        step, q, cache = self.step, inputs.q, inputs.cache
        replay = self._replay(step, cache, q) if step.bounded else None
        launch = None if step.bounded else self._launch(step, cache, q)
        if replay is None and launch is None:
            if not self._fallback_planned:
                self._fallback.plan(step)
                self._fallback_planned = True
            return self._fallback.run(inputs)
        whole = output_of(self.step, inputs)
        q, out = q[step.tokens], whole[step.tokens]
        if launch is not None:
            launch(q, cache, out)
        elif replay is not None:
            if not step.num_decode_rows:
                # There may be fewer tokens than captured.
                out.zero_()
            replay.run(q, cache, out)
        return whole.flatten(1)

    @abc.abstractmethod
    def _launch(self, step: StepMetadata, cache: LayerCache, q: torch.Tensor) -> Launch | None:
        """A call that fills the step's tokens; None: use the Triton fallback."""

    def _replay(self, step: StepMetadata, cache: LayerCache, q: torch.Tensor) -> Replay | None:
        """The replay of a captured step; None: use the Triton fallback."""
        return None

    def _space(self, device: torch.device, size: int = EAGER_WORKSPACE) -> torch.Tensor:
        """A workspace shared by all wrappers of the same size."""
        return self.scratch.take(f"{self.name}, {size}", size, device)
