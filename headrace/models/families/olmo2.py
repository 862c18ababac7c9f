"""OLMo 2: q and k are normed over all heads together, and norms stand behind attention and MLP, before the residual sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import nn

from headrace.attention.context import ForwardContext
from headrace.kernels.linear.fp8_reference import Activations
from headrace.layers.norm import RMSNorm, ShardedRMSNorm, norm_together
from headrace.model_spec import AttentionSpec, ModelSpec
from headrace.models.decoder import Decoder, DecoderAttention, DecoderLayer
from headrace.models.family import Family
from headrace.models.hf_config import HFConfig, attention_biases, attention_specs, decoder_spec, dense_specs

ARCHITECTURE = "Olmo2ForCausalLM"


class Olmo2Attention(DecoderAttention):
    def __init__(self, model: ModelSpec, spec: AttentionSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(dataclasses.replace(model, qk_norm=False), spec, dtype, device)
        whole, ranks = model.whole.layers[spec.layer], 1 if model.shard is None else model.shard.size
        widths = {"q_norm": (spec.q_size, whole.q_size), "k_norm": (spec.k_size, whole.k_size)}
        for name, (width, of) in widths.items():
            norm = ShardedRMSNorm(width, model.norm_eps, of=of, ranks=ranks, dtype=dtype, device=device)
            setattr(self, name, norm)

    def forward(self, x: Activations, cos_sin: torch.Tensor | None, ctx: ForwardContext) -> torch.Tensor:
        spec, norms = self.spec, (self.q_norm, self.k_norm)
        q, k, v = self.qkv_proj(x).split((spec.q_size, spec.k_size, spec.v_size), dim=1)
        q, k = norm_together(norms, (q, k))  # type: ignore[arg-type]
        return self.o_proj(self.attention.forward_qkv(torch.cat((q, k, v), dim=1), ctx, cos_sin))  # type: ignore[no-any-return]


class Olmo2Layer(DecoderLayer):
    """The layer returns its MLP's output, and the next layer norms it: so ranks sum it once, where the stream is needed."""

    attention_class = Olmo2Attention

    def __init__(self, model: ModelSpec, index: int, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(model, index, dtype, device)
        del self.input_layernorm
        self.post_feedforward_layernorm = self.norm_class(model.hidden_size, model.norm_eps, dtype=dtype, device=device)
        self._before: tuple[Olmo2Layer, ...] = ()
        """The previous layer. In a tuple it is not a submodule of this one."""

    def follow(self, before: Olmo2Layer) -> None:
        """Makes ``forward`` take the results of ``before``."""
        self._before = (before,)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, cos_sin: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        stream = x if residual is None else self._before[0].stream(x, residual)
        attended = self.group.all_reduce(self.self_attn(stream, cos_sin, ctx))
        stream = stream + self.post_attention_layernorm(attended)
        return self.run_mlp(stream, ctx), stream

    def norm_readers(self) -> Iterator[tuple[RMSNorm, nn.Module]]:
        return iter(())

    def stream(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + self.post_feedforward_layernorm(self.group.all_reduce(x))  # type: ignore[no-any-return]


class Olmo2Decoder(Decoder):
    layer_class = Olmo2Layer

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(spec, dtype, device)
        layers = [layer for layer in self.layers if isinstance(layer, Olmo2Layer)]
        for before, layer in pairwise(layers):
            layer.follow(before)

    def last_norm(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        last = self.layers[-1]
        return self.norm(x if residual is None else last.stream(x, residual))  # type: ignore[no-any-return, operator]


def model_spec(config: HFConfig) -> ModelSpec:
    layers = attention_specs(config)
    return decoder_spec(config, ARCHITECTURE, layers, dense_specs(config), qk_norm=True, **attention_biases(config))


FAMILY = Family(model_spec=model_spec, decoder=Olmo2Decoder)
