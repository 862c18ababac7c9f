"""Attention: the inner attention of one layer, between its projections."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import nn

from headrace.attention.backend import AttentionInputs
from headrace.attention.context import ForwardContext
from headrace.attention.indexed import WithIndexer
from headrace.cache.planes import write
from headrace.kernels import gpu
from headrace.kernels.attention.unfinished import Unfinished
from headrace.kernels.qkv import norm_rotate_and_cache
from headrace.kernels.rotary import rotate, rotate_and_write
from headrace.model_spec import AttentionSpec


class ValueNorm(Protocol):
    """A norm of each head of v: ``kernels.norm.rms_norm`` with a weight of ones."""

    eps: float

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Norms ``[T, heads, width]`` over the last axis."""
        ...


class HeadNorm(ValueNorm, Protocol):
    """A norm of each head of q or k."""

    plain: bool
    """Whether it equals ``kernels.norm.rms_norm`` with ``weight``, so that a fused kernel may replace it."""
    offset: bool
    """Whether it equals ``kernels.norm.rms_norm`` with ``weight`` and ``offset``, which a fused kernel may replace too."""

    @property
    def weight(self) -> torch.Tensor:
        """``[head_dim]``"""
        ...


class Attention(nn.Module):
    """Rotates q and k (if the spec says so), writes K and V to the cache and attends over it.

    Projections, norms and MLP belong to the model: an external model that rotates q and k itself replaces its inner
    attention with this module and sets ``rotary_dim=0``.
    """

    def __init__(self, spec: AttentionSpec, device: str | torch.device = "cpu") -> None:
        super().__init__()
        self.spec = spec
        self.sinks: nn.Parameter | None = None
        if spec.sinks:
            sinks = torch.empty(spec.num_heads, dtype=torch.float32, device=device)
            self.sinks = nn.Parameter(sinks, requires_grad=False)

    def forward_qkv(
        self,
        qkv: torch.Tensor,
        ctx: ForwardContext,
        cos_sin: torch.Tensor | None,
        q_norm: HeadNorm | None = None,
        k_norm: HeadNorm | None = None,
        v_norm: ValueNorm | None = None,
        v_factor: float = 1.0,
        *,
        streamed: bool = False,
    ) -> torch.Tensor:
        """Attention of one step's tokens from a fused projection: split, norms, rotation, write, attend.

        Args:
            qkv: ``[T, q_size + k_size + v_size]``: q, k, v of each token; q alone where the layer reads another's KV, and no
                v where the values are the keys before their norm.
            cos_sin: as for ``forward``.
            q_norm, k_norm: applied to each head before rotation. All norms have the same eps.
            v_norm: applied to each head of v.
            v_factor: multiplies v after its norm.
            streamed: as ``Unfinished.streamed``.

        Returns:
            ``[T, num_heads * v_head_dim]``
        """
        norms = [norm for norm in (q_norm, k_norm) if norm is not None]
        if gpu.takes(qkv) and (all(norm.plain for norm in norms) or all(norm.offset for norm in norms)):
            # One kernel from the split to the write to the cache, or none where attention does that; the lines below are
            # their reference.
            if v_norm is None and v_factor == 1 and self._finishes(ctx):
                return self._attend_unfinished(qkv, ctx, cos_sin, q_norm, k_norm, streamed)
            q = self._norm_rotate_and_cache(qkv, ctx, cos_sin, q_norm, k_norm, v_norm, v_factor)
            return self._attend(q, ctx)
        q, k, v = self._split(qkv)
        if q_norm is not None:
            q = q_norm(q)
        if k is not None and k_norm is not None:
            k = k_norm(k)
        if v is not None and v_norm is not None:
            v = v_norm(v)
        if v is not None and v_factor != 1:
            v = v * v_factor
        return self(q, k, v, ctx, cos_sin)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        ctx: ForwardContext,
        cos_sin: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one step's tokens: rotation, write, attend.

        Args:
            q: ``[T, num_heads, head_dim]``
            k: ``[T, num_kv_heads, head_dim]``; None, like v, for a layer that reads another's KV.
            v: ``[T, num_kv_heads, v_head_dim]``
            ctx: the step, the caches and the backends of all layers.
            cos_sin: ``[T, rotary_dim]`` float32, the cosines and then the sines of each token's position; for layers
                whose spec has a rotary_dim.

        Returns:
            ``[T, num_heads * v_head_dim]``

        Raises:
            ValueError: an argument is missing.
        """
        spec, cache = self.spec, ctx.caches[self.spec.layer]
        slots, angles = ctx.step.slot_mapping[cache.group], required_angles(spec, cos_sin)
        if spec.kv_source is not None:
            q = q if angles is None else rotate(q, q[:, :0], angles, spec.rotary_dim)[0]
        elif k is None or v is None:
            raise ValueError(f"layer {spec.layer} keeps its own KV: k or v is missing")
        elif angles is not None and not gpu.takes(q) and cache.k_scale is None:
            # The branch below in one call.
            q = rotate_and_write(q, k, v, angles, spec.rotary_dim, cache.rows, slots)
        else:
            q, k = (q, k) if angles is None else rotate(q, k, angles, spec.rotary_dim)
            write(cache, k, v, slots)
        return self._attend(q, ctx)

    def _queries(self, qkv: torch.Tensor) -> torch.Tensor:
        """``[T, num_heads, head_dim]`` of q, as a view."""
        return qkv[:, : self.spec.q_size].view(len(qkv), self.spec.num_heads, self.spec.head_dim)

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """``[T, heads, width]`` of q, k and v, as views; k and v are None where the layer reads another's KV."""
        spec, tokens, q = self.spec, len(qkv), self._queries(qkv)
        if spec.kv_source is not None:
            return q, None, None
        k = qkv[:, spec.q_size : spec.q_size + spec.k_size].view(tokens, spec.num_kv_heads, spec.head_dim)
        if spec.v_from_k:
            return q, k, k
        return q, k, qkv[:, spec.q_size + spec.k_size :].view(tokens, spec.num_kv_heads, spec.v_head_dim)

    def _norm_rotate_and_cache(
        self,
        qkv: torch.Tensor,
        ctx: ForwardContext,
        cos_sin: torch.Tensor | None,
        q_norm: HeadNorm | None,
        k_norm: HeadNorm | None,
        v_norm: ValueNorm | None,
        v_factor: float,
    ) -> torch.Tensor:
        """Writes k and v to the cache and returns the finished q, ``[T, num_heads, head_dim]``."""
        spec, cache = self.spec, ctx.caches[self.spec.layer]
        writes = spec.kv_source is None
        return norm_rotate_and_cache(
            qkv,
            spec.num_heads,
            cache.keys if writes else None,
            cache.values if writes else None,
            ctx.step.slot_mapping[cache.group] if writes else None,
            cos_sin=required_angles(spec, cos_sin),
            rotary_dim=spec.rotary_dim,
            q_weight=None if q_norm is None else q_norm.weight,
            k_weight=None if k_norm is None else k_norm.weight,
            eps=next((norm.eps for norm in (q_norm, k_norm, v_norm) if norm is not None), 0.0),
            offset=any(norm is not None and norm.offset for norm in (q_norm, k_norm)),
            v_from_k=writes and spec.v_from_k,
            v_norm=writes and v_norm is not None,
            v_factor=v_factor,
            k_scale=cache.k_scale if writes else None,
            v_scale=cache.v_scale if writes else None,
            q_out=torch.empty(qkv.shape[0], spec.num_heads, spec.head_dim, dtype=qkv.dtype, device=qkv.device),
        )

    def _finishes(self, ctx: ForwardContext) -> bool:
        """Whether the layer's backend finishes q and k of this step, and writes k and v."""
        spec = self.spec
        # Where a step's wanted tokens attend alone, k and v of all its tokens are written.
        if spec.kv_source is not None or spec.v_from_k or spec.indexer is not None or ctx.wanted is not None:
            return False
        return ctx.backends[spec.layer].finishes(ctx.caches[spec.layer])

    def _attend_unfinished(
        self,
        qkv: torch.Tensor,
        ctx: ForwardContext,
        cos_sin: torch.Tensor | None,
        q_norm: HeadNorm | None,
        k_norm: HeadNorm | None,
        streamed: bool,
    ) -> torch.Tensor:
        spec, cache = self.spec, ctx.caches[self.spec.layer]
        norms = [norm for norm in (q_norm, k_norm) if norm is not None]
        unfinished = Unfinished(
            qkv,
            ctx.step.slot_mapping[cache.group],
            required_angles(spec, cos_sin),
            spec.rotary_dim,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            norms[0].eps if norms else 0.0,
            any(norm.offset for norm in norms),
            streamed,
        )
        inputs = AttentionInputs(self._queries(qkv), cache, self.sinks, ctx.step.visible_ends, unfinished=unfinished)
        return ctx.backends[spec.layer].run(inputs)

    def _attend(self, q: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        layer = self.spec.layer
        if self.spec.indexer is not None:
            return cast("WithIndexer", ctx.backends[layer]).attend(q, ctx, self.spec)
        q = ctx.wanted_of(q)
        return ctx.backends[layer].run(AttentionInputs(q, ctx.caches[layer], self.sinks, ctx.step.visible_ends))


def required_angles(spec: AttentionSpec, cos_sin: torch.Tensor | None) -> torch.Tensor | None:
    """``cos_sin``, or None for a layer without rotation. Raises ValueError where a layer that rotates gets none."""
    if spec.rotary_dim and cos_sin is None:
        raise ValueError(f"layer {spec.layer} rotates q and k: cos_sin is missing")
    return cos_sin if spec.rotary_dim else None
