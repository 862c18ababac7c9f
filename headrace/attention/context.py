"""ForwardContext: what a model's layers need besides hidden states. Passed as an argument, never looked up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from headrace.attention.backend import AttentionBackend, LayerCache, StepMetadata


@dataclasses.dataclass(frozen=True)
class ForwardContext:
    """One forward pass. ``caches[i]`` and ``backends[i]`` belong to layer i."""

    step: StepMetadata
    caches: Sequence[LayerCache]
    backends: Sequence[AttentionBackend]
