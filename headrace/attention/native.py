"""Attention on the CPU with the native kernel: reads the paged cache in place, whatever the mix of rows."""

from __future__ import annotations

import torch

from headrace.attention.backend import AttentionBackend, AttentionInputs, Scratch, StepMetadata
from headrace.kernels import native
from headrace.kernels.native.library import DTYPES
from headrace.model_spec import AttentionSpec


class NativeAttention(AttentionBackend):
    """Decode and prefill of any geometry. Reads lengths from the step's tensors, so host lengths may be upper bounds.

    Raises:
        RuntimeError: the library is not available; ``supports`` reports it.
    """

    name = "native"
    kinds = frozenset({"window", "chunked", "soft_cap", "sinks"})
    dtypes = tuple(str(kind).removeprefix("torch.") for kind in DTYPES)
    only_on_cpu = True
    has_scales = False

    def __init__(self, scratch: Scratch | None = None) -> None:
        super().__init__(scratch)
        kernels = native.load()
        if kernels is None:
            raise RuntimeError("the native kernels are not available")
        self._attention = kernels.attention
        self._addresses: tuple[int, int] = (0, 0)
        """Addresses of the planned step's ``query_start`` and ``seq_lens``."""

    @classmethod
    def refusals(cls, spec: AttentionSpec, device: str, dtype: str, kv_dtype: str | None) -> list[str]:
        missing = device.startswith("cpu") and native.load() is None
        return ["the native kernels are switched off or could not be compiled"] if missing else []

    def plan(self, step: StepMetadata) -> None:
        super().plan(step)
        self._addresses = step.query_start.data_ptr(), step.seq_lens.data_ptr()

    def run(self, inputs: AttentionInputs) -> torch.Tensor:
        q, cache, sinks, _, out, _ = inputs
        step, spec = self.step, cache.spec
        if q.stride(2) != 1 or q.stride(1) != spec.head_dim:
            q = q.contiguous()
        table, tokens = step.block_tables[cache.group], 0
        if out is None:
            # The kernel clears the outputs behind the last row's tokens, up to this number.
            tokens = q.shape[0]
            out = torch.empty(tokens, spec.num_heads, spec.v_head_dim, dtype=q.dtype)
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
            -(spec.window or 0) if spec.chunked else spec.window or 0,
            DTYPES[q.dtype],
        )
        return out.flatten(1)
