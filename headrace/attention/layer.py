"""Attention: the inner attention of one layer, between its projections."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from headrace.attention.context import ForwardContext
from headrace.cache.planes import write
from headrace.kernels import gpu
from headrace.kernels.qkv import norm_rotate_and_cache
from headrace.kernels.rotary import rotate, rotate_and_write
from headrace.spec import AttentionSpec


class HeadNorm(Protocol):
    """A norm of each head of q or k."""

    eps: float
    plain: bool
    """It is ``kernels.norm.rms_norm`` with ``weight`` and nothing else, so that a kernel may do it on its way."""
    offset: bool
    """It is ``kernels.norm.offset_rms_norm`` with ``weight`` and nothing else, which a kernel may do likewise."""

    @property
    def weight(self) -> torch.Tensor:
        """``[head_dim]``"""
        ...

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """``[T, heads, head_dim]`` normed."""
        ...


class ValueNorm(Protocol):
    """A norm of each head of v: ``kernels.norm.rms_norm`` with a weight of ones."""

    eps: float

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """``[T, heads, v_head_dim]`` normed."""
        ...


class Attention(nn.Module):
    """Rotates q and k (if the spec says so), writes K and V to the cache and attends over it.

    Projections, norms and MLP are the model's own business: a foreign model replaces its inner attention with this and
    says ``rotary_dim=0``, because it has rotated already.
    """

    def __init__(self, spec: AttentionSpec, device: str | torch.device = "cpu") -> None:
        super().__init__()
        self.spec = spec
        self.sinks: nn.Parameter | None = None
        if spec.sinks:
            sinks = torch.empty(spec.num_heads, dtype=torch.float32, device=device)
            self.sinks = nn.Parameter(sinks, requires_grad=False)

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
        if spec.rotary_dim and (gpu.takes(q) or cache.k_scale is not None):
            q, k = rotate(q, k, self._angles(cos_sin), spec.rotary_dim)
            write(cache, k, v, slots)
        elif spec.rotary_dim:
            q = rotate_and_write(q, k, v, self._angles(cos_sin), spec.rotary_dim, cache.rows, slots)
        else:
            write(cache, k, v, slots)
        return ctx.backends[spec.layer].run(q, cache, self.sinks)

    def of_projection(
        self,
        qkv: torch.Tensor,
        ctx: ForwardContext,
        cos_sin: torch.Tensor | None,
        q_norm: HeadNorm | None = None,
        k_norm: HeadNorm | None = None,
        v_norm: ValueNorm | None = None,
        v_factor: float = 1.0,
    ) -> torch.Tensor:
        """As ``forward``, from a fused projection: on a GPU its norms, its rotation and the write to the cache are one kernel.

        Args:
            qkv: ``[T, q_size + k_size + v_size]``: q, k, v of each token; q alone where the layer reads another's KV, and no
                v where the values are the keys before their norm.
            q_norm, k_norm: what each head goes through before it is rotated. All norms have the same eps.
            v_norm: what each head of v goes through.
            v_factor: what v is multiplied by after that.
        """
        spec, tokens = self.spec, len(qkv)
        norms = [norm for norm in (q_norm, k_norm) if norm is not None]
        if gpu.takes(qkv) and (all(norm.plain for norm in norms) or all(norm.offset for norm in norms)):
            q = self._norm_rotate_and_cache(qkv, ctx, cos_sin, (q_norm, k_norm, v_norm), v_factor)
            return ctx.backends[spec.layer].run(q, ctx.caches[spec.layer], self.sinks)
        q = qkv[:, : spec.q_size].view(tokens, spec.num_heads, spec.head_dim)
        if q_norm is not None:
            q = q_norm(q)
        if spec.kv_source is not None:
            return self(q, None, None, ctx, cos_sin)
        k = qkv[:, spec.q_size : spec.q_size + spec.k_size].view(tokens, spec.num_kv_heads, spec.head_dim)
        v = k if spec.v_from_k else qkv[:, spec.q_size + spec.k_size :].view(tokens, spec.num_kv_heads, spec.v_head_dim)
        if v_norm is not None:
            v = v_norm(v)
        if v_factor != 1:
            v = v * v_factor
        return self(q, k if k_norm is None else k_norm(k), v, ctx, cos_sin)

    def _norm_rotate_and_cache(
        self,
        qkv: torch.Tensor,
        ctx: ForwardContext,
        cos_sin: torch.Tensor | None,
        norms: tuple[HeadNorm | None, HeadNorm | None, ValueNorm | None],
        v_factor: float,
    ) -> torch.Tensor:
        """``[T, num_heads, head_dim]``: the finished q; k and v are in the cache."""
        spec, cache = self.spec, ctx.caches[self.spec.layer]
        own = spec.kv_source is None
        q_norm, k_norm, v_norm = norms
        return norm_rotate_and_cache(
            qkv,
            spec.num_heads,
            cache.keys if own else None,
            cache.values if own else None,
            ctx.step.slot_mapping[cache.group] if own else None,
            cos_sin=self._angles(cos_sin) if spec.rotary_dim else None,
            rotary_dim=spec.rotary_dim,
            q_weight=None if q_norm is None else q_norm.weight,
            k_weight=None if k_norm is None else k_norm.weight,
            eps=next((norm.eps for norm in norms if norm is not None), 0.0),
            offset=any(norm is not None and norm.offset for norm in (q_norm, k_norm)),
            v_from_k=own and spec.v_from_k,
            v_norm=own and v_norm is not None,
            v_factor=v_factor,
            k_scale=cache.k_scale if own else None,
            v_scale=cache.v_scale if own else None,
            q_out=torch.empty(len(qkv), spec.num_heads, spec.head_dim, dtype=qkv.dtype, device=qkv.device),
        )

    def _angles(self, cos_sin: torch.Tensor | None) -> torch.Tensor:
        if cos_sin is None:
            raise ValueError(f"layer {self.spec.layer} rotates q and k: cos_sin is missing")
        return cos_sin
