"""The common decoder: attention and a gated MLP around a residual stream, with RMS norms before both.

A family that differs overrides the part in which it does: a class that builds another (``norm_class``, ``attention_class``,
``layer_class``), or a small method. Parameters are named as in Hugging Face's checkpoints, but for the fused ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from headrace.attention.context import ForwardContext
from headrace.attention.layer import Attention
from headrace.errors import ConfigError
from headrace.layers.embedding import Embedding
from headrace.layers.feed_forward import feed_forward
from headrace.layers.linear import FusedLinear, Linear
from headrace.layers.norm import RMSNorm, UnitRMSNorm
from headrace.layers.rotary import RotaryTable
from headrace.spec import AttentionSpec, ModelSpec, RopeSpec
from headrace.spec.projection import input_matrices


class SelfAttention(nn.Module):
    """One layer's projections around its attention. Every width comes from the layer's own spec."""

    norm_class: type[RMSNorm] = RMSNorm
    """Of q and k."""

    def __init__(self, model: ModelSpec, spec: AttentionSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.spec = spec
        parts = self.parts(spec)
        self.qkv_proj = FusedLinear(model.hidden_size, parts, bias=model.attention_bias, dtype=dtype, device=device)
        self.o_proj = Linear(spec.out_size, model.hidden_size, bias=model.output_bias, dtype=dtype, device=device)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if model.qk_norm:
            self.q_norm = self.norm_class(spec.head_dim, model.norm_eps, dtype=dtype, device=device)
            if spec.kv_source is None:
                self.k_norm = self.norm_class(spec.head_dim, model.norm_eps, dtype=dtype, device=device)
        self.v_norm: UnitRMSNorm | None = None
        self.v_factor = 1.0
        self.attention = Attention(spec, device)

    def parts(self, spec: AttentionSpec) -> Mapping[str, int]:
        """The matrices of ``qkv_proj``, by their names in a checkpoint -> their outputs."""
        return {f"{matrix.name}_proj": matrix.size for matrix in input_matrices(spec)}

    def forward(self, x: torch.Tensor, cos_sin: torch.Tensor | None, ctx: ForwardContext) -> torch.Tensor:
        """``[T, hidden] -> [T, hidden]``"""
        qkv, gate = self.qkv_proj(x), None
        if self.spec.output_gate:
            gate = qkv[:, qkv.shape[1] - self.spec.out_size :]
            qkv = qkv[:, : qkv.shape[1] - self.spec.out_size]
        mixed = self.attention.of_projection(qkv, ctx, cos_sin, self.q_norm, self.k_norm, self.v_norm, self.v_factor)
        if gate is not None:
            mixed = mixed * torch.sigmoid(gate)
        out: torch.Tensor = self.o_proj(mixed)
        return out


class DecoderLayer(nn.Module):
    attention_class: type[nn.Module] = SelfAttention
    norm_class: type[RMSNorm] = RMSNorm
    entry = "forward"
    """The method that is the whole layer, which the decoder calls."""

    def __init__(self, model: ModelSpec, index: int, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.self_attn = self.attention_class(model, model.layers[index], dtype, device)
        self.mlp = self.build_mlp(model, index, dtype, device)
        self.input_layernorm = self.norm_class(model.hidden_size, model.norm_eps, dtype=dtype, device=device)
        self.post_attention_layernorm = self.norm_class(model.hidden_size, model.norm_eps, dtype=dtype, device=device)

    def build_mlp(self, model: ModelSpec, index: int, dtype: torch.dtype, device: str | torch.device) -> nn.Module:
        """``[T, hidden] -> [T, hidden]``, what follows attention."""
        return feed_forward(model.hidden_size, model.mlps[index], dtype=dtype, device=device)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, cos_sin: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The residual stream is ``x + residual``: the sum is left to the next norm, which fuses it.

        Args:
            x: ``[T, hidden]``, what the layer before adds to the stream.
            residual: ``[T, hidden]``, the stream before it; None: x is the whole stream, as before the first layer.

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

    def stream(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]``: the residual stream behind the layer, of the two that ``forward`` returned."""
        return residual + x

    def behind(self, result: Any) -> torch.Tensor:
        """``[T, hidden]``: the residual stream behind the layer, of what ``entry`` returned."""
        return self.stream(*result)


class LayersAtOnce(Protocol):
    """Another way to run all layers of a decoder."""

    def takes(self, ctx: ForwardContext) -> bool: ...

    def __call__(
        self, stream: torch.Tensor, angles: Sequence[torch.Tensor | None], ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first layer's input, and each layer's angles -> what the layers return. ``stream`` may be overwritten."""
        ...


class Decoder(nn.Module):
    """Parameters are allocated and left empty. With tied embeddings ``lm_head`` holds the embedding's own parameter."""

    layer_class: type[DecoderLayer] = DecoderLayer
    norm_class: type[RMSNorm] = RMSNorm
    """Of the hidden states that leave the last layer."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(self.layer_class(spec, index, dtype, device) for index in range(spec.num_layers))
        self.norm = self.norm_class(spec.hidden_size, spec.norm_eps, dtype=dtype, device=device)
        self.lm_head = Linear(
            spec.hidden_size, spec.vocab_size, dtype=dtype, device="meta" if spec.tie_word_embeddings else device
        )
        self.lm_head.out_dtype = torch.float32
        if spec.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.fused: LayersAtOnce | None = None
        """Runs the layers in place of their modules, with the same result, in steps that it takes."""
        self._rotary = _Rotary(spec.layers, device)

    @torch.inference_mode()
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """One step.

        Args:
            input_ids: ``[T]`` int64.
            positions: ``[T]`` int64, absolute.

        Returns:
            ``[T, hidden]``, normed.
        """
        angles = self._rotary(positions, ctx)
        x, residual = self.embed(input_ids), None
        if self.fused is not None and self.fused.takes(ctx):
            x, residual = self.fused(x, angles, ctx)
        else:
            for layer, cos_sin in zip(self.layers, angles, strict=True):
                x, residual = layer(x, residual, cos_sin, ctx)
        return self.last_norm(x, residual)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``[T]`` int64 ``-> [T, hidden]``, what enters the first layer: a new tensor."""
        return self.embed_tokens(input_ids)  # type: ignore[no-any-return]

    def last_norm(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """``[T, hidden]`` of the stream that leaves the last layer."""
        return self.norm(x) if residual is None else self.norm.add(x, residual)[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[N, hidden] -> [N, vocab]`` float32."""
        logits: torch.Tensor = self.lm_head(hidden).float()
        cap = self.spec.logit_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)


class _Rotary:
    """The cosines and sines of a step's tokens, once for all layers that rotate alike."""

    def __init__(self, layers: tuple[AttentionSpec, ...], device: str | torch.device) -> None:
        self._tables: list[RotaryTable] = []
        self._of_layer: list[int | None] = []
        known: dict[tuple[RopeSpec, int], int] = {}
        for layer in layers:
            if not layer.rotary_dim:
                self._of_layer.append(None)
                continue
            if layer.rope is None:
                raise ConfigError(f"layer {layer.layer} rotates {layer.rotary_dim} channels and has no rope", "rope_parameters")
            key = (layer.rope, layer.rotary_dim)
            if key not in known:
                known[key] = len(self._tables)
                self._tables.append(RotaryTable(layer.rope, layer.rotary_dim, device))
            self._of_layer.append(known[key])

    def __call__(self, positions: torch.Tensor, ctx: ForwardContext) -> list[torch.Tensor | None]:
        """Per layer ``[T, rotary_dim]`` float32, or None for one that does not rotate."""
        lengths = ctx.step.seq_lens_host
        longest = int(lengths.max()) if len(lengths) else 0
        for table in self._tables:
            table.reserve(longest)
        angles = [table(positions) for table in self._tables]
        return [None if index is None else angles[index] for index in self._of_layer]
