"""Indexers: modules that choose the keys which a layer's tokens attend to, from index queries and one index key a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import nn

from headrace.attention.context import ForwardContext
from headrace.attention.indexed import IndexedRows, rule_of
from headrace.attention.layer import required_angles
from headrace.cache.planes import write_index_keys
from headrace.kernels.indexer import choose
from headrace.kernels.moe import router_logits
from headrace.kernels.rotary import rotate
from headrace.layers.linear import Linear
from headrace.layers.norm import RMSNorm
from headrace.model_spec import AttentionSpec, IndexerSpec


class _Plans(Protocol):
    """A backend of layers with an indexer."""

    indexed: IndexedRows | None


class Indexer(nn.Module):
    """Keeps a layer's index keys and chooses for the rows that are longer than its reach."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        if spec.indexer is None or spec.indexer.source is not None:
            raise ValueError(f"layer {spec.layer} has no index keys")
        self.attention: AttentionSpec = spec
        self.spec: IndexerSpec = spec.indexer

    def keep_and_choose(
        self,
        keys: torch.Tensor,
        queries: Callable[[slice | torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]],
        ctx: ForwardContext,
        cos_sin: torch.Tensor | None,
    ) -> None:
        """Writes the step's index keys to the cache, and puts the choice for the rows that need one into the context.

        Args:
            keys: ``[T, head_dim]``, to be rotated.
            queries: makes the index queries ``[N, num_heads, head_dim]``, to be rotated, and the weights of their heads, of
                some tokens of the batch.
        """
        layer, rotated = self.attention.layer, self.attention.rotary_dim
        cache, angles = ctx.caches[layer], required_angles(self.attention, cos_sin)
        if angles is not None:
            one = keys.unsqueeze(1)
            keys = rotate(one, one[:, :0], angles, rotated)[0].squeeze(1)
        write_index_keys(cache, keys, ctx.step.slot_mapping[cache.group])
        rows = cast(_Plans, ctx.backends[layer]).indexed
        if rows is None or rows.part is None or cache.index_keys is None:
            return
        q, weights = queries(rows.tokens)
        if angles is not None:
            q = rotate(q, q[:, :0], angles[rows.tokens], rotated)[0]
        table = rows.table(cache.group)
        ctx.chosen[layer] = choose(q, weights, cache.index_keys, table, rows.places, rule_of(self.spec))


class HeadWeights(nn.Module):
    """The weights of an indexer's heads for each token. Its parameter is float32 in any model, and so is what is computed."""

    def __init__(self, hidden_size: int, heads: int, *, device: str | torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, hidden_size, dtype=torch.float32, device=device), requires_grad=False)
        """``[heads, hidden]``"""
        self.batch_invariant = False
        """Each token's result is bitwise independent of the other tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]`` -> ``[T, heads]`` float32."""
        return router_logits(x, self.weight, None, batch_invariant=self.batch_invariant)


class LayerNorm(nn.Module):
    """``(x - mean) / deviation * weight + bias`` over the last dimension."""

    def __init__(self, width: int, eps: float, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device=device), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(width, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, (len(self.weight),), self.weight, self.bias, self.eps)


class LightningIndexer(Indexer):
    """DeepSeek's: queries from the compressed ones of the layer, and one choice of tokens for all heads.

    The Hadamard rotation that the published code applies to queries and keys changes no product, and serves the precision of
    FP8 alone.
    """

    def __init__(
        self, hidden_size: int, spec: AttentionSpec, eps: float, *, dtype: torch.dtype, device: str | torch.device
    ) -> None:
        super().__init__(spec)
        if spec.mla is None or spec.mla.q_rank is None:
            raise ValueError(f"layer {spec.layer} has no compressed queries")
        heads, width = self.spec.num_heads, self.spec.head_dim
        self.wq_b = Linear(spec.mla.q_rank, heads * width, dtype=dtype, device=device)
        self.wk = Linear(hidden_size, width, dtype=dtype, device=device)
        self.k_norm = LayerNorm(width, eps, dtype=dtype, device=device)
        self.weights_proj = HeadWeights(hidden_size, heads, device=device)
        self._factor = float((heads * width) ** -0.5)

    def forward(self, x: torch.Tensor, latent: torch.Tensor, cos_sin: torch.Tensor | None, ctx: ForwardContext) -> None:
        """Keeps and chooses. ``x [T, hidden]``, ``latent [T, q_rank]``: the layer's compressed queries, normed."""

        def queries(tokens: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            q = self.wq_b(latent[tokens]).unflatten(1, (self.spec.num_heads, self.spec.head_dim))
            return q, self.weights_proj(x[tokens]) * self._factor

        self.keep_and_choose(self.k_norm(self.wk(x)), queries, ctx, cos_sin)


class BlockIndexer(Indexer):
    """MiniMax M3's: an index head for each share of the KV heads, with normed queries and keys, chooses blocks."""

    def __init__(
        self, hidden_size: int, spec: AttentionSpec, norm: type[RMSNorm], eps: float, *, dtype: torch.dtype,
        device: str | torch.device,
    ) -> None:  # fmt: skip
        super().__init__(spec)
        heads, width = self.spec.num_heads, self.spec.head_dim
        self.q_proj = Linear(hidden_size, heads * width, dtype=dtype, device=device)
        self.k_proj = Linear(hidden_size, width, dtype=dtype, device=device)
        self.q_norm = norm(width, eps, dtype=dtype, device=device)
        self.k_norm = norm(width, eps, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor, cos_sin: torch.Tensor | None, ctx: ForwardContext) -> None:
        """Keeps and chooses. ``x [T, hidden]``"""

        def queries(tokens: slice | torch.Tensor) -> tuple[torch.Tensor, None]:
            q = self.q_proj(x[tokens]).unflatten(1, (self.spec.num_heads, self.spec.head_dim))
            return cast(torch.Tensor, self.q_norm(q)), None

        self.keep_and_choose(cast(torch.Tensor, self.k_norm(self.k_proj(x))), queries, ctx, cos_sin)
