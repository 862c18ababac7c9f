"""MiniMax-Text-01 and M1: seven layers of eight have lightning attention, a linear recurrence whose heads forget at fixed
rates. A layer's input to the residual sum is what its norm gives, and both summands have factors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from typing import ClassVar, cast

import torch
from torch import nn

from headrace.attention.context import ForwardContext
from headrace.kernels.state import state_space
from headrace.layers.linear import FusedLinear, Linear, RowParallelLinear
from headrace.layers.norm import RMSNorm
from headrace.layers.short_conv import StateMixer
from headrace.layers.state import GatedNorm, SpanningNorm
from headrace.model_spec import ModelSpec, MoeSpec, StateSpec
from headrace.models.decoder import Decoder, DecoderLayer
from headrace.models.family import Family
from headrace.models.hf_config import HFConfig, attending, attention_specs, decoder_spec, hybrid_mixers
from headrace.models.moe_config import experts_of, must_be, number
from headrace.models.names import block_sparse_experts, decoder_names
from headrace.weights.names import NameTable

ARCHITECTURE = "MiniMaxForCausalLM"
_MOVED = {
    ".linear_attn.in_proj": ".self_attn.in_proj",
    ".linear_attn.in_proj.weight": ".self_attn.in_proj.weight",
    ".linear_attn.norm.weight": ".self_attn.norm.weight",
    ".linear_attn.out_proj.weight": ".self_attn.out_proj.weight",
    ".mlp.gate.weight": ".block_sparse_moe.gate.weight",
    ".mlp.experts": ".block_sparse_moe.experts",
}
"""Suffixes of the model's names -> of a checkpoint's."""
_RATES = (r"model\.layers\.\d+\.self_attn\.(?:slope_rate|query_decay|key_decay|diagonal_decay)",)
"""Names of the rates of heads, and of their powers, which the numbers of head and layer say."""

Factors = tuple[float, float]
"""Factors of the normed input, and of what is added to it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiniMaxSpec(ModelSpec):
    attention_factors: Factors
    state_factors: Factors
    mlp_factors: Factors


class LightningAttention(StateMixer):
    """``S = exp(-rate) * S + outer(v, k); out = S @ q`` in each head, normed over all heads and gated.

    That is Mamba-2's recurrence with time steps of 1 and without D, where q, k and v are C, B and x.
    """

    outputs: ClassVar = {"in_proj": ("values", "keys", "keys", "values"), "norm": ("values",)}

    def __init__(self, model: ModelSpec, spec: StateSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.spec, inner = spec, spec.heads * spec.value_dim
        whole = model.whole.states[spec.index]
        self._first = 0 if model.shard is None else model.shard.rank * spec.heads
        layer = next(layer for layer, block in enumerate(model.blocks) if block.state == spec.index)
        self._slope, self._factor = 8 / whole.heads, 1 - layer / (model.num_layers - 1 + 1e-5) + 1e-5
        parts = {"qkv_proj": spec.mixed_channels, "output_gate": inner}
        self.in_proj = FusedLinear(model.hidden_size, parts, dtype=dtype, device=device)
        self.in_proj.stored_rows = {"qkv_proj": partial(_values_first, spec.heads, spec.value_dim)}
        kind, width = (GatedNorm, inner) if model.shard is None else (SpanningNorm, whole.heads * whole.value_dim)
        self.norm = kind(inner, model.norm_eps, width=width, gate="sigmoid", dtype=dtype, device=device)
        self.out_proj = RowParallelLinear(inner, model.hidden_size, dtype=dtype, device=device)
        self.log_rates: torch.Tensor
        self.zeros: torch.Tensor
        self.steps: torch.Tensor
        self.place(device)

    def place(self, device: str | torch.device) -> None:
        """Makes the constants of the recurrence on a device."""
        heads = torch.arange(self._first, self._first + self.spec.heads, dtype=torch.float64, device=device)
        rates = math.log(self._factor) - math.log(2) * self._slope * (heads + 1)
        self.register_buffer("log_rates", rates.float(), persistent=False)
        self.register_buffer("zeros", torch.zeros_like(self.log_rates), persistent=False)
        self.register_buffer(
            "steps", torch.zeros(1, self.spec.heads, dtype=self.norm.weight.dtype, device=device), persistent=False
        )

    def readers(self) -> tuple[Linear, ...]:
        """None: the residual sum reads the input too."""
        return ()

    def forward(self, x: torch.Tensor, cos_sin: torch.Tensor | None, ctx: ForwardContext) -> torch.Tensor:
        """``[T, hidden] -> [T, hidden]``, the rank's part of the sum over tensor-parallel ranks. Positions play no part."""
        spec = self.spec
        rows, own = ctx.state_of(spec.index)
        if own.state is None:
            raise ValueError(f"state layer {spec.index} keeps no state")
        vkq, gate = self.in_proj(x).split_with_sizes((spec.mixed_channels, spec.heads * spec.value_dim), dim=1)
        vkq = nn.functional.silu(vkq)
        out = state_space(
            vkq, self.steps.expand(len(vkq), -1), self.log_rates, self.zeros, self.zeros, own.state, rows, spec.dt_limit
        )
        return self.out_proj(self.norm(out, gate))  # type: ignore[no-any-return]


def _values_first(heads: int, width: int) -> list[int]:
    """Returns, for the values of all heads, then keys and then queries, the rows of heads with a query, a key and a value."""
    return [(3 * head + part) * width + row for part in (2, 1, 0) for head in range(heads) for row in range(width)]


class MiniMaxLayer(DecoderLayer):
    state_class: type[nn.Module] = LightningAttention

    def __init__(self, model: ModelSpec, index: int, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(model, index, dtype, device)
        spec = cast(MiniMaxSpec, model)
        self._mixed = spec.attention_factors if model.blocks[index].state is None else spec.state_factors
        self._of_mlp = spec.mlp_factors

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, cos_sin: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # Norms that several modules read are floats.
        normed = self.input_layernorm(x) if residual is None else self.input_layernorm.add(x, residual)[0]
        normed, (kept, added) = cast(torch.Tensor, normed), self._mixed
        x = self.mix(normed, cos_sin, ctx) * added
        normed = cast(torch.Tensor, self.post_attention_layernorm.add(x, normed * kept)[0])
        kept, added = self._of_mlp
        return self.run_mlp(normed, ctx) * added, normed * kept

    def norm_readers(self) -> Iterator[tuple[RMSNorm, nn.Module]]:
        return iter(())


class MiniMaxDecoder(Decoder):
    layer_class = MiniMaxLayer

    def place(self, device: str | torch.device) -> None:
        super().place(device)
        for module in self.modules():
            if isinstance(module, LightningAttention):
                module.place(device)


def names(model: Decoder) -> NameTable:
    table = decoder_names(model, _MOVED, experts=block_sparse_experts, ignorable=_RATES)
    for layer in range(model.spec.num_layers):
        table.instead(f"model.layers.{layer}.mlp.gate.weight", f"layers.{layer}.mlp.gate.weight")
    return table


def _factors(config: HFConfig, part: str) -> Factors:
    return number(config, f"{part}_alpha_factor", 1.0), number(config, f"{part}_beta_factor", 1.0)


def model_spec(config: HFConfig) -> ModelSpec:
    must_be(config, "hidden_act", "silu")
    mixers = hybrid_mixers(config, "linear_attention")
    must_be(config, "sliding_window", None)
    every = attention_specs(config)
    layers = attending(every, mixers)
    heads, width = every[0].num_heads, every[0].head_dim
    experts = MoeSpec(**experts_of(config, "num_local_experts", "num_experts_per_tok", "intermediate_size"), normalize=True)
    return decoder_spec(
        config,
        ARCHITECTURE,
        layers,
        [experts] * len(mixers),
        kind=MiniMaxSpec,
        mixers=mixers,
        states=tuple(
            StateSpec(index, "lightning", heads, heads, key_dim=width, value_dim=width, conv=None, dt_limit=(1.0, 1.0))
            for index in range(len(mixers) - len(layers))
        ),
        attention_factors=_factors(config, "full_attn"),
        state_factors=_factors(config, "linear_attn"),
        mlp_factors=_factors(config, "mlp"),
    )


FAMILY = Family(model_spec=model_spec, decoder=MiniMaxDecoder, names=names)
