"""DenseHeads: the dense ones among a prompt's heads by FlashInfer, where only the device knows which they are."""

from __future__ import annotations

import dataclasses

import torch

from headrace.attention.backend import Scratch
from headrace.attention.flashinfer import kernels
from headrace.attention.flashinfer.attention import Wrapper, Wrappers
from headrace.attention.flashinfer.kernels import PagedKernel, compiling
from headrace.attention.paged_rows import PagedRows
from headrace.model_spec import AttentionSpec

_QUERIES = 8192
"""Queries of the row from which a launch for each KV head is worth its while."""
_INTEGERS = 4 << 20
"""Bytes of a plan: room for 128 bytes of each of 32768 tiles."""
_UNUSED = 1 << 10
"""Bytes of the workspace for partial results, which fa3 has none of."""


class DenseHeads:
    """Runs fa3 once for each KV head, with its query heads, over copies of keys and values.

    FlashInfer's plan lists the tiles of queries that each program computes. Multiplied by 0 it lists none: so a head is
    switched off without waiting for the device.
    """

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._wrappers = Wrappers()
        self._plans: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By wrapper: the integers that it runs by, and those that it planned."""

    def next_step(self) -> None:
        self._wrappers.next_step()

    def kernel(self, spec: AttentionSpec, rows: PagedRows, q: torch.Tensor) -> PagedKernel | None:
        """The kernel that runs the rows; None: there is none yet, or it does not pay off."""
        if rows.num_rows > 1 or rows.num_tokens < _QUERIES or kernels.refusals(str(q.device), str(q.dtype)[6:]):
            return None
        kernel = kernels.for_contiguous(spec, q.dtype, q.device) or kernels.for_prompts(spec, q.dtype, q.device)
        return kernel if kernel.variant == "fa3" and compiling(kernel).ready else None

    def run(
        self,
        kernel: PagedKernel,
        spec: AttentionSpec,
        rows: PagedRows,
        q: torch.Tensor,
        copies: torch.Tensor,
        dense: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Fills the output of the heads that ``dense`` names.

        Args:
            q: ``[T, num_heads, head_dim]``, of the one row.
            copies: ``[keys, kv_heads, head_dim + v_head_dim]``, contiguous.
            dense: ``[kv_heads]`` int32: 1 or 0.
            out: ``[T, num_heads, v_head_dim]``
        """
        group, width = spec.group_size, spec.head_dim
        wrapper = self._wrapper(kernel, spec, rows, q)
        active, planned = self._plans[id(wrapper)]
        for head in range(spec.num_kv_heads):
            torch.mul(planned, dense[head], out=active)
            own = slice(head * group, (head + 1) * group)
            key_values = copies[:, head : head + 1]
            wrapper.run.run(q[:, own], key_values[..., :width], key_values[..., width:], out=out[:, own])

    def _wrapper(self, kernel: PagedKernel, spec: AttentionSpec, rows: PagedRows, q: torch.Tensor) -> Wrapper:
        space = self._scratch.take("FlashInfer, dense heads", _UNUSED, q.device)
        single = dataclasses.replace(spec, num_heads=spec.group_size, num_kv_heads=1)

        def make() -> Wrapper:
            from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper

            wrapper = Wrapper(BatchPrefillWithRaggedKVCacheWrapper(space, "NHD", backend=kernel.variant), q.device, False)
            integers = torch.zeros(_INTEGERS, dtype=torch.uint8, device=q.device)
            wrapper.run.reset_workspace_buffer(space, integers)
            self._plans[id(wrapper)] = integers.view(torch.int32), torch.empty_like(integers).view(torch.int32)
            return wrapper

        def plan(wrapper: Wrapper) -> None:
            kernel.plan(wrapper.run, single, (rows.query_start, rows.key_start))
            active, planned = self._plans[id(wrapper)]
            planned.copy_(active)

        return self._wrappers.planned((spec.group_size, spec.scale, kernel), make, plan)
