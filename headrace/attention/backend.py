"""The protocol of attention backends, and the metadata of a step that they plan from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch

from headrace.cache.layer import LayerCache
from headrace.spec import AttentionSpec, Mode
from headrace.spec.kv import FP8_KV

__all__ = ["AttentionBackend", "LayerCache", "StepMetadata", "scales_missing"]


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


def scales_missing(kv_dtype: str | None) -> list[str]:
    """The reason of a backend that reads K and V as they are."""
    return ["it has no per-token-head scales, which an FP8 KV cache has"] if kv_dtype == FP8_KV else []


def distinct(backends: Iterable[AttentionBackend]) -> list[AttentionBackend]:
    """Each instance once, where layers share them: those to plan in a step."""
    return list({id(backend): backend for backend in backends}.values())
