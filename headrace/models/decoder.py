"""The common decoder: attention and a gated MLP around a residual stream, with RMS norms before both.

A family is a way to read its configuration into a ModelSpec; this is what every ModelSpec becomes.
"""

from __future__ import annotations

import torch
from torch import nn

from headrace.attention.context import ForwardContext
from headrace.attention.layer import Attention
from headrace.layers.embedding import Embedding
from headrace.layers.linear import Linear
from headrace.layers.mlp import GatedMLP
from headrace.layers.norm import RMSNorm
from headrace.layers.rotary import RotaryTable
from headrace.spec import AttentionSpec, ModelSpec


class SelfAttention(nn.Module):
    """One layer's projections around its attention. Every width comes from the layer's own spec."""

    def __init__(self, model: ModelSpec, spec: AttentionSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.widths = (spec.q_size, spec.k_size, spec.v_size) if spec.kv_source is None else (spec.q_size,)
        self.qkv_proj = Linear(model.hidden_size, sum(self.widths), bias=model.attention_bias, dtype=dtype, device=device)
        self.o_proj = Linear(spec.out_size, model.hidden_size, bias=model.output_bias, dtype=dtype, device=device)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if model.qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, model.norm_eps, dtype=dtype, device=device)
            if spec.kv_source is None:
                self.k_norm = RMSNorm(spec.head_dim, model.norm_eps, dtype=dtype, device=device)
        self.attention = Attention(spec)

    def forward(self, x: torch.Tensor, cos_sin: torch.Tensor | None, ctx: ForwardContext) -> torch.Tensor:
        """``[T, hidden] -> [T, hidden]``"""
        spec, tokens = self.spec, len(x)
        q, *kv = self.qkv_proj(x).split(self.widths, dim=-1)
        q = q.view(tokens, spec.num_heads, spec.head_dim)
        k = v = None
        if kv:
            k = kv[0].view(tokens, spec.num_kv_heads, spec.head_dim)
            v = kv[1].view(tokens, spec.num_kv_heads, spec.v_head_dim)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None and k is not None:
            k = self.k_norm(k)
        out: torch.Tensor = self.o_proj(self.attention(q, k, v, ctx, cos_sin))
        return out


class DecoderLayer(nn.Module):
    def __init__(self, model: ModelSpec, spec: AttentionSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.self_attn = SelfAttention(model, spec, dtype, device)
        self.mlp = GatedMLP(
            model.hidden_size, model.intermediate_size, model.hidden_act, bias=model.mlp_bias, dtype=dtype, device=device
        )
        self.input_layernorm = RMSNorm(model.hidden_size, model.norm_eps, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(model.hidden_size, model.norm_eps, dtype=dtype, device=device)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, cos_sin: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream is ``x + residual``: the sum is left to the next norm, which fuses it.

        Args:
            x: ``[T, hidden]``, what the layer before adds to the stream.
            residual: ``[T, hidden]``, the stream before it; None for the first layer.

        Returns:
            The same two for the next layer.
        """
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, cos_sin, ctx)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """Parameters are allocated and left empty; they are named as in Hugging Face checkpoints, with q, k, v fused to
    ``qkv_proj`` and gate, up to ``gate_up_proj``. With tied embeddings ``lm_head`` holds the embedding's own parameter.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(DecoderLayer(spec, layer, dtype, device) for layer in spec.layers)
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, dtype=dtype, device=device)
        self.lm_head = Linear(
            spec.hidden_size, spec.vocab_size, dtype=dtype, device="meta" if spec.tie_word_embeddings else device
        )
        if spec.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self._rotary = {
            width: RotaryTable(spec.rope, width, device) for width in {layer.rotary_dim for layer in spec.layers} if width
        }
        """Width -> table: layers that rotate alike share one."""

    @torch.inference_mode()
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """One step.

        Args:
            input_ids: ``[T]`` int64.
            positions: ``[T]`` int64, absolute.

        Returns:
            ``[T, hidden]``, normed.
        """
        angles = self._angles(positions, ctx)
        x, residual = self.embed_tokens(input_ids), None
        for layer, spec in zip(self.layers, self.spec.layers, strict=True):
            x, residual = layer(x, residual, angles.get(spec.rotary_dim), ctx)
        return self.norm(x) if residual is None else self.norm.add(x, residual)[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[N, hidden] -> [N, vocab]`` float32."""
        logits: torch.Tensor = self.lm_head(hidden)
        return logits.float()

    def _angles(self, positions: torch.Tensor, ctx: ForwardContext) -> dict[int, torch.Tensor]:
        """Cosines and sines of the step's tokens, once for all layers of a width."""
        lengths = ctx.step.seq_lens_host
        longest = int(lengths.max()) if len(lengths) else 0
        for table in self._rotary.values():
            table.reserve(longest)
        return {width: table(positions) for width, table in self._rotary.items()}
