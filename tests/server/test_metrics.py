"""/metrics: the engine's counters, the times of requests, how requests ended."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as families_of
from support.pages import ROOT
from support.server.fakes import FakeLLM
from support.server.harness import Running, running

from headrace.metrics.compat import VLLM
from headrace.metrics.prometheus import GenerationObserver, ServerMetrics
from headrace.metrics.stats import EngineStats
from headrace.outputs import Event, OutputDelta, RequestTimes
from headrace.server.settings import ServerSettings


class Scrape:
    def __init__(self, text: str) -> None:
        self._samples = [sample for family in families_of(text) for sample in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        """The sum over the samples of a name whose labels include these."""
        found = [s.value for s in self._samples if s.name == f"headrace_{name}" and labels.items() <= s.labels.items()]
        assert found, name
        return sum(found)

    def labels(self, name: str) -> list[dict[str, str]]:
        return [sample.labels for sample in self._samples if sample.name == f"headrace_{name}"]


def scrape(server: Running) -> Scrape:
    response = httpx.get(f"{server.url}/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    return Scrape(response.text)


def test_a_servers_life_in_numbers() -> None:
    with running(FakeLLM(step=0.001)) as server:
        post = f"{server.url}/v1/completions"
        tokens = len("Hello 0, wörld € 🙂 seed 0".encode()) + 1
        for _ in range(3):
            assert httpx.post(post, json={"prompt": "x" * 32}).status_code == 200
        assert httpx.post(post, json={"prompt": ["a", "b"], "n": 2, "max_tokens": 2, "stream": True}).status_code == 200
        assert httpx.post(post, json={"prompt": "a", "temperature": -1}).status_code == 400
        assert httpx.get(f"{server.url}/nowhere/{'x' * 50}").status_code == 404
        assert httpx.request("PROPFIND", f"{server.url}/health").status_code == 405
        get = scrape(server)
    assert get("prompt_tokens_total") == get("prefix_cache_query_tokens_total") == 3 * 33 + 2 * 2
    assert get("prefix_cache_hit_tokens_total") == 3 * 32
    assert get("computed_prompt_tokens_total") == 3 + 4
    assert get("generation_tokens_total") == 3 * tokens + 4 * 2
    assert get("preemptions_total") == 3
    assert get("engine_replayed_steps_total") == get("engine_steps_total") > get("engine_eager_steps_total") == 0
    assert get("padding_tokens_total") == 3 * get("engine_steps_total")
    assert get("requests_running") == get("requests_waiting") == get("kv_blocks_used") == 0
    assert get("kv_blocks") == 64 and get("kv_cache_usage_ratio") == 0
    assert get("sequences_finished_total", reason="stop") == 3
    assert get("sequences_finished_total", reason="length") == 4
    for name in ("time_to_first_token", "request_latency", "queue_time", "prefill", "decode"):
        assert get(f"{name}_seconds_count") == 3 + 4, "one a sequence"
    assert get("request_prompt_tokens_sum") == 3 * 33 + 4 * 2, "each sample counts its prompt"
    assert get("request_generation_tokens_sum") == get("generation_tokens_total")
    assert get("request_time_per_output_token_seconds_count") == 3 + 4
    assert get("inter_token_latency_seconds_count") == 3 * (tokens - 1) + 4
    assert get("inter_token_latency_seconds_sum") >= 3 * (tokens - 1) * 0.001
    assert get("request_latency_seconds_sum") >= get("time_to_first_token_seconds_sum") >= get("queue_time_seconds_sum")
    route = "/v1/completions"
    assert get("requests_total", endpoint=route, outcome="completed") == 4
    assert get("requests_total", endpoint=route, outcome="refused") == 1
    assert get("http_requests_total", route=route, status="200") == 4
    assert get("http_requests_total", route=route, status="400") == 1
    assert get("http_requests_total", route="unmatched", status="404") == 1
    assert get("http_requests_total", method="other") == 1, "a client cannot make up labels"
    assert get("build_info") == 1
    assert all("x" * 50 not in value for labels in get.labels("http_requests_total") for value in labels.values())


def test_gauges_are_as_of_the_scrape() -> None:
    stats = EngineStats(num_running=2, num_waiting=5, kv_blocks_used=16, kv_blocks_total=64)
    metrics = ServerMetrics(lambda: stats, "1")
    get = Scrape(metrics.render().decode())
    assert (get("requests_running"), get("requests_waiting"), get("kv_cache_usage_ratio")) == (2, 5, 0.25)
    stats = EngineStats(num_running=1)
    assert Scrape(metrics.render().decode())("requests_running") == 1


def test_two_servers_share_nothing() -> None:
    one, two = (ServerMetrics(EngineStats, "1") for _ in range(2))
    one.observe_http("/v1/models", "GET", 200)
    assert Scrape(one.render().decode())("http_requests_total") == 1
    assert not Scrape(two.render().decode()).labels("http_requests_total")


def test_times_and_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = ServerMetrics(EngineStats, "1")
    observer = GenerationObserver(metrics, [7])
    clock = iter([10.0, 10.5, 11.1, 20.0])
    monkeypatch.setattr("headrace.metrics.prometheus.time.monotonic", lambda: next(clock))

    def delta(index: int, tokens: int, **more: Any) -> OutputDelta:
        return OutputDelta(request_id="r", index=index, token_ids=[1] * tokens, **more)

    observer.delta(0, delta(0, 1))
    observer.delta(0, delta(0, 0))
    observer.delta(0, delta(0, 1))
    observer.delta(0, delta(0, 3, times=RequestTimes(1.0, 1.25, 2.0, 4.0)))
    observer.delta(0, delta(1, 1))
    get = Scrape(metrics.render().decode())
    assert get("inter_token_latency_seconds_count") == 4, "first tokens have no gap, and three tokens at once share theirs"
    assert get("inter_token_latency_seconds_sum") == pytest.approx(1.1)
    assert get("queue_time_seconds_sum") == 0.25
    assert get("time_to_first_token_seconds_sum") == 1.0
    assert get("request_latency_seconds_sum") == 3.0
    assert (get("prefill_seconds_sum"), get("decode_seconds_sum")) == (0.75, 2.0)
    assert (get("request_prompt_tokens_sum"), get("request_generation_tokens_sum")) == (7, 5)
    assert get("request_time_per_output_token_seconds_sum") == 0.5


def test_reasoning_and_calls_are_counted() -> None:
    metrics = ServerMetrics(EngineStats, "1")
    observer = GenerationObserver(metrics, [7], "hermes")
    events = [Event("reasoning", "a b", tokens=3), Event("call_started", name="f", id="1"), Event("call_ended")]
    for event in events:
        observer.delta(0, OutputDelta(request_id="r", index=0, events=[event]))
    observer.delta(
        0, OutputDelta(request_id="r", index=0, events=[Event("call_started", index=1), Event("reasoning", tokens=2)])
    )
    get = Scrape(metrics.render().decode())
    assert get("reasoning_tokens_total") == 5
    assert get.labels("tool_calls_total") == [{"format": "hermes"}] and get("tool_calls_total") == 2


def test_a_sequence_aborted_in_the_queue_has_no_times() -> None:
    metrics = ServerMetrics(EngineStats, "1")
    metrics.observe_finished(RequestTimes(1.0, None, None, 2.0), 7, 0)
    get = Scrape(metrics.render().decode())
    assert get("queue_time_seconds_count") == get("time_to_first_token_seconds_count") == 0
    assert get("prefill_seconds_count") == get("decode_seconds_count") == 0


def test_names_of_vllm() -> None:
    with running(FakeLLM(), ServerSettings(metrics_compat="vllm")) as server:
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hi", "n": 2}).status_code == 200
        families = {family.name: family for family in families_of(httpx.get(f"{server.url}/metrics").text)}
    for own, names in VLLM.items():
        for name in names:
            assert (families[name].type, families[name].documentation) == (families[own].type, families[own].documentation)
            mine, theirs = ([(s.value, s.labels.get("le")) for s in families[n].samples] for n in (own, name))
            assert theirs == mine
            assert all(s.labels["model_name"] == "fake-model" and s.name.startswith(name) for s in families[name].samples)
    stops = {"finished_reason": "stop", "model_name": "fake-model", "engine": "0"}
    assert [(s.name, s.labels, s.value) for s in families["vllm:request_success"].samples] == [
        ("vllm:request_success_total", stops, 2)
    ]


def test_the_documentation_names_every_metric() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    own = {
        sample.name for family in families_of(ServerMetrics(EngineStats, "1").render().decode()) for sample in family.samples
    }
    own |= {f"{name}_total" for name in ("headrace_requests", "headrace_http_requests", "headrace_sequences_finished")}
    ends = ("_bucket", "_count", "_sum", "_created")
    missing = {name for name in own if not name.endswith(ends) and name.startswith("headrace") and f"`{name}" not in page}
    assert not missing
    assert all(f"`{name}" in page for names in VLLM.values() for name in names)


def test_adapters_are_counted_and_listed_as_vllm_lists_them() -> None:
    stats = EngineStats(adapter_sequences={"running b": 2, "running a poet": 1, "waiting c": 3})
    page = ServerMetrics(lambda: stats, "1", "vllm", lambda: "m", max_loras=2).render().decode()
    assert 'headrace_adapter_sequences{adapter="a poet",state="running"} 1.0' in page
    assert 'headrace_adapter_sequences{adapter="c",state="waiting"} 3.0' in page
    labels = 'max_lora="2",running_lora_adapters="a poet,b",waiting_lora_adapters="c"'
    assert f"vllm:lora_requests_info{{{labels}}}" in page
    assert "lora_requests_info" not in ServerMetrics(lambda: stats, "1", "vllm", lambda: "m").render().decode()
    assert stats.plus(stats).adapter_sequences["waiting c"] == 6 and not stats.counters().adapter_sequences


def test_other_names_wait_for_the_model() -> None:
    model: list[str] = []
    metrics = ServerMetrics(EngineStats, "1", "vllm", lambda: model[0] if model else None)
    assert b"vllm:" not in metrics.render()
    model.append("m")
    assert b'vllm:num_requests_running{engine="0",model_name="m"} 0.0' in metrics.render()
    assert b"vllm:" not in ServerMetrics(EngineStats, "1", None, lambda: "m").render()
