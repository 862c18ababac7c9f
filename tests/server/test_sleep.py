"""Routes by which an engine gives memory back, under the names of vLLM, SGLang and FastDeploy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file
from support.models.tiny_llama import write_model
from support.server.fakes import FakeLLM
from support.server.harness import Api, Running, answered, post, running

from headrace.config import EngineArgs
from headrace.frontend.async_llm import AsyncLLM
from headrace.server.settings import ServerSettings

ASK: dict[str, Any] = {
    "prompt": list(range(40, 60)),
    "max_tokens": 6,
    "temperature": 0.0,
    "ignore_eos": True,
    "return_token_ids": True,
    "return_weight_versions": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    args = EngineArgs(model=str(folder), dtype="float32", device="cpu", num_threads=1, num_kv_blocks=64)
    with running(AsyncLLM(args), ServerSettings(enable_rl_api=True, weight_root=folder)) as server:
        yield server


@pytest.mark.slow
def test_two_replicas(folder: Path) -> None:
    """A trainer finds them as it finds one engine, and requests are refused at once."""
    sizes = {"num_threads": 1, "num_kv_blocks": 64, "data_parallel_size": 2}
    args = EngineArgs(model=str(folder), dtype="float32", device="cpu", **sizes)
    settings = ServerSettings(enable_rl_api=True, ready_timeout=120)
    with running(AsyncLLM(args), settings) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        before = tokens(http)
        post(http, "/sleep?level=2")
        assert "asleep" in post(http, "/v1/completions", ASK, 503)["error"]["message"]
        assert post(http, "/wake_up")["state"] == "hollow"
        for path in ("/health", "/health_generate"):
            assert get(http, path)["status"] == "hollow"
        for path in ("/v1/models", "/server_info"):
            get(http, path)
        assert "dropped" in post(http, "/v1/completions", ASK, 503)["error"]["message"]
        post(http, "/update_model_weight")
        assert tokens(http) == before and get(http, "/health")["replicas"] == {"up": 2, "total": 2}


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        yield http


def get(http: httpx.Client, path: str, status: int = 200) -> Any:
    return answered(http.get(path), status)


def tokens(http: httpx.Client) -> list[int]:
    return list(post(http, "/v1/completions", ASK)["choices"][0]["token_ids"])


def gauges(http: httpx.Client) -> list[float]:
    """Requests that run and wait, use of KV, and whether the metrics have the state that the weights are in."""
    state = get(http, "/weight_info")["state"]
    names = ("requests_running", "requests_waiting", "kv_cache_usage_ratio", f'weights_state{{state="{state}"}}')
    samples = dict(line.rpartition(" ")[::2] for line in http.get("/metrics").text.splitlines())
    return [float(samples[f"headrace_{name}"]) for name in names]


def begin_long(http: httpx.Client) -> Any:
    """A stream that has begun."""
    stream = http.stream("POST", "/v1/completions", json=ASK | {"max_tokens": 200, "stream": True})
    lines = stream.__enter__().iter_lines()
    next(lines)
    return stream, lines


def test_vllms_names(http: httpx.Client) -> None:
    before = tokens(http)
    for level in (0, 1, 2):
        stream, lines = begin_long(http)
        asleep = post(http, f"/sleep?level={level}")
        assert asleep["status"] == "sleeping"
        assert [(one["device"], one["pytorch"]) for one in asleep["memory"]] == [("cpu", 0)] * bool(level)
        assert all(one["used"] > 2**24 for one in asleep["memory"])
        assert gauges(http) == [0.0, 0.0, 0.0, 1.0], "who asks once sleep has answered"
        assert '"finish_reason":"abort"' in "".join(lines), "a request that ran has its end"
        stream.__exit__(None, None, None)
        assert get(http, "/is_sleeping") == {"is_sleeping": True}
        assert f"asleep (level {level})" in get(http, "/health", 503)["error"]["message"]
        assert get(http, "/live") == {"status": "sleeping"}
        assert len(get(http, "/v1/models")["data"]) == 1, "what the model is does not depend on its memory"
        refused = http.post("/v1/completions", json=ASK)
        assert refused.status_code == 503 and refused.headers["Retry-After"] == "5"
        assert "asleep" in post(http, "/resume", status=409)["error"]["message"]
        if level:
            assert post(http, "/wake_up?tags=weights")["tags"] == ["cuda_graph", "kv_cache", "scheduling"]
        if level == 2:
            assert post(http, "/wake_up?tags=kv_cache")["state"] == "hollow"
            assert get(http, "/health")["status"] == "hollow", "a trainer that waits for it may write weights"
            assert "dropped" in get(http, "/ready", 503)["error"]["message"]
            post(http, "/v1/completions", ASK, 503)
            post(http, "/update_model_weight")
        else:
            assert post(http, "/wake_up") == {"status": "awake", "tags": [], "state": "serving"}
        assert get(http, "/health") == {"status": "ok"} and get(http, "/is_sleeping") == {"is_sleeping": False}
        assert tokens(http) == before
    asleep = post(http, "/release_kv_cache_memory")
    assert asleep["tags"] == ["kv_cache", "scheduling"]
    assert post(http, "/wake_up?tags=kv_cache")["state"] == "serving"
    assert post(http, "/weight_checker", {"action": "reset"})["state"] == "hollow"
    post(http, "/update_model_weight")
    assert tokens(http) == before
    for path in ("/sleep?level=3", "/sleep?mode=halt", "/sleep?tags=all", "/wake_up?tags=lora"):
        post(http, path, status=400)
    assert "a parameter of the query" in post(http, "/sleep", {"level": 2}, 400)["error"]["message"]


def test_sglangs_names(http: httpx.Client, folder: Path) -> None:
    """Calls the routes in the order in which slime does beside its trainer."""
    before = tokens(http)
    post(http, "/pause_generation", {})
    get(http, "/flush_cache")
    assert post(http, "/release_memory_occupation", {})["success"] is True
    assert post(http, "/resume_memory_occupation", {"tags": ["weights"]})["success"] is True
    path = folder / "new"
    path.mkdir()
    weights = {name: value.flip(0) for name, value in load_file(folder / "model.safetensors").items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    post(http, "/update_weights_from_disk", {"model_path": str(path), "weight_version": "flipped"})
    post(http, "/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    assert get(http, "/weight_info")["state"] == "paused"
    post(http, "/continue_generation", {})
    with http.stream("POST", "/v1/completions", json=ASK | {"stream": True}) as stream:
        assert stream.headers["X-Weight-Version-Start"] == "flipped"
    answered = http.post("/v1/completions", json=ASK)
    assert answered.headers["X-Weight-Version-Start"] == "flipped"
    answer = answered.json()["choices"][0]
    assert answer["token_ids"] != before and answer["weight_versions"][0]["version"] == "flipped"
    refused = post(http, "/release_memory_occupation", {"tags": ["experts"]}, 400)
    assert refused["success"] is False and "must be one of weights, kv_cache, cuda_graph" in refused["message"]
    # Requests that run without a pause are computed again.
    stream, lines = begin_long(http)
    post(http, "/release_memory_occupation")
    post(http, "/resume_memory_occupation")
    assert '"finish_reason":"length"' in "".join(lines)
    stream.__exit__(None, None, None)
    get(http, "/update_model_weight")
    assert tokens(http) == before


def test_clear_load_weight(http: httpx.Client, folder: Path) -> None:
    before = tokens(http)
    for clear, update in ((get, get), (post, post)):
        for _ in range(2):
            assert clear(http, "/clear_load_weight")["state"] == "asleep"
            assert gauges(http) == [0.0, 0.0, 0.0, 1.0]
        assert update(http, "/update_model_weight")["state"] == "serving"
        assert tokens(http) == before
    get(http, "/clear_load_weight")
    post(http, "/update_weights", {"weight_dir": str(folder)})
    assert get(http, "/weight_info")["state"] == "serving", "any update of all weights wakes it"
    assert tokens(http) == before


def test_sglangs_check_of_an_update(http: httpx.Client, folder: Path) -> None:
    before = tokens(http)
    assert "snapshot" in post(http, "/weights_checker", {"action": "compare"}, 400)["message"]
    post(http, "/weights_checker", {"action": "snapshot"})
    post(http, "/weights_checker", {"action": "reset_tensors"})
    assert get(http, "/weight_info")["state"] == "hollow"
    post(http, "/v1/completions", ASK, 503)
    post(http, "/update_weights_from_disk", {"model_path": str(folder)})
    assert post(http, "/weights_checker", {"action": "compare"})["success"] is True
    assert tokens(http) == before
    post(http, "/update_weights_from_disk", {"model_path": str(folder / "new")})
    assert "differ" in post(http, "/weights_checker", {"action": "compare"}, 400)["message"]


@pytest.mark.parametrize("settings", [ServerSettings(), ServerSettings(enable_rl_api=True, api_keys=("user",))])
def test_without_the_rl_api(settings: ServerSettings) -> None:
    api = Api(FakeLLM(), settings)
    headers = {"Authorization": "Bearer user"}
    for path in ("/clear_load_weight", "/update_model_weight"):
        for answer in (api.get(path, headers=headers), api.post(path, headers=headers)):
            assert (answer.status_code, answer.text) == (404, "Dynamic Load Weight Disabled.")
    assert api.post("/sleep", headers=headers).status_code == 404
