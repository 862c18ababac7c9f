"""Llama 4, its text part: most layers rotate and attend in chunks; the others see all without rotation, with queries that grow
with their position. Mixtures weigh what goes into an expert, and not what comes out."""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
from torch import nn

from headrace.attention.context import ForwardContext
from headrace.errors import ConfigError
from headrace.kernels.linear.fp8_reference import Activations
from headrace.layers.moe import Experts, MoeMLP
from headrace.layers.norm import UnitRMSNorm
from headrace.layers.rotary import frequencies
from headrace.model_spec import AttentionSpec, DenseSpec, ModelSpec, MoeSpec
from headrace.models.decoder import Decoder, DecoderLayer, RopeAngles
from headrace.models.families.ernie4_5 import PairedAttention
from headrace.models.families.gemma import with_multimodal_names
from headrace.models.family import Family
from headrace.models.hf_config import (
    HFConfig,
    attention_biases,
    attention_specs,
    decoder_spec,
    dense_specs,
    per_layer,
    required,
    text_part,
    uniform,
)
from headrace.models.interface import ModelInputs
from headrace.models.moe_config import activation, number
from headrace.models.names import decoder_names, experts_apart
from headrace.weights.names import NameTable, StoredLayout

ARCHITECTURE = "Llama4ForCausalLM"
_NON_TEXT = (r"(?:model\.)?(?:vision_model|multi_modal_projector)\..*",)
_STORED = {
    ".mlp.gate.weight": ".feed_forward.router.weight",
    ".mlp.experts": ".feed_forward.experts",
    ".mlp.shared_experts.gate_up_proj": ".feed_forward.shared_expert.gate_up_proj",
    ".mlp.shared_experts.gate_up_proj.weight": ".feed_forward.shared_expert.gate_up_proj.weight",
    ".mlp.shared_experts.down_proj.weight": ".feed_forward.shared_expert.down_proj.weight",
    ".mlp.gate_up_proj": ".feed_forward.gate_up_proj",
    ".mlp.gate_up_proj.weight": ".feed_forward.gate_up_proj.weight",
    ".mlp.down_proj.weight": ".feed_forward.down_proj.weight",
}
"""Suffixes of the model's names -> of a checkpoint's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama4Spec(ModelSpec):
    unit_qk: bool
    """Layers that rotate norm q and k, without weights."""
    growth: tuple[float, float] | None
    """(f, s): layers that do not rotate multiply the query at position p by ``1 + s log(1 + floor((p + 1) / f))``."""


class Llama4Attention(PairedAttention):
    """Norms q and k before they are rotated, which changes no norm."""

    def __init__(self, model: Llama4Spec, spec: AttentionSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(model, spec, dtype, device)
        if model.unit_qk and spec.rotary_dim:
            self.q_norm = self.k_norm = UnitRMSNorm(spec.head_dim, model.norm_eps, dtype=dtype, device=device)

    def forward(self, x: Activations, cos_sin: torch.Tensor | None, ctx: ForwardContext) -> torch.Tensor:
        """``cos_sin`` of a layer that does not rotate: ``[T, 1]``, the factors of its queries."""
        if self.spec.rotary_dim or cos_sin is None:
            return super().forward(x, cos_sin, ctx)
        qkv = self.qkv_proj(x)
        qkv[:, : self.spec.q_size].mul_(cos_sin)
        return self.o_proj(self.attention.forward_qkv(qkv, ctx, None))  # type: ignore[no-any-return]


class InputWeighedMLP(MoeMLP):
    """A mixture whose router weighs the inputs of experts: a token goes to one at a time."""

    def __init__(self, hidden_size: int, spec: MoeSpec, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(hidden_size, spec, dtype=dtype, device=device)
        self.experts.spec = dataclasses.replace(spec, top_k=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, hidden] -> [T, hidden]``"""
        out = None if self.shared_experts is None else self.shared_experts(x)
        experts, weights = self.gate(x)
        ones = torch.ones_like(weights[:, :1])
        for place in range(weights.shape[1]):
            one = slice(place, place + 1)
            out = self.experts(x * weights[:, one].to(x.dtype), experts[:, one].contiguous(), ones, out)
        return cast("torch.Tensor", out)


class Llama4Layer(DecoderLayer):
    attention_class = Llama4Attention

    def build_mlp(self, model: ModelSpec, index: int, dtype: torch.dtype, device: str | torch.device) -> nn.Module:
        spec = model.mlps[index]
        if isinstance(spec, MoeSpec):
            return InputWeighedMLP(model.hidden_size, spec, dtype=dtype, device=device)
        return super().build_mlp(model, index, dtype, device)


class Llama4Angles(RopeAngles):
    """Angles of layers that rotate, and factors of the queries of those that do not."""

    def __init__(self, spec: Llama4Spec, device: str | torch.device) -> None:
        super().__init__(spec, device)
        self._growth = spec.growth

    def __call__(self, inputs: ModelInputs, ctx: ForwardContext) -> list[torch.Tensor | None]:
        angles = super().__call__(inputs, ctx)
        if self._growth is None:
            return angles
        floor, scale = self._growth
        factors = torch.log1p(((inputs.positions.float() + 1) / floor).floor()).mul_(scale).add_(1).unsqueeze(1)
        return [factors if angle is None else angle for angle in angles]


class Llama4Decoder(Decoder):
    layer_class = Llama4Layer

    def build_rotary(self, device: str | torch.device) -> RopeAngles:
        return Llama4Angles(cast("Llama4Spec", self.spec), device)


def model_spec(config: HFConfig) -> ModelSpec:
    config = text_part(config)
    unit_qk = bool(uniform(config, "use_qk_norm", True))
    layers = _layers(config, unit_qk)
    floor, scale = number(config, "floor_scale", 8192, above=0), number(config, "attn_scale", 0.1)
    return decoder_spec(
        config,
        ARCHITECTURE,
        layers,
        _mlps(config, len(layers)),
        reads=("attention_chunk_size", "no_rope_layers"),
        kind=Llama4Spec,
        **attention_biases(config),
        unit_qk=unit_qk,
        growth=(floor, scale) if uniform(config, "attn_temperature_tuning", True) else None,
    )


def _layers(config: HFConfig, unit_qk: bool) -> tuple[AttentionSpec, ...]:
    rotated, types = per_layer(config, "no_rope_layers"), per_layer(config, "layer_types")
    layers = []
    for spec, rotates, kind in zip(attention_specs(config), rotated, types, strict=True):
        if kind == "chunked_attention":
            spec = dataclasses.replace(spec, window=required(config, "attention_chunk_size"), chunked=True)
        if not rotates:
            spec = dataclasses.replace(spec, rotary_dim=0, rope=None)
        elif unit_qk and spec.rope is not None and frequencies(spec.rope, spec.rotary_dim)[1] != 1:
            why = f"q and k are normed, and a rope of type {spec.rope.kind} would scale them"
            raise ConfigError(f"layer {spec.layer}: {why}", "rope_parameters")
        layers.append(spec)
    return tuple(layers)


def _mlps(config: HFConfig, num_layers: int) -> list[MoeSpec | DenseSpec]:
    width, act, mixed = required(config, "intermediate_size"), activation(config), set(config.moe_layers)
    if strangers := mixed - set(range(num_layers)):
        raise ConfigError(f"moe_layers: there is no layer {min(strangers)}", "moe_layers")
    moe = MoeSpec(
        num_experts=required(config, "num_local_experts"),
        top_k=required(config, "num_experts_per_tok"),
        intermediate_size=width,
        act=act,
        scoring="sigmoid",
        normalize=False,
        shared=DenseSpec(width, act),
    )
    wide = required(config, "intermediate_size_mlp") if len(mixed) < num_layers else width
    return [
        moe if layer in mixed else dataclasses.replace(dense, intermediate_size=wide)
        for layer, dense in enumerate(dense_specs(config))
    ]


def names(model: Decoder) -> NameTable:
    return with_multimodal_names(decoder_names(model, _STORED, experts=_experts, ignorable=_NON_TEXT))


def _experts(table: NameTable, theirs: str, ours: str, module: Experts) -> None:
    """All experts in a tensor, inputs before outputs; or each expert's matrices apart."""
    experts_apart(table, theirs, ours, module)
    for name in ("gate_up_proj", "down_proj"):
        table.instead(f"{theirs}.{name}", f"{ours}.{name}", StoredLayout(transposed=True))


FAMILY = Family(model_spec=model_spec, decoder=Llama4Decoder, names=names)
