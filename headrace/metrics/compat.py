"""Metrics of headrace under the names that other engines give them, for their dashboards and autoscalers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

VLLM = {
    "headrace_requests_running": ("vllm:num_requests_running",),
    "headrace_requests_waiting": ("vllm:num_requests_waiting",),
    "headrace_kv_cache_usage_ratio": ("vllm:kv_cache_usage_perc",),
    "headrace_prefix_cache_query_tokens": ("vllm:prefix_cache_queries",),
    "headrace_prefix_cache_hit_tokens": ("vllm:prefix_cache_hits", "vllm:prompt_tokens_cached"),
    "headrace_prompt_tokens": ("vllm:prompt_tokens",),
    "headrace_generation_tokens": ("vllm:generation_tokens",),
    "headrace_preemptions": ("vllm:num_preemptions",),
    "headrace_sequences_finished": ("vllm:request_success",),
    "headrace_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "headrace_inter_token_latency_seconds": ("vllm:inter_token_latency_seconds",),
    "headrace_request_latency_seconds": ("vllm:e2e_request_latency_seconds",),
    "headrace_queue_time_seconds": ("vllm:request_queue_time_seconds",),
    "headrace_prefill_seconds": ("vllm:request_prefill_time_seconds",),
    "headrace_decode_seconds": ("vllm:request_decode_time_seconds",),
    "headrace_request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "headrace_request_generation_tokens": ("vllm:request_generation_tokens",),
    "headrace_request_time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds",),
}
"""Family of headrace -> vLLM's names of it. Samples end in ``_total``, ``_bucket`` ... in both."""
_LABELS = {"reason": "finished_reason"}
ADAPTERS, LORA_INFO = "headrace_adapter_sequences", "vllm:lora_requests_info"
"""Names of the family whose adapters vLLM lists in the labels of one sample, and of that sample. Its value is the time."""


class VLLMNames(Collector):
    """Exports the families of another collector under vLLM's names, with its labels ``model_name`` and ``engine``.

    ``model_name`` returns None until the model is known; until then nothing is exported, as no series may change its label.
    """

    def __init__(self, source: Collector, model_name: Callable[[], str | None], max_loras: int) -> None:
        """``max_loras``: adapters that run at once; 0: the server takes no adapters."""
        self._source = source
        self._model_name = model_name
        self._max_loras = max_loras

    def collect(self) -> Iterator[Metric]:
        model_name = self._model_name()
        if model_name is None:
            return
        added = {"model_name": model_name, "engine": "0"}
        for family in self._source.collect():
            if family.name == ADAPTERS and self._max_loras:
                yield self._adapters(family)
            for name in VLLM.get(family.name, ()):
                renamed = Metric(name, family.documentation, family.type, family.unit)
                renamed.samples = [_renamed(sample, family.name, name, added) for sample in family.samples]
                yield renamed

    def _adapters(self, family: Metric) -> Metric:
        info = Metric(LORA_INFO, family.documentation, "gauge")
        names: dict[str, list[str]] = {"running": [], "waiting": []}
        for sample in family.samples:
            names[sample.labels["state"]].append(sample.labels["adapter"])
        labels = {f"{state}_lora_adapters": ",".join(sorted(found)) for state, found in names.items()}
        info.add_sample(LORA_INFO, {"max_lora": str(self._max_loras), **labels}, time.time())
        return info


def _renamed(sample: Sample, old: str, new: str, added: dict[str, str]) -> Sample:
    labels = {_LABELS.get(label, label): value for label, value in sample.labels.items()}
    return sample._replace(name=new + sample.name.removeprefix(old), labels=labels | added)
