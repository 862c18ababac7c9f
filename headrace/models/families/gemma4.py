"""Gemma 4, its text part: heads of another width in full layers, values without weights in their norm, layers at the end
that read an earlier layer's KV, an embedding of each token for each layer, and experts beside the MLP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import nn

from headrace.attention.context import ForwardContext
from headrace.errors import ConfigError
from headrace.kernels.activation import ACTIVATIONS
from headrace.kernels.linear.fp8_reference import Activations
from headrace.layers.embedding import Embedding
from headrace.layers.linear import Linear
from headrace.layers.mlp import GatedMLP
from headrace.layers.moe import ExpertRouter, Experts
from headrace.layers.norm import RMSNorm, UnitRMSNorm
from headrace.model_spec import AttentionSpec, MlpSpec, ModelSpec, MoeSpec
from headrace.models.decoder import Decoder, DecoderAttention
from headrace.models.families.gemma import NON_TEXT, GemmaDecoder, GemmaLayer, rounded, with_multimodal_names
from headrace.models.family import Family
from headrace.models.hf_config import (
    HFConfig,
    attention_biases,
    attention_specs,
    decoder_spec,
    dense_specs,
    layer_types,
    required,
    text_part,
    uniform,
    whole,
    windows_by_type,
)
from headrace.models.interface import ModelInputs
from headrace.models.names import decoder_names
from headrace.weights.names import NameTable

ARCHITECTURE = "Gemma4ForCausalLM"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Spec(ModelSpec):
    token_width: int
    """Width of the per-layer token embeddings; 0: none."""
    token_vocab_size: int
    token_act: str
    """The activation of the gate, by Hugging Face's name."""


class Gemma4Attention(DecoderAttention):
    """K and V are normed, V without a weight."""

    def __init__(self, model: ModelSpec, spec: AttentionSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(model, spec, dtype, device)
        self.v_norm = UnitRMSNorm(spec.v_head_dim, model.norm_eps, dtype=dtype, device=device)


class Gemma4Router(nn.Module):
    """Chooses a token's experts by the direction of its stream, in float32; each expert's weight has a factor of its own."""

    def __init__(self, hidden_size: int, spec: MoeSpec, eps: float, device: str | torch.device) -> None:
        super().__init__()
        self.norm = UnitRMSNorm(hidden_size, eps, dtype=torch.float32, device=device)
        self.proj = ExpertRouter(hidden_size, spec, device=device)
        self.scale = nn.Parameter(torch.empty(hidden_size, dtype=torch.float32, device=device), requires_grad=False)
        self.per_expert_scale = nn.Parameter(
            torch.empty(spec.num_experts, dtype=torch.float32, device=device), requires_grad=False
        )

    def forward(self, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T, hidden]`` -> experts ``[T, top_k]`` int32, weights ``[T, top_k]`` float32."""
        scaled = self.norm(stream.float()) * self.scale * stream.shape[1] ** -0.5
        experts, weights = self.proj(scaled)
        return experts, weights * self.per_expert_scale[experts]


class Gemma4Layer(GemmaLayer):
    attention_class = Gemma4Attention

    def __init__(self, model: ModelSpec, index: int, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(model, index, dtype, device)
        model = cast(Gemma4Spec, model)
        self.router: Gemma4Router | None = None
        mixture = model.mlps[index]
        if isinstance(mixture, MoeSpec):
            norm = partial(self.norm_class, model.hidden_size, model.norm_eps, dtype=dtype, device=device)
            self.router = Gemma4Router(model.hidden_size, mixture, model.norm_eps, device)
            self.experts = Experts(model.hidden_size, mixture, dtype=dtype, device=device)
            self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = norm(), norm()
            self.pre_feedforward_layernorm_2 = norm()
        self.layer_scalar = nn.Parameter(torch.empty(1, dtype=dtype, device=device), requires_grad=False)
        if model.token_width:
            self.act_mul = ACTIVATIONS[model.token_act]
            self.per_layer_input_gate = Linear(model.hidden_size, model.token_width, dtype=dtype, device=device)
            self.per_layer_projection = Linear(model.token_width, model.hidden_size, dtype=dtype, device=device)
            self.post_per_layer_input_norm = self.norm_class(model.hidden_size, model.norm_eps, dtype=dtype, device=device)

    def build_mlp(self, model: ModelSpec, index: int, dtype: torch.dtype, device: str | torch.device) -> nn.Module:
        """Builds the dense MLP; experts run in parallel to it, with norms of their own."""
        spec = model.mlps[index]
        dense = spec.shared if isinstance(spec, MoeSpec) else spec
        if dense is None:
            raise ConfigError(f"layer {index}: experts of Gemma 4 stand beside an MLP, and there is none", "enable_moe_block")
        return GatedMLP(model.hidden_size, dense, dtype=dtype, device=device)

    def feed_forward(self, x: Activations, stream: torch.Tensor) -> torch.Tensor:
        """Returns the whole output: that of experts is normed apart."""
        dense = self.group.all_reduce(self.mlp(x))
        if self.router is None:
            return dense
        experts = self.group.all_reduce(self.experts(self.pre_feedforward_layernorm_2(stream), *self.router(stream)))
        return self.post_feedforward_layernorm_1(dense) + self.post_feedforward_layernorm_2(experts)  # type: ignore[no-any-return]

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        cos_sin: torch.Tensor | None,
        ctx: ForwardContext,
        tokens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x is the whole stream, since a scalar multiplies all of it at the end.

        Args:
            tokens: ``[T, token_width]``, what this layer has for each token; None: nothing.
        """
        x, residual = super().forward(x, residual, cos_sin, ctx)
        stream = residual + self.post_feedforward_layernorm(x)
        if tokens is not None:
            gated = self.act_mul(torch.cat((self.per_layer_input_gate(stream), tokens), dim=-1))
            stream = stream + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return stream * self.layer_scalar, None

    def stream(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return x


class Gemma4Decoder(GemmaDecoder):
    layer_class = Gemma4Layer

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(spec, dtype, device)
        spec = cast(Gemma4Spec, spec)
        self.token_width = spec.token_width
        if not spec.token_width:
            return
        width = spec.num_layers * spec.token_width
        self.embed_tokens_per_layer = Embedding(spec.token_vocab_size, width, dtype=dtype, device=device)
        self.token_scale = rounded(spec.token_width**0.5, dtype)
        self.per_layer_model_projection = Linear(spec.hidden_size, width, dtype=dtype, device=device)
        self.per_layer_projection_norm = RMSNorm(spec.token_width, spec.norm_eps, dtype=dtype, device=device)

    @torch.inference_mode()
    def forward(self, inputs: ModelInputs, ctx: ForwardContext) -> torch.Tensor:
        angles = self.rotary(inputs, ctx)
        x = inputs.embedded(self.embed)
        tokens = self._tokens(inputs.input_ids, x)
        extras = inputs.extras or {}
        for index, (layer, cos_sin, own) in enumerate(zip(self.layers, angles, tokens, strict=True)):
            x, _ = layer(x, None, cos_sin, ctx, own)
            if index in extras:
                x = x + extras[index]
        return self.last_norm(x, None)

    def _tokens(self, input_ids: torch.Tensor, x: torch.Tensor) -> Sequence[torch.Tensor | None]:
        """Returns an input of each layer, ``[T, token_width]``, or None: from the token's identity, and from its embedding."""
        count = self.spec.num_layers
        if not self.token_width:
            return [None] * count
        shape = (len(x), count, self.token_width)
        identity = self.embed_tokens_per_layer(input_ids).view(shape) * self.token_scale
        context = self.per_layer_model_projection(x) * self.spec.hidden_size**-0.5
        both = (self.per_layer_projection_norm(context.view(shape)) + identity) * 2**-0.5
        return tuple(both.unbind(dim=1))


def names(model: Decoder) -> NameTable:
    """Checkpoints have k, v and their norms of layers that read another's KV too; they are of no use."""
    readers = "|".join(str(layer.layer) for layer in model.spec.layers if layer.kv_source is not None)
    unused = [rf"model\.layers\.(?:{readers})\.self_attn\.(?:[kv]_proj|[kv]_norm)\.weight"] if readers else []
    return with_multimodal_names(decoder_names(model, ignorable=(*unused, *NON_TEXT)))


def model_spec(config: HFConfig) -> Gemma4Spec:
    config = text_part(config)
    kinds = [kind or "full_attention" for kind in layer_types(config)]
    own = len(kinds) - whole(config, "num_kv_shared_layers", 0)
    same = bool(uniform(config, "attention_k_eq_v", False))
    layers = []
    for layer in attention_specs(config, windows=windows_by_type(config), partial_rotary=1.0):
        kind = kinds[layer.layer]
        source = None if layer.layer < own else _source(layer.layer, kinds[:own], kind)
        v_from_k = same and kind == "full_attention" and source is None
        layers.append(dataclasses.replace(layer, scale=1.0, kv_source=source, v_from_k=v_from_k))
    if uniform(config, "use_bidirectional_attention") not in (None, False, "vision"):
        raise ConfigError(
            "use_bidirectional_attention: text that sees what follows it is not supported", "use_bidirectional_attention"
        )
    width = whole(config, "hidden_size_per_layer_input", 0)
    return decoder_spec(  # type: ignore[return-value]
        config,
        ARCHITECTURE,
        tuple(layers),
        _mlps(config, layers),
        reads=("final_logit_softcapping", "use_bidirectional_attention"),
        kind=Gemma4Spec,
        qk_norm=True,
        **attention_biases(config),
        logit_soft_cap=uniform(config, "final_logit_softcapping"),
        max_position=required(config, "max_position_embeddings"),
        token_width=width,
        token_vocab_size=required(config, "vocab_size_per_layer_input") if width else 0,
        token_act=uniform(config, "hidden_activation"),
    )


def _source(layer: int, own: list[str], kind: str) -> int:
    """Returns the last layer of the kind that keeps KV."""
    if kind not in own:
        raise ConfigError(f"layer {layer}: num_kv_shared_layers leaves no {kind} layer that keeps KV", "num_kv_shared_layers")
    return len(own) - 1 - own[::-1].index(kind)


def _mlps(config: HFConfig, layers: Sequence[AttentionSpec]) -> list[MlpSpec]:
    """Layers that read another's KV may have an MLP of twice the width, and all may have experts beside it."""
    wide = uniform(config, "use_double_wide_mlp", False)
    dense = [
        dataclasses.replace(mlp, intermediate_size=2 * mlp.intermediate_size) if wide and layer.kv_source is not None else mlp
        for mlp, layer in zip(dense_specs(config, act="hidden_activation"), layers, strict=True)
    ]
    if not uniform(config, "enable_moe_block", False):
        return list(dense)
    return [
        MoeSpec(
            num_experts=required(config, "num_experts"),
            top_k=required(config, "top_k_experts"),
            intermediate_size=required(config, "moe_intermediate_size"),
            act=mlp.act,
            shared=mlp,
        )
        for mlp in dense
    ]


FAMILY = Family(model_spec=model_spec, decoder=Gemma4Decoder, names=names)
