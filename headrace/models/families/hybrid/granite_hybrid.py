"""Granite 4, hybrid: Mamba-2 in place of attention in most layers, experts beside a shared MLP, and factors on embeddings, on
what a layer adds to the residual stream, and on logits."""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
from torch import nn

from headrace.attention.context import ForwardContext
from headrace.errors import ConfigError
from headrace.kernels.linear.fp8_reference import Activations
from headrace.layers.mlp import GatedMLP
from headrace.model_spec import DenseSpec, MlpSpec, ModelSpec, MoeSpec
from headrace.models.decoder import Decoder
from headrace.models.families.hybrid.bamba import MambaLayer, MambaSpec
from headrace.models.family import Family
from headrace.models.hf_config import (
    HFConfig,
    attending,
    attention_biases,
    attention_specs,
    decoder_spec,
    hybrid_mixers,
    required,
    uniform,
    whole,
)
from headrace.models.mamba_config import mamba2_specs
from headrace.models.moe_config import activation, experts_of, must_be, number
from headrace.models.names import decoder_names
from headrace.weights.names import NameTable

ARCHITECTURE = "GraniteMoeHybridForCausalLM"
_SHARED = {
    ".gate_up_proj": ".shared_mlp.gate_up_proj",
    ".gate_up_proj.weight": ".shared_mlp.gate_up_proj.weight",
    ".down_proj.weight": ".shared_mlp.output_linear.weight",
}
_MOVED = {
    **{f".mlp{ours}": theirs for ours, theirs in _SHARED.items()},
    **{f".mlp.shared_experts{ours}": theirs for ours, theirs in _SHARED.items()},
    ".mlp.gate.weight": ".block_sparse_moe.router.weight",
    ".mlp.experts": ".block_sparse_moe.experts",
}
"""Suffixes of the model's names -> of a checkpoint's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteSpec(MambaSpec):
    embedding_multiplier: float
    residual_multiplier: float
    logits_scaling: float
    """Logits are divided by it."""


class GraniteLayer(MambaLayer):
    def __init__(self, model: ModelSpec, index: int, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(model, index, dtype, device)
        self.multiplier = cast(GraniteSpec, model).residual_multiplier

    def build_mlp(self, model: ModelSpec, index: int, dtype: torch.dtype, device: str | torch.device) -> nn.Module:
        """Builds the MLP or the experts. Checkpoints have gate and up of what all tokens go through in one matrix."""
        mlp = super().build_mlp(model, index, dtype, device)
        for module in mlp.modules():
            if isinstance(module, GatedMLP):
                module.gate_up_proj.parts = {"input_linear": module.gate_up_proj.out_features}
        return mlp

    def mix(self, x: Activations, cos_sin: torch.Tensor | None, ctx: ForwardContext) -> torch.Tensor:
        return super().mix(x, cos_sin, ctx) * self.multiplier

    def run_mlp(self, x: Activations, ctx: ForwardContext) -> torch.Tensor:
        return super().run_mlp(x, ctx) * self.multiplier


class GraniteDecoder(Decoder):
    layer_class = GraniteLayer
    spec: GraniteSpec

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().embed(input_ids) * self.spec.embedding_multiplier

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden) / self.spec.logits_scaling


def names(model: Decoder) -> NameTable:
    """Published checkpoints have experts, and the router, under other names than transformers saves."""
    table = decoder_names(model, _MOVED)
    for layer, mlp in enumerate(model.spec.mlps):
        shared, path = (mlp.shared, "mlp.shared_experts") if isinstance(mlp, MoeSpec) else (mlp, "mlp")
        if isinstance(shared, DenseSpec):
            # GGUF files have gate and up apart.
            parts = (f"model.layers.{layer}.shared_mlp.{part}_proj.weight" for part in ("gate", "up"))
            table.instead(dict.fromkeys(parts, shared.intermediate_size), f"layers.{layer}.{path}.gate_up_proj.weight")
        if isinstance(mlp, MoeSpec):
            theirs, ours = f"model.layers.{layer}.block_sparse_moe", f"layers.{layer}.mlp"
            table.instead(f"{theirs}.router.layer.weight", f"{ours}.gate.weight")
            table.instead(f"{theirs}.input_linear.weight", f"{ours}.experts.gate_up_proj")
            table.instead(f"{theirs}.output_linear.weight", f"{ours}.experts.down_proj")
    return table


def _mlp(config: HFConfig) -> MlpSpec:
    shared = DenseSpec(required(config, "shared_intermediate_size"), activation(config))
    if not whole(config, "num_local_experts", 0):
        return shared
    experts = experts_of(config, "num_local_experts", "num_experts_per_tok", "intermediate_size")
    return MoeSpec(**experts, shared=shared)


def model_spec(config: HFConfig) -> ModelSpec:
    must_be(config, "position_embedding_type", None, "rope", "nope")
    mixers = hybrid_mixers(config, "linear_attention")
    scale = number(config, "attention_multiplier", 1.0, above=0)
    layers = [dataclasses.replace(layer, scale=scale) for layer in attending(attention_specs(config), mixers)]
    if uniform(config, "position_embedding_type") != "rope":
        layers = [dataclasses.replace(layer, rotary_dim=0, rope=None) for layer in layers]
    if not layers:
        raise ConfigError("config: no layer has attention, which is not supported", "layer_types")
    return decoder_spec(
        config,
        ARCHITECTURE,
        tuple(layers),
        [_mlp(config)] * len(mixers),
        reads=("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"),
        kind=GraniteSpec,
        mixers=mixers,
        states=mamba2_specs(config, len(mixers) - len(layers)),
        mamba_bias=bool(uniform(config, "mamba_proj_bias", False)),
        embedding_multiplier=number(config, "embedding_multiplier", 1.0),
        residual_multiplier=number(config, "residual_multiplier", 1.0),
        logits_scaling=number(config, "logits_scaling", 1.0, above=0),
        **attention_biases(config),
    )


FAMILY = Family(model_spec=model_spec, decoder=GraniteDecoder, names=names)
