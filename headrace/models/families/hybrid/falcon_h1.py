"""Falcon-H1: attention and Mamba-2 side by side in every layer, and factors on nearly everything that is projected."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import cast

import torch
from torch import nn

from headrace.attention.context import ForwardContext
from headrace.kernels.linear.fp8_reference import Activations
from headrace.layers.mlp import GatedMLP
from headrace.layers.norm import RMSNorm
from headrace.layers.state import Mamba2Mixer
from headrace.model_spec import BlockSpec, DenseSpec, ModelSpec, StateSpec
from headrace.models.decoder import Decoder, DecoderLayer
from headrace.models.families.hybrid.bamba import MambaSpec, names
from headrace.models.family import Family
from headrace.models.hf_config import HFConfig, attention_biases, attention_specs, decoder_spec, dense_specs, required, uniform
from headrace.models.mamba_config import mamba2_specs, numbers
from headrace.models.moe_config import number

ARCHITECTURE = "FalconH1ForCausalLM"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FalconSpec(MambaSpec):
    """Factors, by their names in configurations."""

    out_bias: bool
    """The last projection of Mamba layers has a bias."""
    mamba_rms_norm: bool
    norm_before_gate: bool
    embedding_multiplier: float
    lm_head_multiplier: float
    attention_in_multiplier: float
    attention_out_multiplier: float
    ssm_in_multiplier: float
    ssm_out_multiplier: float
    ssm_multipliers: tuple[float, ...]
    """The factors of z, x, B, C and dt."""
    mlp_multipliers: tuple[float, ...]
    """The factors of the gate and of the result."""


class FalconMixer(Mamba2Mixer):
    def __init__(self, model: ModelSpec, spec: StateSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        self.facts = facts = cast(FalconSpec, model)
        super().__init__(
            model,
            spec,
            dtype,
            device,
            normed=facts.mamba_rms_norm,
            gate_first=not facts.norm_before_gate,
            bias=facts.mamba_bias,
            out_bias=facts.out_bias,
        )
        inner, groups = spec.heads * spec.value_dim, spec.key_heads * spec.key_dim
        self.parts = [inner, inner, groups, groups, spec.heads]

    def project(self, x: Activations) -> torch.Tensor:
        projected = super().project(x * self.facts.ssm_in_multiplier)  # type: ignore[operator]
        for part, factor in zip(projected.split_with_sizes(self.parts, dim=1), self.facts.ssm_multipliers, strict=True):
            part *= factor
        return projected


class FalconMLP(GatedMLP):
    def __init__(
        self,
        hidden_size: int,
        spec: DenseSpec,
        multipliers: tuple[float, ...],
        *,
        dtype: torch.dtype,
        device: str | torch.device,
    ) -> None:
        super().__init__(hidden_size, spec, dtype=dtype, device=device)
        self.gate_factor, self.down_factor = multipliers

    def forward(self, x: Activations) -> torch.Tensor:
        gate_up = self.gate_up_proj(x)
        gate_up[:, : self.spec.intermediate_size] *= self.gate_factor
        return self.down_proj(self.act_mul(gate_up)) * self.down_factor  # type: ignore[no-any-return]


class FalconLayer(DecoderLayer):
    state_class = FalconMixer
    state_name = "mamba"

    def __init__(self, model: ModelSpec, index: int, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(model, index, dtype, device)
        self.facts = cast(FalconSpec, model)

    def build_mlp(self, model: ModelSpec, index: int, dtype: torch.dtype, device: str | torch.device) -> nn.Module:
        mlp, factors = cast(DenseSpec, model.mlps[index]), cast(FalconSpec, model).mlp_multipliers
        return FalconMLP(model.hidden_size, mlp, factors, dtype=dtype, device=device)

    def mix(self, x: Activations, cos_sin: torch.Tensor | None, ctx: ForwardContext) -> torch.Tensor:
        facts = self.facts
        attended: torch.Tensor = self.self_attn(x * facts.attention_in_multiplier, cos_sin, ctx)  # type: ignore[operator]
        mixed: torch.Tensor = self.mamba(x, cos_sin, ctx) * facts.ssm_out_multiplier  # type: ignore[operator]
        return mixed + attended * facts.attention_out_multiplier

    def norm_readers(self) -> Iterator[tuple[RMSNorm, nn.Module]]:
        yield self.post_attention_layernorm, self.mlp


class FalconDecoder(Decoder):
    layer_class = FalconLayer
    spec: FalconSpec

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().embed(input_ids) * self.spec.embedding_multiplier

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden) * self.spec.lm_head_multiplier


def model_spec(config: HFConfig) -> ModelSpec:
    key_factor, count = number(config, "key_multiplier", 1.0), required(config, "num_hidden_layers")
    # A factor on keys is one on logits.
    layers = tuple(dataclasses.replace(layer, scale=layer.scale * key_factor) for layer in attention_specs(config))
    factors = ("embedding", "lm_head", "attention_in", "attention_out", "ssm_in", "ssm_out")
    return decoder_spec(
        config,
        ARCHITECTURE,
        layers,
        dense_specs(config, bias=bool(uniform(config, "mlp_bias", False))),
        reads=("embedding_multiplier",),
        kind=FalconSpec,
        mixers=tuple(BlockSpec(layer, layer) for layer in range(count)),
        states=mamba2_specs(config, count, uniform(config, "mamba_d_ssm")),
        mamba_bias=bool(uniform(config, "mamba_proj_bias", False)),
        out_bias=bool(uniform(config, "projectors_bias", False)),
        mamba_rms_norm=bool(uniform(config, "mamba_rms_norm", False)),
        norm_before_gate=bool(uniform(config, "mamba_norm_before_gate", True)),
        ssm_multipliers=numbers(config, "ssm_multipliers", (1.0,) * 5),
        mlp_multipliers=numbers(config, "mlp_multipliers", (1.0,) * 2),
        **{f"{name}_multiplier": number(config, f"{name}_multiplier", 1.0) for name in factors},
        **attention_biases(config),
    )


FAMILY = Family(model_spec=model_spec, decoder=FalconDecoder, names=names)
