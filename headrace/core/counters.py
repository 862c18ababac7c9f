"""Counters that rise from the engine's start."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class Counters:
    """The scheduler's part of EngineStats."""

    num_preemptions: int = 0
    kv_blocks_moved: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    generation_tokens: int = 0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    replayed_steps: int = 0
    eager_steps: int = 0
    padding_tokens: int = 0
    finished: dict[str, int] = dataclasses.field(default_factory=dict)

    def launched(self, replayed: bool | None, padding_tokens: int) -> None:
        """A step has been launched so (``StepResult``)."""
        self.replayed_steps += replayed is True
        self.eager_steps += replayed is False
        self.padding_tokens += padding_tokens
