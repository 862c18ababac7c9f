"""The text part of dots3 note: DeepSeek V3's layers, of which some have an indexer and the others a window, with heads and
latents of other widths. Latents are scaled behind their norms, the rotated channels of keys are normed, and each head's output
is gated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from headrace.attention.context import ForwardContext
from headrace.errors import ConfigError
from headrace.kernels.linear.fp8_reference import Activations
from headrace.layers.linear import Linear
from headrace.layers.norm import RMSNorm
from headrace.model_spec import AttentionSpec, DenseSpec, ModelSpec
from headrace.model_spec.projection import halves
from headrace.models.decoder import Decoder, DecoderLayer
from headrace.models.families.deepseek_v2 import DeepseekSpec, mla_specs
from headrace.models.families.deepseek_v32 import PairedIndexedMLA, index_rows, with_indexers
from headrace.models.families.gemma import with_multimodal_names
from headrace.models.family import Family
from headrace.models.hf_config import HFConfig, attention_biases, decoder_spec, per_layer, required, text_part
from headrace.models.moe_config import activation, grouped_mixture, typed_specs
from headrace.models.names import decoder_names
from headrace.weights.names import NameTable, StoredLayout

ARCHITECTURE = "Dots3NoteForCausalLM"
_INDEXED, _WINDOW = "indexed_attention", "sliding_attention"
_BESIDE = (r"(?:model\.)?(?:vision|audio)_\w+\..*", r"(?:model\.)?mtp\..*")
"""Names of encoders of pictures and sound, and of the layer for multi-token prediction."""


class ScaledRMSNorm(RMSNorm):
    """A norm whose result is multiplied by a factor."""

    plain = False
    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor  # type: ignore[operator]


class DotsMLA(PairedIndexedMLA):
    """Latent attention with an indexer or a window."""

    def __init__(self, model: ModelSpec, spec: AttentionSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(model, spec, dtype, device)
        self.q_a_layernorm = _scaled(model, self.q_b_proj.in_features, dtype, device)
        self.kv_a_layernorm = _scaled(model, spec.v_head_dim, dtype, device)
        self.k_rope_only_layernorm = RMSNorm(spec.rotary_dim, model.norm_eps, dtype=dtype, device=device)
        self.g_proj = Linear(model.hidden_size, spec.num_heads, dtype=dtype, device=device)

    def readers(self) -> tuple[Linear, ...]:
        """The layers that multiply the input; none where an indexer reads it in floats."""
        return (self.a_proj, self.g_proj) if self.indexer is None else ()

    def norm_readers(self) -> Iterator[tuple[RMSNorm, nn.Module]]:
        return iter(())

    def forward(self, x: Activations, cos_sin: torch.Tensor | None, ctx: ForwardContext) -> torch.Tensor:
        """``[T, hidden] -> [T, hidden]``"""
        spec, projected = self.spec, self.a_proj(x)
        rotated, up = spec.rotary_dim, self.kv_b_proj.weight
        latent = projected[:, projected.shape[1] - spec.row_width :]
        latent = torch.cat((self.k_rope_only_layernorm(latent[:, :rotated]), latent[:, rotated:]), dim=1)
        q = self._queries(x, projected, cos_sin, ctx).view(len(projected), spec.num_heads, self.head_dim)
        out = self.attention.forward_qkv(q, latent, self.kv_a_layernorm, up, ctx, cos_sin)
        gated = out.view(len(out), spec.num_heads, -1) * torch.sigmoid(self.g_proj(x)).unsqueeze(2)
        return self.o_proj(gated.view(out.shape))  # type: ignore[no-any-return]


def _scaled(model: ModelSpec, width: int, dtype: torch.dtype, device: str | torch.device) -> ScaledRMSNorm:
    norm = ScaledRMSNorm(width, model.norm_eps, dtype=dtype, device=device)
    norm.factor = (model.hidden_size / width) ** 0.5
    return norm


class DotsLayer(DecoderLayer):
    attention_class = DotsMLA


class DotsDecoder(Decoder):
    layer_class = DotsLayer


def names(model: Decoder) -> NameTable:
    """Norms of rotated channels have their order."""
    layouts = {}
    for spec in model.spec.layers:
        here = f"layers.{spec.layer}.self_attn"
        layouts[f"{here}.k_rope_only_layernorm.weight"] = StoredLayout(partial(halves, spec.rotary_dim))
        if spec.indexer is not None:
            rows = StoredLayout(partial(index_rows, spec, spec.indexer))
            layouts |= {f"{here}.indexer.k_norm.{kind}": rows for kind in ("weight", "bias")}
    ignorable = (rf"model\.layers\.{model.spec.num_layers}\..*", *_BESIDE)
    return with_multimodal_names(decoder_names(model, layouts=layouts, ignorable=ignorable))


def model_spec(config: HFConfig) -> ModelSpec:
    config = text_part(config)
    kinds = per_layer(config, "layer_types")
    windows, every = per_layer(config, "sliding_window"), list(getattr(config, "per_layer_config", ())) or [config] * len(kinds)
    layers = []
    for layer, (kind, one) in enumerate(zip(kinds, every, strict=True)):
        spec = mla_specs(one)[layer]
        if kind == _INDEXED:
            (spec,) = with_indexers(one, [spec], ["full"])
        elif kind == _WINDOW:
            spec = dataclasses.replace(spec, window=windows[layer])
        elif kind != "full_attention":
            raise ConfigError(f"layer {layer}: layer_types {kind!r} is not supported", "layer_types")
        layers.append(spec)
    shared = required(config, "n_shared_experts") * required(config, "shared_experts_intermediate_size")
    moe = dataclasses.replace(grouped_mixture(config, shared=False), shared=DenseSpec(shared, activation(config)))
    return decoder_spec(
        config, ARCHITECTURE, tuple(layers), typed_specs(config, moe), kind=DeepseekSpec, **attention_biases(config)
    )


FAMILY = Family(model_spec=model_spec, decoder=DotsDecoder, names=names)
