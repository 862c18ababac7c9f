"""ForwardContext: what a model's layers need besides hidden states. Passed as an argument, never looked up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property

from headrace.attention.backend import AttentionBackend, LayerCache, StepMetadata
from headrace.cache.planes import WriteTarget, write_target


@dataclasses.dataclass(frozen=True)
class ForwardContext:
    """One forward pass. ``caches[i]`` and ``backends[i]`` belong to layer i."""

    step: StepMetadata
    caches: Sequence[LayerCache]
    backends: Sequence[AttentionBackend]

    @cached_property
    def write_targets(self) -> tuple[WriteTarget, ...]:
        """Per cache group, where this step's KV goes."""
        return tuple(write_target(slots) for slots in self.step.slot_mapping)
