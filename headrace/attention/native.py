"""Attention on the CPU with the native kernel: reads the paged cache in place, whatever the mix of rows."""

from __future__ import annotations

import torch

from headrace.attention.backend import LayerCache, StepMetadata, scales_missing
from headrace.kernels import native
from headrace.kernels.native.library import DTYPES
from headrace.spec import AttentionSpec, Mode


class NativeAttention:
    """Decode and prefill of any geometry. Lengths are read where they are, so upper bounds on the host do no harm.

    Raises:
        RuntimeError: the library cannot be had here, which ``supports`` would have said.
    """

    name = "native"
    capturable = False
    needs_exact_lengths = False

    def __init__(self) -> None:
        kernels = native.load()
        if kernels is None:
            raise RuntimeError("the native kernels are not available")
        self._attention = kernels.attention
        self._step: StepMetadata | None = None
        self._addresses: tuple[int, int] = (0, 0)
        """Of the planned step's ``query_start`` and ``seq_lens``."""

    @staticmethod
    def supports(spec: AttentionSpec, device: str, dtype: str, mode: Mode = "dense", kv_dtype: str | None = None) -> list[str]:
        reasons = scales_missing(kv_dtype)
        if not device.startswith("cpu"):
            reasons.append(f"it is made for the CPU, not for {device}")
        elif native.load() is None:
            reasons.append("the native kernels are switched off or could not be compiled")
        names = [str(kind).removeprefix("torch.") for kind in DTYPES]
        if dtype not in names:
            reasons.append(f"it computes in {', '.join(names)}, not in {dtype}")
        if mode != "dense":
            reasons.append(f"it attends densely only, not {mode}")
        return reasons

    def plan(self, step: StepMetadata) -> None:
        self._step = step
        self._addresses = step.query_start.data_ptr(), step.seq_lens.data_ptr()

    def run(self, q: torch.Tensor, cache: LayerCache, sinks: torch.Tensor | None = None) -> torch.Tensor:
        step, spec = self._step, cache.spec
        if step is None:
            raise RuntimeError("plan() comes before run()")
        if q.stride(2) != 1 or q.stride(1) != spec.head_dim:
            q = q.contiguous()
        table, tokens = step.block_tables[cache.group], q.shape[0]
        out = torch.empty(tokens, spec.num_heads * spec.v_head_dim, dtype=q.dtype)
        self._attention(
            q.data_ptr(),
            q.stride(0),
            cache.rows.data_ptr(),
            table.data_ptr(),
            *self._addresses,
            None if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
            table.shape[0],
            tokens,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.v_head_dim,
            spec.row_width,
            cache.block_size,
            cache.rows.stride(0),
            table.stride(0),
            spec.scale,
            spec.soft_cap or 0.0,
            spec.window or 0,
            DTYPES[q.dtype],
        )
        return out
