"""Attention: the inner attention of one layer, between its projections."""

from __future__ import annotations

import torch
from torch import nn

from headrace.attention.context import ForwardContext
from headrace.cache.planes import write
from headrace.kernels.rotary import rotate, rotate_and_write
from headrace.spec import AttentionSpec


class Attention(nn.Module):
    """Rotates q and k (if the spec says so), writes K and V to the cache and attends over it.

    Projections, norms and MLP are the model's own business: a foreign model replaces its inner attention with this and
    says ``rotary_dim=0``, because it has rotated already.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec
        self.sinks: nn.Parameter | None = None
        if spec.sinks:
            self.sinks = nn.Parameter(torch.empty(spec.num_heads, dtype=torch.float32), requires_grad=False)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        ctx: ForwardContext,
        cos_sin: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one step's tokens.

        Args:
            q: ``[T, num_heads, head_dim]``
            k: ``[T, num_kv_heads, head_dim]``; None, as v, for a layer that reads another's KV.
            v: ``[T, num_kv_heads, v_head_dim]``
            ctx: the step, the caches and the backends of all layers.
            cos_sin: ``[T, rotary_dim]`` float32, the cosines and then the sines of each token's position; for layers
                whose spec has a rotary_dim.

        Returns:
            ``[T, num_heads * v_head_dim]``

        Raises:
            ValueError: an argument is missing.
        """
        spec = self.spec
        cache = ctx.caches[spec.layer]
        if spec.kv_source is not None:
            if spec.rotary_dim:
                q, _ = rotate(q, q[:, :0], self._angles(cos_sin), spec.rotary_dim)
            return ctx.backends[spec.layer].run(q, cache, self.sinks)
        if k is None or v is None:
            raise ValueError(f"layer {spec.layer} keeps its own KV: k or v is missing")
        slots = ctx.step.slot_mapping[cache.group]
        if spec.rotary_dim:
            q = rotate_and_write(q, k, v, self._angles(cos_sin), spec.rotary_dim, cache.rows, slots)
        else:
            write(cache, k, v, slots)
        return ctx.backends[spec.layer].run(q, cache, self.sinks)

    def _angles(self, cos_sin: torch.Tensor | None) -> torch.Tensor:
        if cos_sin is None:
            raise ValueError(f"layer {self.spec.layer} rotates q and k: cos_sin is missing")
        return cos_sin
