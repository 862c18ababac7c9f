"""ModelSpec and ForeignSpec: the facts of a model that the engine needs, free of any library's config class."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property

from headrace.errors import ConfigError, ContradictionError
from headrace.model_spec.attention import AttentionSpec
from headrace.model_spec.elastic import ElasticSpec
from headrace.model_spec.mlp import MlpSpec
from headrace.model_spec.states import StateSpec
from headrace.model_spec.vision import VisionSpec


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """The mixers of one layer of a model: attention, a state layer, both or neither, as indices into their specs."""

    attention: int | None = None
    state: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts about a model that the engine needs, whoever builds the model. ``layers[i].layer == i``, ``states[i].index == i``.

    Raises:
        ConfigError: a layer would read KV that another has given up.
        ContradictionError: a layer reads KV that is not there, or not of its geometry; or ``blocks`` does not name every
            mixer once. All name the layer.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[AttentionSpec, ...]
    """The attention layers."""
    max_position: int
    """Longest context the model was made for."""
    dtype: str = "float32"
    """The dtype the checkpoint says it was saved in."""
    vision: VisionSpec | None = None
    """None: the model reads text alone."""
    elastic: ElasticSpec | None = None
    """None: the model has no router."""
    states: tuple[StateSpec, ...] = ()
    """The state layers."""
    mixers: tuple[BlockSpec, ...] = ()
    """Per layer of the model, its mixers. Empty: every layer has attention alone."""

    def __post_init__(self) -> None:
        named = (
            ("attention", [block.attention for block in self.blocks], len(self.layers)),
            ("state", [block.state for block in self.blocks], len(self.states)),
        )
        for kind, indices, count in named:
            if [index for index in indices if index is not None] != list(range(count)):
                raise ContradictionError(f"the model's layers have {kind} mixers {indices}, of {count}", "mixers")
        for layer in self.layers:
            if layer.kv_source is not None:
                _check_source(layer, layer.kv_source, self.layers)

    @property
    def sectioned_rope(self) -> bool:
        """Whether a token has several rotary positions."""
        return any(layer.rope is not None and layer.rope.sections for layer in self.layers)

    @cached_property
    def blocks(self) -> tuple[BlockSpec, ...]:
        """The mixers of each layer of the model."""
        return self.mixers or tuple(BlockSpec(attention=index) for index in range(len(self.layers)))

    @property
    def num_layers(self) -> int:
        """Layers of the model, whatever their mixers."""
        return len(self.blocks)


def _check_source(spec: AttentionSpec, index: int, layers: Sequence[AttentionSpec]) -> None:
    """Checks that a layer can read the KV of layer ``index``."""
    where = f"layer {spec.layer}: kv_source {index}"
    if not 0 <= index < spec.layer:
        raise ContradictionError(f"{where} is not an earlier layer", "kv_source")
    source = layers[index]
    if source.kv_source is not None:
        raise ContradictionError(f"{where} keeps no KV of its own", "kv_source")
    if source.mla is not None:
        raise ConfigError(f"{where} keeps compressed KV, which another layer cannot read", "kv_source")
    for field in ("num_kv_heads", "head_dim", "v_head_dim"):
        if getattr(source, field) != getattr(spec, field):
            raise ContradictionError(f"{where} has {field} {getattr(source, field)}, not {getattr(spec, field)}", "kv_source")
    if source.window is not None and (
        spec.window is None or spec.window > source.window or (source.chunked and not spec.chunked)
    ):
        raise ConfigError(f"{where} keeps a window of {source.window} tokens, which is too few", "kv_source")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """The part of a model that a ``ModelSpec`` describes for one tensor-parallel rank.

    The spec's layers and MLPs are the rank's own; ``hidden_size`` and ``vocab_size`` are the whole model's.
    """

    rank: int
    size: int
    """Ranks that there are."""
    whole: ModelSpec
    vocab_start: int
    """First row of the output head that the rank holds."""
    vocab_rows: int
    """Rows that it holds, as many as any rank; those at and beyond ``vocab_size`` are padding."""
    whole_experts: bool
    """Ranks were asked to hold whole experts."""
    cut_embedding: bool
    """The rank holds these rows of the token embedding too; False: all of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec(ModelFacts):
    """A decoder-only model: what every family has. One with facts of its own adds them in a subclass.

    ``mlps[i]`` belongs to layer i of the model, whatever its mixers.
    """

    mlps: tuple[MlpSpec, ...]
    norm_eps: float
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """q, k and v have a bias."""
    output_bias: bool = False
    """o_proj has a bias."""
    qk_norm: bool = False
    """q and k are RMS-normed before they are rotated: a head, or as the family says."""
    num_classes: int = 0
    """Outputs of the classification head; 0: the model has none."""
    logit_soft_cap: float | None = None
    """logits = logit_soft_cap * tanh(logits / logit_soft_cap), of the head."""
    shard: Shard | None = None
    """The part of a tensor-parallel rank that this describes; None: the whole model."""

    @property
    def head_rows(self) -> int:
        """Outputs of the output head that is built."""
        return self.vocab_size if self.shard is None else self.shard.vocab_rows

    @property
    def whole(self) -> ModelSpec:
        """The whole model that this is a part of, or itself."""
        return self if self.shard is None else self.shard.whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForeignSpec(ModelFacts):
    """A model of which headrace knows its attention; the rest is the library's."""

    num_tokens: int
    """Tokens of the vocabulary; ``vocab_size`` counts the columns of the logits, some of which may be padding."""
    num_weights: int
    """Numbers in all its weights, tied ones once."""
    matrices: tuple[tuple[int, int], ...] = ()
    """(outputs, inputs) of the matrices that headrace multiplies, and may hold in another number format; the library multiplies
    the others."""
    no_graphs: str = ""
    """Reason for which no step may be captured as a CUDA graph; empty: capture is tried."""


AnySpec = ModelSpec | ForeignSpec
"""A model that the engine can run."""
