"""EngineStats: a snapshot of the engine's counters and gauges, cheap enough to send with every step."""

from __future__ import annotations

from typing import Any

import msgspec


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters rise from the engine's start; gauges are as of now."""

    step: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_preemptions: int = 0
    kv_blocks_used: int = 0
    """Blocks owned by sequences, over all groups; blocks that only the prefix cache holds count as free."""
    kv_blocks_total: int = 0
    kv_blocks_moved: int = 0
    """Blocks copied to another place so that another cache group could have theirs."""
    prefix_query_tokens: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of requests that have started."""
    computed_prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = {}
    """finish reason -> sequences."""
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    host_seconds: float = 0.0
    """Time in the engine's step outside the runner's forward pass and sampler."""
    replayed_steps: int = 0
    """Steps whose model ran as a CUDA graph."""
    eager_steps: int = 0
    """Steps whose model ran kernel by kernel."""
    padding_tokens: int = 0
    """Tokens of nobody's that were computed, because a graph has room for more than a step had."""

    @property
    def kv_usage(self) -> float:
        return self.kv_blocks_used / self.kv_blocks_total if self.kv_blocks_total else 0.0

    def since(self, before: EngineStats) -> EngineStats:
        """The same gauges, and counters that start at ``before``."""
        counters: dict[str, Any] = {name: getattr(self, name) - getattr(before, name) for name in _COUNTERS}
        finished = {reason: count - before.finished.get(reason, 0) for reason, count in self.finished.items()}
        counters["finished"] = {reason: count for reason, count in finished.items() if count}
        return msgspec.structs.replace(self, **counters)


_GAUGES = frozenset({"num_running", "num_waiting", "kv_blocks_used", "kv_blocks_total"})
_COUNTERS = tuple(name for name in EngineStats.__struct_fields__ if name not in _GAUGES and name != "finished")
