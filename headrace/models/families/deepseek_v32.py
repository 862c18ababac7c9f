"""DeepSeek V3.2 and GLM-MoE-DSA: V3 whose layers attend to the tokens that a lightning indexer chooses.

GLM's index heads are rotated in interleaved pairs, and some of its layers take the choice of an earlier one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from headrace.attention.context import ForwardContext
from headrace.errors import ConfigError, ContradictionError
from headrace.kernels.linear.fp8_reference import Activations, Fp8Rows
from headrace.layers.indexer import LightningIndexer
from headrace.layers.linear import Linear
from headrace.layers.norm import RMSNorm
from headrace.model_spec import AttentionSpec, IndexerSpec, ModelSpec
from headrace.model_spec.projection import halves, of_heads
from headrace.models.decoder import Decoder
from headrace.models.families.deepseek_v2 import DeepseekLayer, DeepseekSpec, MLASelfAttention, mla_specs, v3_names
from headrace.models.family import Family
from headrace.models.hf_config import HFConfig, attention_biases, decoder_spec, per_layer, required, uniform, whole
from headrace.models.moe_config import grouped_mixture, mixed_specs, must_be, typed_specs
from headrace.models.names import decoder_names
from headrace.weights.names import NameTable, StoredLayout

V32 = "DeepseekV32ForCausalLM"
GLM = "GlmMoeDsaForCausalLM"
_INDEX_EPS = 1e-6
"""Epsilon of the norm of index keys, in every model."""


class IndexedMLA(MLASelfAttention):
    """Latent attention whose indexer, if the layer has one of its own, reads the compressed queries."""

    paired_index = False
    """Checkpoints have interleaved pairs of rotated channels in index heads."""

    def __init__(self, model: ModelSpec, spec: AttentionSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(model, spec, dtype, device)
        self.indexer: LightningIndexer | None = None
        if spec.indexer is None or spec.indexer.source is not None:
            return
        self.indexer = LightningIndexer(model.hidden_size, spec, _INDEX_EPS, dtype=dtype, device=device)
        if self.paired_index:
            order = index_rows(spec, spec.indexer)
            self.indexer.wq_b.stored_rows = {"wq_b": partial(of_heads, spec.indexer.num_heads, order)}
            self.indexer.wk.stored_rows = {"wk": lambda: order}

    def readers(self) -> tuple[Linear, ...]:
        """No layers where an indexer reads the input in floats."""
        return super().readers() if self.indexer is None else ()

    def norm_readers(self) -> Iterator[tuple[RMSNorm, nn.Module]]:
        """Gives norms with the only module that reads each of them."""
        return super().norm_readers() if self.indexer is None else iter(())

    def _index(self, x: Activations, latent: Activations, cos_sin: torch.Tensor | None, ctx: ForwardContext) -> None:
        if self.indexer is None:
            return
        if isinstance(x, Fp8Rows) or isinstance(latent, Fp8Rows):
            raise TypeError("an indexer reads floats")
        self.indexer(x, latent, cos_sin, ctx)


class PairedIndexedMLA(IndexedMLA):
    paired_index = True


class IndexedLayer(DeepseekLayer):
    attention_class = IndexedMLA


class PairedIndexedLayer(DeepseekLayer):
    attention_class = PairedIndexedMLA


class V32Decoder(Decoder):
    layer_class = IndexedLayer


class GlmDecoder(Decoder):
    layer_class = PairedIndexedLayer


def index_rows(spec: AttentionSpec, indexer: IndexerSpec) -> tuple[int, ...]:
    """Returns, for each channel of an index head that is rotated in halves, its channel where pairs are rotated."""
    return (*halves(spec.rotary_dim), *range(spec.rotary_dim, indexer.head_dim))


def v32_spec(config: HFConfig) -> ModelSpec:
    return indexed_spec(config, V32, ["full"] * required(config, "num_hidden_layers"))


def glm_spec(config: HFConfig) -> ModelSpec:
    return indexed_spec(config, GLM, per_layer(config, "indexer_types", "full"))


def indexed_spec(
    config: HFConfig, architecture: str, kinds: Sequence[str], *, kind: type[ModelSpec] = DeepseekSpec, **facts: Any
) -> ModelSpec:
    """Reads the fields that models with a lightning indexer share.

    Args:
        kinds: of each layer, ``full`` where it has an indexer, and ``shared`` where it takes the choice of the one before.
        kind, facts: as for ``decoder_spec``.
    """
    must_be(config, "scoring_func", "sigmoid")
    must_be(config, "topk_method", "noaux_tc")
    must_be(config, "moe_layer_freq", 1)
    moe = grouped_mixture(config)
    dense = whole(config, "first_k_dense_replace", 0)
    layers = with_indexers(config, mla_specs(config), kinds)
    typed = any(kind is not None for kind in per_layer(config, "mlp_layer_types"))
    mlps = typed_specs(config, moe) if typed else mixed_specs(config, moe, lambda layer: layer >= dense)
    return decoder_spec(config, architecture, layers, mlps, kind=kind, **attention_biases(config), **facts)


def with_indexers(config: HFConfig, layers: Sequence[AttentionSpec], kinds: Sequence[str]) -> tuple[AttentionSpec, ...]:
    """Returns the layers with their indexers.

    Raises:
        ConfigError: a layer's kind is unknown, or the indexer has no queries; names the layer or the field.
        ContradictionError: the first layer takes the choice of one before it, or the numbers do not fit.
    """
    width, rotated = required(config, "index_head_dim"), required(config, "qk_rope_head_dim")
    if uniform(config, "q_lora_rank") is None:
        raise ConfigError("config: the indexer reads compressed queries, and q_lora_rank is missing", "q_lora_rank")
    if width < rotated or width % 2:
        raise ContradictionError(
            f"config: index_head_dim {width} must be even and at least qk_rope_head_dim {rotated}", "index_head_dim"
        )
    own = IndexerSpec(
        top_k=required(config, "index_topk"), num_heads=required(config, "index_n_heads"), head_dim=width, weighted=True
    )
    made: list[AttentionSpec] = []
    source: int | None = None
    for spec, kind in zip(layers, kinds, strict=True):
        if kind not in ("full", "shared"):
            raise ConfigError(f"layer {spec.layer}: indexer_types {kind!r} is neither full nor shared", "indexer_types")
        if kind == "full":
            source = spec.layer
        elif source is None:
            raise ContradictionError(f"layer {spec.layer}: there is no indexer before it to share", "indexer_types")
        shared = None if source == spec.layer else source
        made.append(dataclasses.replace(spec, indexer=dataclasses.replace(own, source=shared)))
    return tuple(made)


def glm_names(model: Decoder) -> NameTable:
    """Ignores the extra layer for multi-token prediction; the norm of index keys has their order of channels."""
    spec = model.spec.layers[0]
    layout = None if spec.indexer is None else StoredLayout(partial(index_rows, spec, spec.indexer))
    layouts = {} if layout is None else {f".indexer.k_norm.{kind}": layout for kind in ("weight", "bias")}
    return decoder_names(model, layouts=layouts, ignorable=(rf"model\.layers\.{model.spec.num_layers}\..*",))


FAMILY = Family(model_spec=v32_spec, decoder=V32Decoder, names=v3_names)
GLM_FAMILY = Family(model_spec=glm_spec, decoder=GlmDecoder, names=glm_names)
