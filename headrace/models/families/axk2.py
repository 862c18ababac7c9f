"""A.X-K2: DeepSeek V3.2 with gates on the output of attention and, through few channels, on norms."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from headrace.attention.context import ForwardContext
from headrace.kernels.linear.fp8_reference import Activations
from headrace.layers.linear import Linear
from headrace.layers.norm import RMSNorm
from headrace.model_spec import AttentionSpec, ModelSpec, MoeSpec
from headrace.model_spec.projection import halves
from headrace.models.decoder import Decoder
from headrace.models.families.deepseek_v32 import IndexedLayer, IndexedMLA, indexed_spec
from headrace.models.family import Family
from headrace.models.hf_config import HFConfig, required
from headrace.models.names import decoder_names
from headrace.weights.names import NameTable, StoredLayout

ARCHITECTURE = "AXK2ForCausalLM"
_MOVED = {
    ".self_attn.q_gate_proj.weight": ".self_attn.q_b_proj.weight",
    ".mlp.fc1.weight": ".W_down.weight",
    ".mlp.fc2.weight": ".W_up.weight",
}
"""Suffixes of the model's names, which are transformers', -> of published checkpoints."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AXK2Spec(ModelSpec):
    gate_rank: int
    """Channels through which the gate of a norm is computed."""


class NormGate(nn.Module):
    """The gate of a norm, through few channels."""

    def __init__(self, width: int, rank: int, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.fc1 = Linear(width, rank, dtype=dtype, device=device)
        self.fc2 = Linear(rank, width, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate: torch.Tensor = self.fc2(nn.functional.silu(self.fc1(x)))
        return (x * torch.sigmoid(gate.float())).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """A norm whose result is multiplied by a gate that is computed from it."""

    def __init__(self, width: int, eps: float, rank: int, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.norm = RMSNorm(width, eps, dtype=dtype, device=device)
        self.mlp = NormGate(width, rank, dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated: torch.Tensor = self.mlp(self.norm(x))
        return gated

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``RMSNorm.add``, gated."""
        normed, total = self.norm.add(x, residual)
        return self.mlp(normed), total


class GatedIndexedMLA(IndexedMLA):
    """One matrix makes a head's queries and the gate of its output, of the compressed queries behind and before their norm."""

    def __init__(self, model: ModelSpec, spec: AttentionSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(model, spec, dtype, device)
        rank = self.q_b_proj.in_features
        del self.q_b_proj
        self.q_gate_proj = Linear(2 * rank, spec.q_size + spec.out_size, dtype=dtype, device=device)
        self.q_gate_proj.stored_rows = {"q_gate_proj": partial(_stored_rows, spec)}

    def forward(self, x: Activations, cos_sin: torch.Tensor | None, ctx: ForwardContext) -> torch.Tensor:
        """``[T, hidden] -> [T, hidden]``"""
        spec, projected = self.spec, self.a_proj(x)
        compressed, latent = projected.split((projected.shape[1] - spec.row_width, spec.row_width), dim=1)
        normed = self.q_a_layernorm(compressed)  # type: ignore[misc]
        self._index(x, normed, cos_sin, ctx)
        both = self.q_gate_proj(torch.cat((normed, compressed), dim=1))
        q, gate = both.split((spec.q_size, spec.out_size), dim=1)
        q, up = q.reshape(len(q), spec.num_heads, self.head_dim), self.kv_b_proj.weight
        out = self.attention.forward_qkv(q, latent, self.kv_a_layernorm, up, ctx, cos_sin)
        return self.o_proj((out * torch.sigmoid(gate.float())).to(out.dtype))  # type: ignore[no-any-return]


def _stored_rows(spec: AttentionSpec) -> list[int]:
    """Returns the checkpoint's row for each row of ``q_gate_proj``: the queries of all heads, then their gates.

    A checkpoint has a head's gate behind its queries, whose rotated channels are the last and in pairs.
    """
    q, gate = spec.q_size // spec.num_heads, spec.out_size // spec.num_heads
    others = q - spec.rotary_dim
    channels = [*(others + channel for channel in halves(spec.rotary_dim)), *range(others)]
    starts = range(0, spec.num_heads * (q + gate), q + gate)
    queries = [start + channel for start in starts for channel in channels]
    return queries + [start + q + channel for start in starts for channel in range(gate)]


class AXK2Layer(IndexedLayer):
    attention_class = GatedIndexedMLA

    def __init__(self, model: AXK2Spec, index: int, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(model, index, dtype, device)
        options = model.hidden_size, model.norm_eps, model.gate_rank, dtype, device
        self.input_layernorm = GatedRMSNorm(*options)  # type: ignore[assignment]
        if isinstance(model.mlps[index], MoeSpec):
            self.post_attention_layernorm = GatedRMSNorm(*options)  # type: ignore[assignment]

    def norm_readers(self) -> Iterator[tuple[RMSNorm, nn.Module]]:
        """Gives the norm that the MLP alone reads; gates read the others."""
        if isinstance(self.post_attention_layernorm, RMSNorm):
            yield self.post_attention_layernorm, self.mlp


class AXK2Decoder(Decoder):
    layer_class = AXK2Layer


def model_spec(config: HFConfig) -> ModelSpec:
    kinds = ["full"] * required(config, "num_hidden_layers")
    spec = indexed_spec(config, ARCHITECTURE, kinds, kind=AXK2Spec, gate_rank=required(config, "gated_norm_rank"))
    layers = tuple(dataclasses.replace(layer, output_gate=True) for layer in spec.layers)
    return dataclasses.replace(spec, layers=layers)


def names(model: Decoder) -> NameTable:
    """Published checkpoints have names of their own for gates; transformers' are alternatives."""
    table = decoder_names(model, _MOVED)
    for name, _ in model.named_parameters():
        for ours in _MOVED:
            if name.endswith(ours):
                rows = partial(_stored_rows, model.spec.layers[0]) if "q_gate_proj" in ours else None
                table.instead(f"model.{name}", name, StoredLayout(rows) if rows else None)
    return table


FAMILY = Family(model_spec=model_spec, decoder=AXK2Decoder, names=names)
