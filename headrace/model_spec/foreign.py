"""ForeignSpec: the facts of a model that another library builds."""

from __future__ import annotations

import dataclasses

from headrace.model_spec.model import ModelFacts, ModelSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForeignSpec(ModelFacts):
    """A model of which headrace knows its attention; the rest is the library's."""

    num_tokens: int
    """Of the vocabulary; ``vocab_size`` counts the columns of the logits, some of which may be padding."""
    num_weights: int
    """Numbers in all its weights, tied ones once."""
    no_graphs: str = ""
    """Why no step may be captured as a CUDA graph; empty: capture is tried."""


AnySpec = ModelSpec | ForeignSpec
"""A model that the engine can run."""
