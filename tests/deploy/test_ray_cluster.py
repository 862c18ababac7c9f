"""A Ray cluster of two nodes on this machine: scaling up and down under load, and the loss of a node.

Needs ``ray[serve]``, and minutes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'headrace[ray]'")

import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.util.state import list_actors

from headrace.deploy import build_openai_app

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROWS = 4
CONFIG: dict[str, Any] = {
    "model_loading_config": {"model_id": "small"},
    "engine_kwargs": {"device": "cpu", "num_threads": 1, "num_kv_blocks": 256, "max_num_seqs": ROWS, "max_model_len": 1024},
    # What a node with an ingress has in flight is lost with it, so it is on the one that stays.
    "ingress_deployment_config": {"ray_actor_options": {"num_cpus": 1, "resources": {"front": 1}}},
    "deployment_config": {
        "ray_actor_options": {"num_cpus": 1, "resources": {"engine": 1}},
        "health_check_period_s": 2,
        "autoscaling_config": {
            "min_replicas": 1,
            "max_replicas": 2,
            "target_ongoing_requests": 2,
            "upscale_delay_s": 2,
            "downscale_delay_s": 5,
            "metrics_interval_s": 1,
            "look_back_period_s": 4,
        },
    },
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "resources": {"engine": 1, "front": 1}})
    ray.init(address=nodes.address, log_to_driver=False)
    yield nodes
    serve.shutdown()
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture(scope="module")
def url(cluster: Cluster) -> str:
    cluster.add_node(num_cpus=4, resources={"engine": 1})
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # The proxies of two nodes of one machine would share the port.
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    serve.run(build_openai_app(CONFIG), name="headrace", route_prefix="/")
    return f"http://127.0.0.1:{port}"


def until(condition: Any, seconds: float) -> float:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "waited in vain"
        time.sleep(0.2)
    return time.monotonic() - start


def running() -> int:
    """Replicas of the engine that take requests."""
    return serve.status().applications["headrace"].deployments["engine"].replica_states.get("RUNNING", 0)


def pids() -> list[int]:
    """Returns the process ids of the engine's replicas."""
    actors = list_actors(filters=[("state", "=", "ALIVE")], limit=1000)
    return [actor.pid for actor in actors if actor.class_name.startswith("ServeReplica:headrace:engine")]


class Load:
    """Clients that each stream one answer after the other."""

    def __init__(self, url: str, clients: int) -> None:
        self.url = url
        self.stopping = False
        self.finished: list[str] = []
        self.failed: list[str] = []
        self.threads = [threading.Thread(target=self.client, args=(number,), daemon=True) for number in range(clients)]

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping = True
        for thread in self.threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in self.threads), "every request ends"

    def client(self, number: int) -> None:
        with httpx.Client(timeout=120) as client:
            while not self.stopping:
                try:
                    self.finished.append(streamed(client, self.url, f"Client {number} says: the mill wheel"))
                except (httpx.HTTPError, AssertionError) as error:
                    self.failed.append(f"{type(error).__name__}: {error}")
                    time.sleep(0.5)


def streamed(client: httpx.Client, url: str, prompt: str, tokens: int = 40) -> str:
    body = {"model": "small", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    text = ""
    with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += event["choices"][0]["text"] if event["choices"] else ""
    return text


def test_it_answers_as_a_server_does(url: str) -> None:
    answer = httpx.post(
        f"{url}/v1/chat/completions",
        json={"model": "small", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8},
        timeout=120,
    )
    assert answer.status_code == 200 and answer.json()["model"] == "small", answer.text
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    assert [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]] == ["small"]
    refused = httpx.post(f"{url}/v1/completions", json={"model": "small", "prompt": "x", "temperature": -1})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "temperature"
    assert httpx.get(f"{url}/nothing").status_code == 404


def test_it_scales_and_survives_a_node(url: str, cluster: Cluster) -> None:
    assert running() == 1
    with httpx.Client(timeout=120) as client:
        wanted = streamed(client, url, "Client 0 says: the mill wheel")
    with Load(url, 6) as load:
        up = until(lambda: running() == 2, 180)
        done = len(load.finished)
        until(lambda: len(load.finished) > done + 6, 120)
    assert not load.failed, load.failed
    assert wanted in load.finished, "tokens do not depend on the replica"
    with Load(url, 1) as load:
        down = until(lambda: running() == 1, 180)
    assert not load.failed, "scaling down cuts no stream"

    with Load(url, 6) as load:
        until(lambda: running() == 2, 180)
        until(lambda: len(load.finished) > 6, 120)
        os.kill(pids()[0], signal.SIGKILL)
        until(lambda: running() == 1, 60)
        until(lambda: running() == 2, 180)
    killed = len(load.failed)
    assert killed < 6, f"only what the replica had in flight may fail: {load.failed}"
    assert all("died" in error for error in load.failed), load.failed

    with Load(url, 6) as load:
        until(lambda: running() == 2, 180)
        (worker,) = cluster.worker_nodes
        before = len(load.finished)
        cluster.remove_node(worker, allow_graceful=False)
        until(lambda: running() == 1, 120)
        until(lambda: len(load.finished) > before + 6, 120)
        errors = len(load.failed)
        cluster.add_node(num_cpus=4, resources={"engine": 1})
        back = until(lambda: running() == 2, 180)
    print(
        f"up in {up:.0f} s, down in {down:.0f} s; of 6 clients, {killed} saw an error when a replica was killed, and {errors} "
    )
    print(f"when a node was; back in {back:.0f} s")
    assert errors < 6, f"only what the node had in flight may fail: {load.failed}"
    assert all("died" in error for error in load.failed), load.failed
    with Load(url, 2) as load:
        time.sleep(5)
    assert load.finished and not load.failed
