"""ModelSpec: the facts of a decoder that the rest of the engine needs, free of any library's config class."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from headrace.spec.attention import AttentionSpec


@dataclasses.dataclass(frozen=True)
class Span:
    """Tokens ``[start, end)`` of a prompt that chunks never cut."""

    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: the base and, where the model scales it, the parameters under their Hugging Face names."""

    theta: float
    kind: str = "default"
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only model. ``layers[i].layer == i``."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[AttentionSpec, ...]
    rope: RopeSpec
    norm_eps: float
    max_position: int
    """Longest context the model was made for."""
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """q, k and v have a bias."""
    output_bias: bool = False
    """o_proj has a bias."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """q and k are RMS-normed a head before they are rotated."""
    dtype: str = "float32"
    """The dtype the checkpoint says it was saved in."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)
