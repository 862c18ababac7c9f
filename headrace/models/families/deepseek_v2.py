"""DeepSeek V2: multi-head latent attention (MLA), and mixtures of experts with shared ones after the first layers. DeepSeek V3
(and R1) is V2 whose experts have sigmoid scores, chosen by groups with a correction.

Checkpoints have a head's rotated channels after the others, in interleaved pairs. Here they come first and in halves, in q as
in the latent, so that they are rotated and cached like those of any family.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from headrace.attention.context import ForwardContext
from headrace.attention.mla import MLAAttention
from headrace.errors import ConfigError
from headrace.kernels.linear.fp8_reference import Activations
from headrace.layers.linear import FusedLinear, Linear, RowParallelLinear
from headrace.layers.norm import RMSNorm
from headrace.model_spec import AttentionSpec, MLASpec, ModelSpec, MoeSpec
from headrace.model_spec.projection import halves, of_heads
from headrace.models.decoder import Decoder, DecoderLayer
from headrace.models.family import Family
from headrace.models.hf_config import HFConfig, attention_biases, decoder_spec, per_layer, required, rope_specs, uniform, whole
from headrace.models.moe_config import experts_of, grouped_mixture, mixed_specs, must_be, number, shared_experts
from headrace.models.names import decoder_names
from headrace.weights.names import NameTable

ARCHITECTURE, V3_ARCHITECTURE = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
_INNER_EPS = 1e-6
"""Epsilon of the norms of the q and KV latents, in every model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekSpec(ModelSpec):
    rotary_pairs: bool = True
    """Checkpoints have interleaved pairs of rotated channels."""


class MLAUpProjection(nn.Module):
    """The up-projection from the latent to keys and values. No ``Linear``: the backend absorbs the weight."""

    def __init__(self, spec: AttentionSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        full = spec.uncompressed
        shape = spec.num_heads * (full.head_dim - spec.rotary_dim + full.v_head_dim), spec.v_head_dim
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
        self.batch_invariant = False
        """Read by ``make_invariant``; the backend multiplies by the weight."""


class MLASelfAttention(nn.Module):
    """Multi-head latent attention with its projections."""

    def __init__(self, model: ModelSpec, spec: AttentionSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        if spec.mla is None:
            raise ConfigError(f"layer {spec.layer} has no latent KV", "kv_lora_rank")
        self.spec, self.head_dim, rank = spec, spec.mla.head_dim, spec.mla.q_rank
        paired = not isinstance(model, DeepseekSpec) or model.rotary_pairs
        rotated = halves(spec.rotary_dim) if paired else tuple(range(spec.rotary_dim))
        q_rows = partial(of_heads, spec.num_heads, _rotated_last(self.head_dim, rotated))
        inputs = ({} if rank is None else {"q_a_proj": rank}) | {"kv_a_proj_with_mqa": spec.row_width}
        self.a_proj = FusedLinear(model.hidden_size, inputs, bias=model.attention_bias, dtype=dtype, device=device)
        self.a_proj.stored_rows = {"kv_a_proj_with_mqa": partial(_rotated_last, spec.row_width, rotated)}
        self.kv_a_layernorm = RMSNorm(spec.v_head_dim, _INNER_EPS, dtype=dtype, device=device)
        self.kv_b_proj = MLAUpProjection(spec, dtype, device)
        self.q_a_layernorm: RMSNorm | None = None
        if rank is None:
            self.q_proj = Linear(model.hidden_size, spec.q_size, dtype=dtype, device=device)
            self.q_proj.stored_rows = {"q_proj": q_rows}
        else:
            self.q_a_layernorm = RMSNorm(rank, _INNER_EPS, dtype=dtype, device=device)
            self.q_b_proj = Linear(rank, spec.q_size, dtype=dtype, device=device)
            self.q_b_proj.stored_rows = {"q_b_proj": q_rows}
        self.o_proj = RowParallelLinear(spec.out_size, model.hidden_size, bias=model.output_bias, dtype=dtype, device=device)
        self.attention = MLAAttention(spec)

    def readers(self) -> tuple[Linear, ...]:
        """The layers that multiply the input, which nothing else reads."""
        return (self.a_proj,) if self.q_a_layernorm is not None else (self.a_proj, self.q_proj)

    def norm_readers(self) -> Iterator[tuple[RMSNorm, nn.Module]]:
        """Gives norms with the only module that reads each of them."""
        if self.q_a_layernorm is not None:
            yield self.q_a_layernorm, self.q_b_proj

    def forward(self, x: Activations, cos_sin: torch.Tensor | None, ctx: ForwardContext) -> torch.Tensor:
        """``[T, hidden] -> [T, hidden]``"""
        spec, projected = self.spec, self.a_proj(x)
        latent = projected[:, projected.shape[1] - spec.row_width :]
        q = self._queries(x, projected, cos_sin, ctx).view(len(projected), spec.num_heads, self.head_dim)
        out: torch.Tensor = self.o_proj(
            self.attention.forward_qkv(q, latent, self.kv_a_layernorm, self.kv_b_proj.weight, ctx, cos_sin)
        )
        return out

    def _queries(
        self, x: Activations, projected: torch.Tensor, cos_sin: torch.Tensor | None, ctx: ForwardContext
    ) -> torch.Tensor:
        if self.q_a_layernorm is None:
            return self.q_proj(x)  # type: ignore[no-any-return]
        rank = projected.shape[1] - self.spec.row_width
        compressed = self.q_a_layernorm(projected[:, :rank])
        self._index(x, compressed, cos_sin, ctx)
        return self.q_b_proj(compressed)  # type: ignore[no-any-return]

    def _index(self, x: Activations, compressed: Activations, cos_sin: torch.Tensor | None, ctx: ForwardContext) -> None:
        """Sees the input and the compressed queries, normed: an indexer of the layer chooses here."""
        return None


def _rotated_last(width: int, rotated: tuple[int, ...]) -> tuple[int, ...]:
    """Returns, for each channel with the rotated ones first, its index with the rotated ones last."""
    others = width - len(rotated)
    return (*(others + row for row in rotated), *range(others))


class DeepseekLayer(DecoderLayer):
    attention_class = MLASelfAttention


class DeepseekDecoder(Decoder):
    layer_class = DeepseekLayer


def model_spec(config: HFConfig) -> ModelSpec:
    must_be(config, "norm_topk_prob", False, None)
    must_be(config, "scoring_func", "softmax")
    must_be(config, "topk_method", "greedy", "group_limited_greedy")
    grouped = config.topk_method == "group_limited_greedy"
    mlp_bias = bool(uniform(config, "mlp_bias", False))
    experts = experts_of(config, "n_routed_experts", "num_experts_per_tok")
    moe = MoeSpec(
        **experts,
        shared=shared_experts(config, "n_shared_experts", experts["intermediate_size"], bias=mlp_bias),
        num_groups=required(config, "n_group") if grouped else 1,
        top_groups=required(config, "topk_group") if grouped else 1,
        normalize=False,
        routed_scale=number(config, "routed_scaling_factor", 1.0),
    )
    return mla_model_spec(config, ARCHITECTURE, moe, mlp_bias=mlp_bias)


def v3_model_spec(config: HFConfig) -> ModelSpec:
    must_be(config, "scoring_func", "sigmoid")
    must_be(config, "topk_method", "noaux_tc")
    return mla_model_spec(config, V3_ARCHITECTURE, grouped_mixture(config), rotary_pairs=bool(config.rope_interleave))


def v3_names(model: Decoder) -> NameTable:
    """Ignores the extra layer for multi-token prediction."""
    return decoder_names(model, ignorable=(rf"model\.layers\.{model.spec.num_layers}\..*",))


def mla_model_spec(
    config: HFConfig, architecture: str, moe: MoeSpec, *, mlp_bias: bool = False, rotary_pairs: bool = True
) -> ModelSpec:
    """Reads the fields that V2 and V3 share."""
    must_be(config, "moe_layer_freq", 1)
    dense = whole(config, "first_k_dense_replace", 0)
    mlps = mixed_specs(config, moe, lambda layer: layer >= dense, bias=mlp_bias)
    return decoder_spec(
        config,
        architecture,
        mla_specs(config),
        mlps,
        kind=DeepseekSpec,
        rotary_pairs=rotary_pairs,
        **attention_biases(config),
    )


def mla_specs(config: HFConfig) -> tuple[AttentionSpec, ...]:
    """Returns the geometry of every layer.

    Raises:
        ConfigError: the numbers do not fit together; the message names the layer or the field.
    """
    heads, rank = required(config, "num_attention_heads"), required(config, "kv_lora_rank")
    for layer, kv_heads in enumerate(per_layer(config, "num_key_value_heads", heads)):
        if kv_heads != heads:
            raise ConfigError(
                f"layer {layer}: num_key_value_heads {kv_heads!r} is not num_attention_heads {heads}: every head has "
                "keys and values of its own, from the latent",
                "num_key_value_heads",
            )
    rotated, others = required(config, "qk_rope_head_dim"), required(config, "qk_nope_head_dim")
    q_rank = None if uniform(config, "q_lora_rank") is None else required(config, "q_lora_rank")
    mla = MLASpec(head_dim=rotated + others, v_head_dim=required(config, "v_head_dim"), q_rank=q_rank)
    return tuple(
        AttentionSpec(
            layer=layer,
            num_heads=heads,
            num_kv_heads=1,
            head_dim=rotated + rank,
            v_head_dim=rank,
            scale=mla.head_dim**-0.5 * rope.logit_factor,
            rotary_dim=rotated,
            rope=rope,
            mla=mla,
        )
        for layer, rope in enumerate(rope_specs(config))
    )


FAMILY = Family(model_spec=model_spec, decoder=DeepseekDecoder)
V3_FAMILY = Family(model_spec=v3_model_spec, decoder=DeepseekDecoder, names=v3_names)
