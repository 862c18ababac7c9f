"""EngineStats: a snapshot of the engine's counters and gauges."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

MetricsCompat = Literal["vllm"]
"""Engines whose names the metrics may have beside their own."""


class EngineStats(msgspec.Struct, kw_only=True):
    """Counters rise from the engine's start; gauges are current values. The descriptions are those of the metrics."""

    step: int = 0
    """Engine steps planned, counted when a step is planned."""
    num_running: int = 0
    """Sequences that have a slot, at the engine's last report."""
    num_waiting: int = 0
    """Sequences without a slot, new or preempted, at the engine's last report."""
    num_preemptions: int = 0
    """Preemptions: a running sequence lost its KV blocks and is computed again later."""
    kv_blocks_used: int = 0
    """KV blocks owned by sequences, over all cache groups. Blocks that only the prefix cache holds count as free."""
    kv_blocks_total: int = 0
    """KV blocks in total, over all cache groups."""
    kv_blocks_moved: int = 0
    """KV blocks copied to another place so that another cache group can use theirs."""
    prefix_query_tokens: int = 0
    """Prompt tokens looked up in the prefix cache, counted when the request first runs."""
    prefix_hit_tokens: int = 0
    """Prompt tokens found in the prefix cache, counted when the request first runs."""
    prompt_tokens: int = 0
    """Prompt tokens of requests, counted once when the request first runs."""
    computed_prompt_tokens: int = 0
    """Prompt tokens computed by the model, not found in the prefix cache, counted when their step is collected."""
    generation_tokens: int = 0
    """Output tokens generated, over all samples, counted when their step is collected."""
    finished: dict[str, int] = {}
    """Finished sequences, by finish reason."""
    grammar_requests: dict[str, int] = {}
    """Requests with a constraint, by its kind and by what became of it: compiled, cached (compiled before), failed."""
    grammar_compile_seconds: float = 0.0
    """Seconds spent compiling constraints, beside the engine's steps."""
    grammar_fill_seconds: float = 0.0
    """Seconds spent computing token masks of constraints."""
    grammar_wait_seconds: float = 0.0
    """Seconds between the result of a step and the launch of the sampling that waited for it to compute token masks."""
    parse_fallbacks: dict[str, int] = {}
    """Times an answer broke its format and the text became content, by format, counted when the sequence ends."""
    forward_seconds: float = 0.0
    """Seconds spent in the model's forward pass, added when a step is collected."""
    sample_seconds: float = 0.0
    """Seconds spent in the sampler, added when a step is collected."""
    host_seconds: float = 0.0
    """Seconds of steps spent on the host, outside the forward pass and the sampler."""
    replayed_steps: int = 0
    """Steps whose forward pass replayed a CUDA graph."""
    eager_steps: int = 0
    """Steps whose forward pass launched its kernels one by one."""
    padding_tokens: int = 0
    """Padding tokens computed to fill CUDA graphs."""
    graphs_captured: int = 0
    """CUDA graphs captured so far; the others are captured while the engine is idle, or when a step first needs them."""
    graphs_total: int = 0
    """CUDA graphs that the engine captures in total."""

    @property
    def kv_usage(self) -> float:
        return self.kv_blocks_used / self.kv_blocks_total if self.kv_blocks_total else 0.0

    def since(self, before: EngineStats) -> EngineStats:
        """The same gauges, and counters relative to ``before``."""
        counters: dict[str, Any] = {name: getattr(self, name) - getattr(before, name) for name in COUNTERS}
        for name in LABELLED_COUNTERS:
            old = getattr(before, name)
            new = {key: count - old.get(key, 0) for key, count in getattr(self, name).items()}
            counters[name] = {key: count for key, count in new.items() if count}
        return msgspec.structs.replace(self, **counters)

    def counters(self) -> EngineStats:
        """The same counters, and gauges of 0."""
        return msgspec.structs.replace(self, **dict.fromkeys(GAUGES, 0))

    def plus(self, other: EngineStats) -> EngineStats:
        """The sums of two engines' counters and gauges."""
        sums: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in (*GAUGES, *COUNTERS)}
        for name in LABELLED_COUNTERS:
            mine, others = getattr(self, name), getattr(other, name)
            sums[name] = {key: mine.get(key, 0) + others.get(key, 0) for key in {**mine, **others}}
        return EngineStats(**sums)


GAUGES = {
    "num_running": "headrace_requests_running",
    "num_waiting": "headrace_requests_waiting",
    "kv_blocks_used": "headrace_kv_blocks_used",
    "kv_blocks_total": "headrace_kv_blocks",
    "graphs_captured": "headrace_cuda_graphs_captured",
    "graphs_total": "headrace_cuda_graphs",
}
"""Field -> name of its Prometheus metric."""
COUNTERS = {
    "step": "headrace_engine_steps",
    "num_preemptions": "headrace_preemptions",
    "kv_blocks_moved": "headrace_kv_blocks_moved",
    "prefix_query_tokens": "headrace_prefix_cache_query_tokens",
    "prefix_hit_tokens": "headrace_prefix_cache_hit_tokens",
    "prompt_tokens": "headrace_prompt_tokens",
    "computed_prompt_tokens": "headrace_computed_prompt_tokens",
    "generation_tokens": "headrace_generation_tokens",
    "forward_seconds": "headrace_engine_forward_seconds",
    "sample_seconds": "headrace_engine_sample_seconds",
    "replayed_steps": "headrace_engine_replayed_steps",
    "eager_steps": "headrace_engine_eager_steps",
    "padding_tokens": "headrace_padding_tokens",
    "host_seconds": "headrace_engine_host_seconds",
    "grammar_compile_seconds": "headrace_grammar_compile_seconds",
    "grammar_fill_seconds": "headrace_grammar_fill_seconds",
    "grammar_wait_seconds": "headrace_grammar_wait_seconds",
}
LABELLED_COUNTERS = {
    "finished": ("headrace_sequences_finished", ["reason"]),
    "grammar_requests": ("headrace_grammar_requests", ["kind", "outcome"]),
    "parse_fallbacks": ("headrace_parse_fallbacks", ["format"]),
}
"""Field -> name of its metric and its labels. A key of the field holds their values, a blank between them."""
