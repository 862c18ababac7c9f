"""Nemotron-H: each layer is a norm and one of Mamba-2, attention, an MLP without a gate, and experts without gates, which may
read tokens in a smaller space. Attention knows no positions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import nn

from headrace.attention.context import ForwardContext
from headrace.errors import ConfigError
from headrace.layers.norm import RMSNorm
from headrace.model_spec import BlockSpec, DenseSpec, MlpSpec, ModelSpec, MoeSpec
from headrace.models.decoder import Decoder, DecoderAttention, DecoderLayer
from headrace.models.families.hybrid.bamba import MambaMixer, MambaSpec
from headrace.models.family import Family
from headrace.models.hf_config import HFConfig, attending, attention_specs, decoder_spec, per_layer, required, uniform, whole
from headrace.models.mamba_config import numbers, state_space_specs
from headrace.models.moe_config import must_be, number
from headrace.models.names import decoder_names
from headrace.weights.names import NameTable

ARCHITECTURE = "NemotronHForCausalLM"
_PARTS = {
    ".self_attn": ("qkv_proj", "qkv_proj.weight", "o_proj.weight"),
    ".mlp": (
        *("up_proj.weight", "up_proj.bias", "down_proj.weight", "down_proj.bias"),
        *("gate.weight", "gate.e_score_correction_bias", "fc1_latent_proj.weight", "fc2_latent_proj.weight", "experts"),
        *(f"shared_experts.{name}" for name in ("up_proj.weight", "up_proj.bias", "down_proj.weight", "down_proj.bias")),
    ),
    ".mamba": (
        *("in_proj.weight", "in_proj.bias", "conv1d.weight", "conv1d.bias", "A_log", "D", "dt_bias", "norm.weight"),
        *("out_proj.weight", "out_proj.bias"),
    ),
}
_MOVED = {f"{module}.{name}": f".mixer.{name}" for module, parts in _PARTS.items() for name in parts}
"""Suffixes of the model's names -> of a checkpoint's."""


class NemotronLayer(DecoderLayer):
    """One module behind one norm."""

    def __init__(self, model: ModelSpec, index: int, dtype: torch.dtype, device: str | torch.device) -> None:
        nn.Module.__init__(self)
        block = model.blocks[index]
        self.norm = self.norm_class(model.hidden_size, model.norm_eps, dtype=dtype, device=device)
        if block.attention is not None:
            self.self_attn = DecoderAttention(model, model.layers[block.attention], dtype, device)
        elif block.state is not None:
            self.mamba = MambaMixer(model, model.states[block.state], dtype, device)
        else:
            self.mlp = self.build_mlp(model, index, dtype, device)
        self._mixer = "self_attn" if block.attention is not None else "mamba" if block.state is not None else "mlp"

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, cos_sin: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        normed, residual = (self.norm(x), x) if residual is None else self.norm.add(x, residual)
        return self.mlp(normed) if self._mixer == "mlp" else self.mix(normed, cos_sin, ctx), residual

    def norm_readers(self) -> Iterator[tuple[RMSNorm, nn.Module]]:
        yield self.norm, self.mixer


class NemotronDecoder(Decoder):
    layer_class = NemotronLayer


def names(model: Decoder) -> NameTable:
    table = decoder_names(model, _MOVED, ignorable=(r"(?:model\.)?mtp\..*",))
    table.instead("model.norm_f.weight", "norm.weight")
    table.instead("model.embeddings.weight", "embed_tokens.weight")
    table.elsewhere({"model.": "backbone."})
    return table


def _mixers(config: HFConfig) -> Iterator[BlockSpec]:
    attends = keeps = 0
    for layer, kind in enumerate(per_layer(config, "layers_block_type")):
        if kind == "full_attention":
            yield BlockSpec(attention=attends)
            attends += 1
        elif kind == "linear_attention":
            yield BlockSpec(state=keeps)
            keeps += 1
        elif kind in ("mlp", "moe"):
            yield BlockSpec()
        else:
            raise ConfigError(f"layer {layer}: layers_block_type {kind!r} is not supported", "layers_block_type")


def _experts(config: HFConfig, bias: bool) -> MoeSpec:
    latent = whole(config, "moe_latent_size", 0) if uniform(config, "moe_latent_size") is not None else 0
    if latent and bias:
        raise ConfigError("config: mlp_bias true is not supported beside moe_latent_size", "mlp_bias")
    return MoeSpec(
        num_experts=required(config, "n_routed_experts"),
        top_k=required(config, "num_experts_per_tok"),
        intermediate_size=required(config, "moe_intermediate_size"),
        shared=DenseSpec(required(config, "moe_shared_expert_intermediate_size"), "relu2", bias, gated=False),
        act="relu2",
        gated=False,
        latent_size=latent,
        scoring="sigmoid",
        correction_bias=True,
        num_groups=whole(config, "n_group", 1),
        top_groups=whole(config, "topk_group", 1),
        group_score="top2",
        normalize=bool(uniform(config, "norm_topk_prob", True)),
        added_sum=1e-20,
        routed_scale=number(config, "routed_scaling_factor", 1.0),
    )


def _mlps(config: HFConfig) -> Iterator[MlpSpec]:
    bias = bool(uniform(config, "mlp_bias", False))
    for kind in per_layer(config, "layers_block_type"):
        if kind == "moe":
            yield _experts(config, bias)
        else:
            yield DenseSpec(required(config, "intermediate_size") if kind == "mlp" else 0, "relu2", bias, gated=False)


def model_spec(config: HFConfig) -> ModelSpec:
    must_be(config, "mlp_hidden_act", "relu2")
    must_be(config, "mamba_hidden_act", "silu")
    must_be(config, "residual_in_fp32", False)
    mixers = tuple(_mixers(config))
    layers = attending(attention_specs(config), mixers)
    return decoder_spec(
        config,
        ARCHITECTURE,
        tuple(dataclasses.replace(layer, rotary_dim=0, rope=None) for layer in layers),
        tuple(_mlps(config)),
        kind=MambaSpec,
        mixers=mixers,
        states=state_space_specs(
            sum(block.state is not None for block in mixers),
            heads=required(config, "mamba_num_heads"),
            width=required(config, "mamba_head_dim"),
            groups=required(config, "n_groups"),
            size=required(config, "ssm_state_size"),
            taps=required(config, "conv_kernel"),
            bias=bool(uniform(config, "use_conv_bias", True)),
            dt_limit=numbers(config, "time_step_limit", (0.0, math.inf)),
        ),
        mamba_bias=bool(uniform(config, "use_bias", False)),
        norm_eps=number(config, "layer_norm_epsilon", 1e-5, above=0),
    )


FAMILY = Family(model_spec=model_spec, decoder=NemotronDecoder, names=names)
