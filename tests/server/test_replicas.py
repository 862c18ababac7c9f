"""A server's reports of its replicas, and the session of a request."""

from __future__ import annotations

from typing import Any

import pytest
from support.server.fakes import FakeLLM, Health
from support.server.harness import Api, error

from headrace.errors import RequestError
from headrace.metrics.prometheus import ReplicaReport
from headrace.metrics.stats import EngineStats
from headrace.processes.replicas import ReplicaStatus
from headrace.routing import RouterStats, RoutingDecision
from headrace.server.settings import ServerSettings


class Replicas:
    """Two replicas, the second of which is down."""

    drained: int | None = None

    async def drain(self, number: int) -> None:
        if number == 0:
            raise RequestError("no replica but 0 takes requests", "replica")
        self.drained = number

    def resume(self, number: int) -> None:
        self.drained = None

    def status(self) -> list[ReplicaStatus]:
        stats = EngineStats(num_running=2, kv_blocks_used=1, kv_blocks_total=4)
        return [
            ReplicaStatus(0, "running", "", 17, None, stats, RouterStats(accepted=5)),
            ReplicaStatus(1, "restarting", "the engine died\nand more", None, None, EngineStats(), RouterStats(accepted=3)),
        ]

    def decisions(self) -> list[RoutingDecision]:
        return [RoutingDecision("a", 0, [10.0, float("inf")], False, 0.25, 128, 112)]

    def reported(self) -> list[ReplicaReport]:
        busy = EngineStats(num_running=2, generation_tokens=7)
        return [ReplicaReport(True, busy, 5, 128, 112, 16), ReplicaReport(False, EngineStats(), 3, 0, 0, 0)]


@pytest.fixture
def replicated() -> Api:
    llm = FakeLLM()
    llm.replicas = Replicas()
    llm._health = Health(True, "1 of 2 replicas are up; replica 1: the engine died")
    return Api(llm, ServerSettings(api_keys=("key",)))


def test_health_counts_and_ready_is_strict(replicated: Api, api: Api) -> None:
    answer = replicated.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok", "replicas": {"up": 1, "total": 2}})
    assert "1 of 2 replicas are up" in error(replicated.get("/ready"), 503)["message"]
    assert replicated.get("/live").status_code == 200
    for path in ("/health", "/ready"):
        assert (api.get(path).status_code, api.get(path).json()) == (200, {"status": "ok"})
    replicated.llm._health = Health(True, "")
    assert replicated.get("/ready").json()["status"] == "ok"


def test_server_info_lists_replicas_and_decisions(replicated: Api, api: Api) -> None:
    assert replicated.get("/server_info").status_code == 401
    answer = replicated.get("/server_info", headers={"Authorization": "Bearer key"}).json()
    first, second = answer["replicas"]
    assert (first["state"], first["pid"], first["running"]) == ("running", 17, 2)
    assert (first["kv_cache_usage"], first["accepted"]) == (0.25, 5)
    assert (second["state"], second["reason"]) == ("restarting", "the engine died")
    (decision,) = answer["routing"]
    assert decision["scores"] == [10.0, None] and (decision["expected_hit"], decision["true_hit"]) == (128, 112)
    single = api.get("/server_info").json()
    assert single["model"] == "fake-model" and single["data_parallel_size"] == 1 and "replicas" not in single
    assert (single["running"], single["waiting"], single["kv_blocks"] - single["kv_blocks_free"]) == (0, 0, 0)


def test_metrics_have_sums_and_a_label(replicated: Api, api: Api) -> None:
    lines = replicated.get("/metrics").text.splitlines()
    for line in (
        'headrace_replica_requests_running{replica="0"} 2.0',
        'headrace_replica_requests_running{replica="1"} 0.0',
        'headrace_replica_generation_tokens_total{replica="0"} 7.0',
        'headrace_replica_up{replica="1"} 0.0',
        'headrace_replica_accepted_total{replica="1"} 3.0',
        'headrace_replica_wrong_hit_tokens_total{replica="0"} 16.0',
        "headrace_requests_running 0.0",
    ):
        assert line in lines, line
    assert "replica=" not in api.get("/metrics").text


def test_a_replica_is_drained_and_resumed(replicated: Api, api: Api) -> None:
    key = {"Authorization": "Bearer key"}
    assert replicated.post("/replicas/1/drain").status_code == 401
    assert replicated.post("/replicas/1/drain", headers=key).json() == {"replica": 1, "drained": True}
    assert replicated.llm.replicas.drained == 1
    assert replicated.post("/replicas/1/resume", headers=key).json() == {"replica": 1, "drained": False}
    assert replicated.llm.replicas.drained is None
    assert error(replicated.post("/replicas/0/drain", headers=key), 409)["code"] == "last_replica"
    assert error(replicated.post("/replicas/2/drain", headers=key), 404)["param"] == "replica"
    assert error(api.post("/replicas/0/resume"), 404)["code"] == "replica_not_found"
    assert replicated.post("/replicas/x/drain", headers=key).status_code == 404


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_session_of_a_request_comes_with_a_header_or_is_its_user(path: str, api: Api) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": ["a", "b"]}
    assert api.post(path, body, headers={"X-Session-ID": "alice"}).status_code == 200
    assert {request.session for request in api.llm.seen} == {"alice"}
    for fields, headers, session in (({"user": "bob"}, {}, "bob"), ({"user": "bob"}, {"X-Session-ID": "alice"}, "alice")):
        api.llm.seen.clear()
        assert api.post(path, body | fields, headers=headers).status_code == 200
        assert {request.session for request in api.llm.seen} == {session}
    error(api.post(path, body | {"user": 7}), 400)
    api.llm.seen.clear()
    assert api.post(path, body).status_code == 200
    assert {request.session for request in api.llm.seen} == {None}
