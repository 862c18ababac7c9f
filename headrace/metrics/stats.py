"""EngineStats: a snapshot of the engine's counters and gauges."""

from __future__ import annotations

import typing
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

MetricsCompat = Literal["vllm"]
"""Engines whose names the metrics may have beside their own."""


class MetricSpec(NamedTuple):
    """The Prometheus metric of a field."""

    name: str
    gauge: bool = False
    """A current value; else a counter."""
    labels: str = ""
    """Names of labels, a blank between them, as a key of the field holds their values: the last one may have blanks."""


class EngineStats(msgspec.Struct, kw_only=True):
    """Counters rise from the engine's start; gauges are current values. The descriptions are those of the metrics."""

    step: Annotated[int, MetricSpec("headrace_engine_steps")] = 0
    """Engine steps planned, counted when a step is planned."""
    num_running: Annotated[int, MetricSpec("headrace_requests_running", gauge=True)] = 0
    """Sequences that have a slot, at the engine's last report."""
    num_waiting: Annotated[int, MetricSpec("headrace_requests_waiting", gauge=True)] = 0
    """Sequences without a slot, new or preempted, at the engine's last report."""
    adapter_sequences: Annotated[
        dict[str, int], MetricSpec("headrace_adapter_sequences", gauge=True, labels="state adapter")
    ] = {}
    """Sequences with a LoRA adapter, by the adapter's name and by whether they have a slot (running) or not (waiting), at the
    engine's last report."""
    num_preemptions: Annotated[int, MetricSpec("headrace_preemptions")] = 0
    """Preemptions: a running sequence lost its KV blocks and is computed again later."""
    kv_blocks_used: Annotated[int, MetricSpec("headrace_kv_blocks_used", gauge=True)] = 0
    """KV blocks owned by sequences, over all cache groups. Blocks that only the prefix cache holds count as free."""
    kv_blocks_total: Annotated[int, MetricSpec("headrace_kv_blocks", gauge=True)] = 0
    """KV blocks in total, over all cache groups."""
    kv_blocks_moved: Annotated[int, MetricSpec("headrace_kv_blocks_moved")] = 0
    """KV blocks copied to another place so that another cache group can use theirs."""
    prefix_query_tokens: Annotated[int, MetricSpec("headrace_prefix_cache_query_tokens")] = 0
    """Prompt tokens looked up in the prefix cache, counted when the request first runs."""
    prefix_hit_tokens: Annotated[int, MetricSpec("headrace_prefix_cache_hit_tokens")] = 0
    """Prompt tokens found in the prefix cache, counted when the request first runs."""
    prefix_attention_tokens: Annotated[int, MetricSpec("headrace_prefix_cache_attention_tokens")] = 0
    """Prompt tokens of models with state layers whose KV was found in the prefix cache, whether or not a snapshot of the states
    let them be reused, counted when the request begins to run."""
    prefix_limits: Annotated[dict[str, int], MetricSpec("headrace_prefix_cache_limits", labels="limit")] = {}
    """Prompts of models with state layers, by what ended the prefix that they reused: no KV of more tokens was found
    (attention), or no snapshot of the states behind as many tokens as KV (state)."""
    state_blocks: Annotated[int, MetricSpec("headrace_state_blocks_used", gauge=True)] = 0
    """State blocks that sequences own, of models with state layers."""
    state_snapshots: Annotated[int, MetricSpec("headrace_state_snapshots", gauge=True)] = 0
    """Snapshots of states in the prefix cache."""
    state_snapshots_saved: Annotated[dict[str, int], MetricSpec("headrace_state_snapshots_saved", labels="point")] = {}
    """Snapshots of states stored in the prefix cache: at a turn of the conversation, for other samples of a request, at the
    prompt's last point, at a branch, for their distance (period), where an answer ends or a sequence is preempted (end)."""
    state_snapshots_skipped: Annotated[dict[str, int], MetricSpec("headrace_state_snapshots_skipped", labels="reason")] = {}
    """Snapshots of states not stored: there was no room within state_snapshot_bytes (budget) or at all (memory), or the
    sequence failed or lost its KV before its step was collected (ended)."""
    prompt_tokens: Annotated[int, MetricSpec("headrace_prompt_tokens")] = 0
    """Prompt tokens of requests, counted once when the request first runs."""
    computed_prompt_tokens: Annotated[int, MetricSpec("headrace_computed_prompt_tokens")] = 0
    """Prompt tokens computed by the model, not found in the prefix cache, counted when their step is collected."""
    generation_tokens: Annotated[int, MetricSpec("headrace_generation_tokens")] = 0
    """Output tokens generated, over all samples, counted when their step is collected."""
    finished: Annotated[dict[str, int], MetricSpec("headrace_sequences_finished", labels="reason")] = {}
    """Finished sequences, by finish reason."""
    grammar_requests: Annotated[dict[str, int], MetricSpec("headrace_grammar_requests", labels="kind outcome")] = {}
    """Requests with a constraint, by its kind and by what became of it: compiled, cached (compiled before), failed."""
    grammar_compile_seconds: Annotated[float, MetricSpec("headrace_grammar_compile_seconds")] = 0.0
    """Seconds spent compiling constraints, beside the engine's steps."""
    grammar_fill_seconds: Annotated[float, MetricSpec("headrace_grammar_fill_seconds")] = 0.0
    """Seconds spent computing token masks of constraints."""
    grammar_wait_seconds: Annotated[float, MetricSpec("headrace_grammar_wait_seconds")] = 0.0
    """Seconds between the result of a step and the launch of the sampling that waited for it to compute token masks."""
    parse_fallbacks: Annotated[dict[str, int], MetricSpec("headrace_parse_fallbacks", labels="format")] = {}
    """Times an answer broke its format and the text became content, by format, counted when the sequence ends."""
    forward_seconds: Annotated[float, MetricSpec("headrace_engine_forward_seconds")] = 0.0
    """Seconds spent in the model's forward pass, added when a step is collected."""
    sample_seconds: Annotated[float, MetricSpec("headrace_engine_sample_seconds")] = 0.0
    """Seconds spent in the sampler, added when a step is collected."""
    host_seconds: Annotated[float, MetricSpec("headrace_engine_host_seconds")] = 0.0
    """Seconds of steps spent on the host, outside the forward pass and the sampler."""
    replayed_steps: Annotated[int, MetricSpec("headrace_engine_replayed_steps")] = 0
    """Steps whose forward pass replayed a CUDA graph."""
    eager_steps: Annotated[int, MetricSpec("headrace_engine_eager_steps")] = 0
    """Steps whose forward pass launched its kernels one by one."""
    padding_tokens: Annotated[int, MetricSpec("headrace_padding_tokens")] = 0
    """Padding tokens computed to fill CUDA graphs."""
    graphs_captured: Annotated[int, MetricSpec("headrace_cuda_graphs_captured", gauge=True)] = 0
    """CUDA graphs captured so far; the others are captured while the engine is idle, or when a step first needs them."""
    graphs_total: Annotated[int, MetricSpec("headrace_cuda_graphs", gauge=True)] = 0
    """CUDA graphs that the engine captures in total."""

    @property
    def kv_usage(self) -> float:
        return self.kv_blocks_used / self.kv_blocks_total if self.kv_blocks_total else 0.0

    def since(self, before: EngineStats) -> EngineStats:
        """Returns the gauges, and the counters relative to ``before``."""
        counters: dict[str, Any] = {name: getattr(self, name) - getattr(before, name) for name in COUNTERS}
        for name in LABELLED_COUNTERS:
            old = getattr(before, name)
            new = {key: count - old.get(key, 0) for key, count in getattr(self, name).items()}
            counters[name] = {key: count for key, count in new.items() if count}
        return msgspec.structs.replace(self, **counters)

    def counters(self) -> EngineStats:
        """Returns the counters, and gauges of 0."""
        return msgspec.structs.replace(self, **dict.fromkeys(GAUGES, 0), **{name: {} for name in LABELLED_GAUGES})

    def plus(self, other: EngineStats) -> EngineStats:
        """The sums of two engines' counters and gauges."""
        sums: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in (*GAUGES, *COUNTERS)}
        for name in (*LABELLED_GAUGES, *LABELLED_COUNTERS):
            mine, others = getattr(self, name), getattr(other, name)
            sums[name] = {key: mine.get(key, 0) + others.get(key, 0) for key in {**mine, **others}}
        return EngineStats(**sums)


_METRICS: dict[str, MetricSpec] = {
    field: hint.__metadata__[0] for field, hint in typing.get_type_hints(EngineStats, include_extras=True).items()
}
GAUGES = {field: metric.name for field, metric in _METRICS.items() if metric.gauge and not metric.labels}
"""Field -> name of its Prometheus metric."""
COUNTERS = {field: metric.name for field, metric in _METRICS.items() if not metric.gauge and not metric.labels}
_LABELLED = {field: (metric.name, metric.labels.split()) for field, metric in _METRICS.items() if metric.labels}
LABELLED_GAUGES = {field: named for field, named in _LABELLED.items() if _METRICS[field].gauge}
"""Field -> name of its metric and its labels."""
LABELLED_COUNTERS = {field: named for field, named in _LABELLED.items() if not _METRICS[field].gauge}
