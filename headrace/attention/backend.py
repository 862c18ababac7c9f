"""The protocol of attention backends, and the metadata of a step that they plan from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from headrace.cache.layer import LayerCache
from headrace.spec import AttentionSpec, Mode
from headrace.spec.kv import FP8_KV

__all__ = [
    "AttentionBackend",
    "LayerCache",
    "Lengths",
    "Replanned",
    "StepMetadata",
    "Workspaces",
    "distinct",
    "scales_missing",
    "workspace_bytes",
]


@dataclasses.dataclass(frozen=True)
class StepMetadata:
    """One step as attention sees it. R rows (decode first, then prefill), T tokens packed row after row.

    Host mirrors (``*_host``) are exact for rows whose lengths are known when the step is launched.
    """

    num_decode_rows: int
    query_start: torch.Tensor
    """``[R + 1]`` int32: row -> its first token in the packed batch."""
    seq_lens: torch.Tensor
    """``[R]`` int32: tokens of the row in the cache once this step's are written."""
    positions: torch.Tensor
    """``[T]`` int64: absolute position of each token."""
    slot_mapping: tuple[torch.Tensor, ...]
    """Per cache group, ``[T]`` int64: ``block * block_size + offset`` where the token's KV goes; -1 writes nothing."""
    block_tables: tuple[torch.Tensor, ...]
    """Per cache group, ``[R, B]`` int32: block numbers of the row, 0 (the null block) past its end."""
    query_start_host: np.ndarray
    seq_lens_host: np.ndarray
    bounded: bool = False
    """Host mirrors are upper bounds: the step may be captured in a CUDA graph, and replayed for other rows."""

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens_host)

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_host[-1])


class AttentionBackend(Protocol):
    """Computes attention over the paged cache. One instance serves all layers that chose it."""

    name: str
    capturable: bool
    """True if ``run`` of a ``bounded`` step can be captured in a CUDA graph: of the step, only the tensors count then."""
    needs_exact_lengths: bool
    """True if ``plan`` reads the host mirrors, so that they must not be mere upper bounds."""

    @staticmethod
    def supports(spec: AttentionSpec, device: str, dtype: str, mode: Mode = "dense", kv_dtype: str | None = None) -> list[str]:
        """Reasons why this backend cannot run such a layer; empty: it can.

        Args:
            dtype: of q and of what comes out.
            kv_dtype: of the KV cache; None: as ``dtype``.
        """
        ...

    def plan(self, step: StepMetadata) -> None:
        """Once a step, before its layers run."""
        ...

    def run(self, q: torch.Tensor, cache: LayerCache, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attention of the planned step's tokens, whose K and V are in the cache already.

        Args:
            q: ``[T, num_heads, head_dim]``, rotated.
            cache: the layer's KV.
            sinks: ``[num_heads]`` float32 logits, for layers that have them.

        Returns:
            ``[T, num_heads * v_head_dim]`` in q's dtype.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Lengths:
    """The rows of a captured step that is about to be replayed, as the host knows them: exact."""

    num_decode_rows: int
    num_tokens: int
    """Of the step that was captured, as its ``StepMetadata`` has it."""
    query_start: np.ndarray
    """``[R + 1]``"""
    seq_lens: np.ndarray
    """``[R]``; 0: nobody's row, which may have a query all the same."""


@runtime_checkable
class Replanned(Protocol):
    """A backend that plans on the host for steps that are captured too, before each replay.

    What ``run`` of a ``bounded`` step launches while it is captured stays as it is; ``replan`` changes what that reads.
    """

    @property
    def edition(self) -> int:
        """Rises when a step that was captured before would be another one now: it is to be captured again."""
        ...

    def replan(self, lengths: Lengths) -> None:
        """Before a replay of a step with so many decode rows and tokens, in the stream of the replay."""
        ...

    def reserve(self, device: torch.device) -> None:
        """Allocates the workspace that all captured steps share, so that it is there when memory is measured."""
        ...


@runtime_checkable
class Workspaces(Protocol):
    """A backend that keeps memory from step to step, to work in."""

    @property
    def workspace_bytes(self) -> int:
        """What it keeps now."""
        ...


def workspace_bytes(backends: Iterable[AttentionBackend]) -> int:
    """Bytes that backends keep to work in, each instance counted once."""
    return sum(backend.workspace_bytes for backend in distinct(backends) if isinstance(backend, Workspaces))


def scales_missing(kv_dtype: str | None) -> list[str]:
    """The reason of a backend that reads K and V as they are."""
    return ["it has no per-token-head scales, which an FP8 KV cache has"] if kv_dtype == FP8_KV else []


def distinct(backends: Iterable[AttentionBackend]) -> list[AttentionBackend]:
    """Each instance once, where layers share them: those to plan in a step."""
    return list({id(backend): backend for backend in backends}.values())
