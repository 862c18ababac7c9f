"""Routes by which trainers change the weights of a running server, as TRL, prime-rl and slime call them."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.tiny_llama import write_model
from support.server.fakes import FakeLLM
from support.server.harness import Api, Running, client, post, running
from support.trainer import Trainer

from headrace.config import EngineArgs
from headrace.core.weights import WeightResult, WeightStatus
from headrace.errors import WeightsError
from headrace.frontend.async_llm import AsyncLLM
from headrace.option_groups import WeightTransferConfig
from headrace.server.settings import ServerSettings
from headrace.weights.checksum import checksum

PACK = 50_000
ASK: dict[str, Any] = {
    "prompt": list(range(40, 60)),
    "max_tokens": 6,
    "temperature": 1.0,
    "seed": 2**62,
    "ignore_eos": True,
    "logprobs": 0,
    "return_token_ids": True,
    "return_weight_versions": True,
}
LONG = ASK | {"max_tokens": 200}
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def server(folder: Path, root: Path) -> Iterator[Running]:
    args = EngineArgs(
        model=str(folder),
        dtype="float32",
        device="cpu",
        num_threads=1,
        num_kv_blocks=64,
        weight_timeout=3.0,
        weight_transfer_config=WeightTransferConfig(backend="gloo", packed_buffer_size_bytes=PACK),
    )
    with running(AsyncLLM(args), ServerSettings(enable_rl_api=True, weight_root=root)) as server:
        yield server


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        yield http


def weights_of(folder: Path, seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(folder / "model.safetensors")
    return {name: value + 0.05 * torch.randn(value.shape, generator=generator) for name, value in weights.items()}


def saved(folder: Path, weights: Weights) -> Path:
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def versions(answer: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [tuple(span.values()) for span in answer["choices"][0]["weight_versions"]]


def announced(weights: Weights) -> dict[str, Any]:
    """TRL's form of the tensors to come."""
    dtypes = [str(value.dtype).removeprefix("torch.") for value in weights.values()]
    return {"names": list(weights), "dtype_names": dtypes, "shapes": [list(value.shape) for value in weights.values()]}


class Rollout:
    """A completion in a thread."""

    def __init__(self, http: httpx.Client, body: dict[str, Any], path: str = "/v1/completions") -> None:
        self.answer: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._ask, args=(http, path, body))
        self._thread.start()

    def _ask(self, http: httpx.Client, path: str, body: dict[str, Any]) -> None:
        self.answer = http.post(path, json=body).json()

    def wait(self) -> dict[str, Any]:
        self._thread.join(60)
        return self.answer


def running_requests(http: httpx.Client) -> int:
    return int(http.get("/v1/loads?include=core").json()["num_reqs"])


def until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def joined(http: httpx.Client) -> Trainer:
    """Sends the requests of TRL's client at its start."""
    config = http.get("/server_info?config_format=json").json()["vllm_config"]
    assert config["model_config"]["dtype"] == "torch.float32"
    assert config["lora_config"] is None and config["weight_transfer_config"]["backend"] == "gloo"
    assert config["parallel_config"]["data_parallel_size"] == 1
    size = http.get("/get_world_size").json()["world_size"]
    trainer = Trainer(size + 1, seconds=5.0)
    trainer.beside(trainer.join)
    init = {"master_address": "127.0.0.1", "master_port": trainer.port, "rank_offset": 1, "world_size": size + 1}
    post(http, "/init_weight_transfer_engine", {"init_info": init | {"packed": True}})
    trainer.wait()
    return trainer


def sync(http: httpx.Client, trainer: Trainer, weights: Weights, number: str) -> Any:
    """Sends the requests of TRL's client for each of its steps; ``is_checkpoint_format`` only says how tensors are named."""
    post(http, "/pause?mode=keep")
    assert http.get("/is_paused").json() == {"is_paused": True}
    post(http, "/start_weight_update", {"is_checkpoint_format": True})
    trainer.beside(lambda: trainer.send(weights, PACK))
    post(http, "/update_weights", {"update_info": announced(weights)})
    trainer.wait()
    answer = post(http, "/finish_weight_update", {"weight_version": number})
    post(http, "/resume")
    return answer


@pytest.mark.slow
def test_trl(http: httpx.Client, folder: Path) -> None:
    trainer = joined(http)
    before = post(http, "/v1/completions", ASK)
    assert versions(before) == [("0", 0, 6)]
    rollout = Rollout(http, LONG)
    until(lambda: running_requests(http))
    done = sync(http, trainer, weights_of(folder, 1), "step-1")
    assert (done["version"], "kept" in done) == ("step-1", False)
    spans = versions(rollout.wait())
    assert [version for version, _, _ in spans] == ["0", "step-1"] and spans[-1][-1] == 200
    after = post(http, "/v1/completions", ASK)
    assert versions(after) == [("step-1", 0, 6)]
    assert after["choices"][0]["logprobs"]["token_logprobs"] != before["choices"][0]["logprobs"]["token_logprobs"]
    # A tied or frozen tensor that is not sent is named.
    some = dict(list(weights_of(folder, 1).items())[1:])
    done = sync(http, trainer, some, "step-2")
    assert (done["written"], done["kept"], done["kept_names"]) == (len(some), 1, ["lm_head.weight"])
    # The sender fails: its clean-up ends nothing, and a new run heals all.
    post(http, "/pause?mode=keep")
    post(http, "/start_weight_update", {"is_checkpoint_format": True})
    trainer.close()
    assert "torn" in post(http, "/update_weights", {"update_info": announced(some)}, 503)["error"]["message"]
    post(http, "/finish_weight_update", status=409)
    post(http, "/resume", status=409)
    refused = http.post("/v1/completions", json=ASK)
    assert refused.status_code == 503 and refused.headers["Retry-After"]
    assert "torn" in refused.json()["error"]["message"]
    health = http.get("/health")
    assert health.status_code == 200 and health.json()["status"] == "torn" and "torn" in health.json()["reason"]
    assert http.get("/ready").status_code == 503 and http.get("/live").json() == {"status": "ok"}
    # What trainers ask for before they write weights.
    assert http.get("/health_generate").json()["status"] == "torn" and http.get("/get_server_info").status_code == 200
    assert http.get("/v1/models").json()["data"][0]["max_model_len"] > 0
    again = joined(http)
    sync(http, again, weights_of(folder, 3), "step-3")
    assert http.get("/health").json() == {"status": "ok"}
    assert versions(post(http, "/v1/completions", ASK)) == [("step-3", 0, 6)]
    post(http, "/shutdown_weight_transfer_engine")
    again.close()


def test_a_trainer_that_is_gone(http: httpx.Client, folder: Path) -> None:
    """The next one begins as if nothing was open: by joining again, or after the update was given up."""
    trainer, weights = joined(http), weights_of(folder, 2)
    post(http, "/pause?mode=keep")
    post(http, "/start_weight_update")
    trainer.close()
    trainer = joined(http)
    assert sync(http, trainer, weights, "next")["version"] == "next"
    # The next one is gone after half of the tensors: what it wrote is not part of another update.
    half = dict(list(weights.items())[::2])
    post(http, "/pause?mode=keep")
    post(http, "/start_weight_update")
    trainer.beside(lambda: trainer.send(half, PACK))
    post(http, "/update_weights", {"update_info": announced(half)})
    trainer.wait()
    trainer.close()
    trainer = joined(http)
    torn = http.get("/weight_info").json()
    assert torn["state"] == "torn" and "joined again" in torn["reason"]
    post(http, "/start_weight_update")
    assert "tensors were not written" in post(http, "/finish_weight_update", status=409)["error"]["message"]
    sync(http, trainer, weights, "whole")
    trainer.close()
    post(http, "/start_weight_update")
    post(http, "/start_weight_update", status=409)
    assert post(http, "/abort_weight_update")["state"] == "serving"
    assert versions(post(http, "/v1/completions", ASK)) == [("whole", 0, 6)]


def test_prime_rl(http: httpx.Client, folder: Path, root: Path) -> None:
    path = saved(root / "prime", weights_of(folder, 4))
    rollout = Rollout(http, LONG)
    until(lambda: running_requests(http))
    post(http, "/pause?mode=keep&clear_cache=false")
    assert http.get("/health").json()["paused"] is True
    waiting = Rollout(http, ASK)
    post(http, "/update_weights", {"weight_dir": str(path)})
    shutil.rmtree(path)
    post(http, "/resume")
    assert len(versions(rollout.wait())) == 2
    assert len(versions(waiting.wait())) == 1, "a request that arrives during a pause runs after it"
    assert http.get("/liveness").status_code == 200
    for body, text in (
        ({"weight_dir": str(path)}, "there is no directory"),
        ({"weight_dir": str(root / ".." / "elsewhere")}, "--weight-root"),
        ({}, "either update_info or weight_dir"),
        ({"weight_dir": "/", "update_info": {}}, "either update_info or weight_dir"),
        ({"weight_directory": "/"}, "weight_directory"),
        ({"update_info": {"names": ["a"], "dtype_names": [], "shapes": []}}, "1 names, 0 dtypes"),
    ):
        assert text in post(http, "/update_weights", body, 400)["error"]["message"]
    for path, param, text in (
        ("/pause?mode=halt", "mode", "mode must be one of abort, keep, wait"),
        ("/pause?kv=recompute", "kv", "mode=keep"),
        ("/pause?modes=keep", "modes", "did you mean mode?"),
        ("/wake_up?tag=weights", "tag", "did you mean tags?"),
    ):
        refused = post(http, path, status=400)["error"]
        assert refused["param"] == param and text in refused["message"]
    for path, body, param in (
        ("/init_weight_transfer_engine", {"init_info": {"rank_offset": 1}}, "init_info.world_size"),
        ("/init_weight_transfer_engine", {"init_info": {"rank_offset": "x", "world_size": 2}}, "init_info.rank_offset"),
        ("/finish_weight_update", {"version": "7"}, "version"),
        ("/finish_weight_update", {"weight_version": "7" * 257}, "weight_version"),
        ("/weight_checker", {"action": "sum"}, "action"),
    ):
        refused = post(http, path, body, 400)["error"]
        assert refused["param"] == param and param in refused["message"]
    assert "checksum, compare, reset" in refused["message"]
    assert http.get("/weight_info").json()["state"] == "serving"


def test_slime(http: httpx.Client, folder: Path, root: Path) -> None:
    address = {"host": "127.0.0.1", "port": http.base_url.port, "nnodes": 1, "node_rank": 0}
    sizes = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "ep_size": 1, "num_gpus": 1, "base_gpu_id": 0, "gpu_id_step": 1}
    expected = {"enable_memory_saver": False, "enable_return_routed_experts": False, "dtype": "float32", **address, **sizes}
    for path in ("/server_info", "/get_server_info"):
        assert expected.items() <= http.get(path).json().items()
    rollout = Rollout(http, LONG)
    until(lambda: running_requests(http))
    post(http, "/pause_generation", {})
    until(lambda: not http.get("/v1/loads?include=core,disagg,queues").json()["num_total_reqs"])
    assert "include must have some of" in http.get("/v1/loads?include=cores").json()["error"]["message"]
    answer = rollout.wait()
    assert answer["choices"][0]["finish_reason"] == "abort" and answer["choices"][0]["token_ids"]
    assert versions(answer)[-1][-1] == len(answer["choices"][0]["token_ids"])
    refused = http.post("/v1/completions", json=ASK)
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
    assert http.get("/flush_cache").status_code == 200
    trainer = Trainer(2, ("slime-pp_0", "slime-pp_0/", "cpu/"), seconds=5.0)
    trainer.beside(trainer.join)
    group = {"master_address": "127.0.0.1", "master_port": trainer.port, "rank_offset": 1, "world_size": 2}
    post(http, "/init_weights_update_group", group | {"group_name": "slime-pp_0", "backend": "gloo"})
    trainer.wait()
    items = list(weights_of(folder, 5).items())
    for bucket in (dict(items[:5]), dict(items[5:])):
        body = announced(bucket)
        body = {"names": body["names"], "dtypes": body["dtype_names"], "shapes": body["shapes"]}
        trainer.beside(lambda bucket=bucket: trainer.send(bucket))
        more = {"group_name": "slime-pp_0", "flush_cache": False, "weight_version": "7"}
        assert post(http, "/update_weights_from_distributed", body | more)["success"] is True
        trainer.wait()
    post(http, "/continue_generation", {"torch_empty_cache": True})
    assert versions(post(http, "/v1/completions", ASK)) == [("7", 0, 6)]
    rollout = Rollout(http, LONG)
    until(lambda: running_requests(http))
    for mode in ("in_place", "retract"):  # Requests that are frozen do not hold the cache back.
        post(http, "/pause_generation", {"mode": mode})
        assert http.get("/flush_cache").status_code == 200
    path = saved(root / "weight_v000008", weights_of(folder, 6))
    post(http, "/update_weights_from_disk", {"model_path": str(path), "weight_version": "8"})
    (path / "model.safetensors").unlink()
    save_file(dict(items[1:]), path / "model.safetensors")
    message = post(http, "/update_weights_from_disk", {"model_path": str(path), "weight_version": "8"})["message"]
    assert message == f"the weights were updated; kept, as they were not sent: {items[0][0]}"
    shutil.rmtree(path)
    assert http.get("/get_weight_version").json() == {"weight_version": "8"}
    post(http, "/continue_generation", {})
    assert [version for version, _, _ in versions(rollout.wait())] == ["7", "8"]
    assert versions(post(http, "/v1/completions", ASK)) == [("8", 0, 6)]
    wrong = {"names": ["no.such"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "slime-pp_0"}
    refused = post(http, "/update_weights_from_distributed", wrong, 400)
    assert refused["success"] is False and "no.such" in refused["message"]
    for path, body, text in (
        ("/pause_generation", {"mode": "keep"}, "mode must be one of abort, retract, in_place"),
        ("/update_weight_version", {}, "new_version is missing"),
        ("/update_weights_from_disk", {"model_path": str(root / "none")}, "model_path: there is no directory"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": []}, "a pickle may run anything"),
    ):
        refused = post(http, path, body, 400)
        assert refused["success"] is False and text in refused["message"]
    # Without a pause, a call is an update of its own.
    number, body = http.get("/weight_info").json()["number"], announced(dict(items))
    body = {"names": body["names"], "dtypes": body["dtype_names"], "shapes": body["shapes"], "group_name": "slime-pp_0"}
    trainer.beside(lambda: trainer.send(dict(items)))
    post(http, "/update_weights_from_distributed", body | {"weight_version": "8"})
    trainer.wait()
    assert http.get("/weight_info").json()["number"] == number + 1
    # With a begin and an end, tensors of several calls are one update, whatever sleeps meanwhile.
    post(http, "/release_memory_occupation")
    post(http, "/begin_weight_update")
    for bucket, form, most in ((dict(items[:5]), "flattened_bucket", 2**40), (dict(items[5:]), None, None)):
        body = announced(bucket)
        body = {"names": body["names"], "dtypes": body["dtype_names"], "shapes": body["shapes"], "group_name": "slime-pp_0"}
        trainer.beside(lambda bucket=bucket, most=most: trainer.send(bucket, most))
        post(http, "/update_weights_from_distributed", body | {"load_format": form})
        trainer.wait()
    post(http, "/end_weight_update", {"weight_version": "8"})
    post(http, "/resume_memory_occupation")
    info = http.get("/model_info").json()
    assert (info["is_generation"], info["weight_version"]) == (True, "8")
    post(http, "/destroy_weights_update_group", {"group_name": "slime-pp_0"})
    assert http.get("/weight_info").json()["state"] == "serving"
    assert http.get("/health_generate").status_code == 200
    # Another name aborts nobody, unless the body says so.
    rollout = Rollout(http, LONG)
    until(lambda: running_requests(http))
    post(http, "/update_weight_version", {"new_version": "9"})
    answer = rollout.wait()
    assert answer["choices"][0]["finish_reason"] == "length" and [one for one, _, _ in versions(answer)] == ["8", "9"]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "return_weight_versions": True}
    answer = post(http, "/v1/chat/completions", chat)
    assert [span["version"] for span in answer["choices"][0]["weight_versions"]] == ["9"]
    trainer.close()


def test_slimes_check_of_offload() -> None:
    """It compares the server's word with --offload-rollout, and takes none but the same."""
    for rl, given in ((True, True), (True, False), (False, True)):
        api = Api(FakeLLM(), ServerSettings(enable_rl_api=rl, enable_memory_saver=given))
        assert api.get("/get_server_info").json()["enable_memory_saver"] is (rl and given)


@pytest.mark.parametrize("woken", [[["weights"]], [["cuda_graph"], ["weights"]]], ids=["weights", "graphs first"])
def test_slime_with_offload(http: httpx.Client, folder: Path, root: Path, woken: list[list[str]]) -> None:
    """Its trainer takes the GPU between rollouts: weights wake, are updated between pause and continue, and then KV wakes."""
    if (root / "offload").exists():
        shutil.rmtree(root / "offload")
    for seed in (15, 16):
        path = saved(root / "offload", weights_of(folder, seed))
        assert http.get("/flush_cache").status_code == 200
        post(http, "/release_memory_occupation", {})
        for tags in woken:
            post(http, "/resume_memory_occupation", {"tags": tags})
        post(http, "/pause_generation", {})
        assert http.get("/flush_cache").status_code == 200
        post(http, "/update_weights_from_disk", {"model_path": str(path), "weight_version": str(seed)})
        assert post(http, "/continue_generation", {})["success"] is True
        assert http.post("/v1/completions", json=ASK).status_code == 503, "KV is still asleep"
        post(http, "/resume_memory_occupation", {"tags": ["kv_cache"]})
        post(http, "/resume_memory_occupation", {"tags": ["cuda_graph"]})
        assert versions(post(http, "/v1/completions", ASK)) == [(str(seed), 0, 6)]
        shutil.rmtree(path)
    post(http, "/sleep?tags=weights&tags=kv_cache&mode=keep")
    refused = post(http, "/continue_generation", {}, 400)
    assert "asleep" in refused["message"]
    post(http, "/wake_up")


def test_requests_that_began_with_old_weights_are_ended(http: httpx.Client) -> None:
    """Numbers tell which: names of versions may be anything, and change before or after the weights."""

    def generate(**fields: Any) -> Rollout:
        sampling = {"max_new_tokens": 200, "ignore_eos": True}
        return Rollout(http, {"input_ids": ASK["prompt"], "sampling_params": sampling, **fields}, "/generate")

    post(http, "/update_weight_version", {"new_version": "now"})
    began = http.get("/weight_info").json()["number"]
    post(http, "/pause_generation", {"mode": "in_place"})
    requests = [generate(), generate(start_weight_version=0), generate(start_weight_version=began + 1)]
    until(lambda: running_requests(http) == 3)
    refused = post(http, "/pause_generation", {"abort_below_start_weight_version": 1}, 400)
    assert "goes with the modes retract and in_place" in refused["message"]
    post(http, "/pause_generation", {"mode": "in_place", "abort_below_start_weight_version": began})
    assert requests[1].wait()["meta_info"]["finish_reason"]["type"] == "abort"
    post(http, "/update_weight_version", {"new_version": "0"})
    post(http, "/pause_generation", {"mode": "retract", "abort_below_start_weight_version": began + 1})
    assert requests[0].wait()["meta_info"]["finish_reason"]["type"] == "abort"
    post(http, "/continue_generation", {})
    assert requests[2].wait()["meta_info"]["finish_reason"]["type"] == "length"


def test_the_router_that_a_server_stands_for(http: httpx.Client) -> None:
    """slime finds the workers whose requests it aborts, and adds its engines."""
    [worker] = http.get("/workers").json()["workers"]
    assert worker["url"] == str(http.base_url)
    assert http.post(f"{worker['url']}/abort_request", json={"abort_all": True}).status_code == 200
    added = post(http, "/workers", {"url": worker["url"], "worker_type": "regular"})
    assert added["worker_id"] == worker["id"]
    assert post(http, "/workers", {"url": "http://127.0.0.1:1"}, 400)["error"]["param"] == "url"
    assert [http.delete(f"/workers/{one}").status_code for one in (worker["id"], "other")] == [200, 404]


def test_sums_of_weights(http: httpx.Client, folder: Path, root: Path) -> None:
    """They are those of the tensors that were sent, under the names of the checkpoint."""
    sums = []
    for seed in (7, 8, 7):
        weights = weights_of(folder, seed)
        path = saved(root / "sums", weights)
        post(http, "/update_weights", {"weight_dir": str(path)})
        shutil.rmtree(path)
        sums.append(post(http, "/weight_checker", {"action": "checksum"})["checksums"])
        assert sums[-1] == {name: checksum(value) for name, value in weights.items()}
    assert sums[0] == sums[2] and all(sums[0][name] != sums[1][name] for name in sums[0])
    assert post(http, "/weight_checker", {"action": "compare", "baseline": sums[2]})["equal"] is True
    refused = post(http, "/weight_checker", {"action": "compare"}, 400)["error"]
    assert refused["param"] == "baseline" and "is missing" in refused["message"]
    compared = post(http, "/weight_checker", {"action": "compare", "baseline": sums[1]})
    assert len(compared["differing"]) == len(sums[1]) and not compared["unchecked"]
    first = sorted(sums[2])[0]
    part = {name: value for name, value in sums[2].items() if name != first}
    assert post(http, "/weight_checker", {"action": "compare", "baseline": part})["differing"] == [first]
    refused = post(http, "/weight_checker", {"action": "compare", "baseline": {"no.such": 1}}, 400)["error"]
    assert (refused["param"], "no.such" in refused["message"]) == ("baseline", True)


def test_sums_of_packed_and_tied_weights(tmp_path: Path) -> None:
    """A trainer's sums of what is kept packed are refused by name, those of the others compared; a tied head may be given."""
    folder = write_model(tmp_path / "tied", tie_word_embeddings=True, dtype="bfloat16")
    weights = load_file(folder / "model.safetensors")
    weights.pop("lm_head.weight", None)
    weights = {name: value.bfloat16() for name, value in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    sums = {name: checksum(value) for name, value in weights.items()}
    assert sums == {name: checksum(value.float()) for name, value in weights.items()}, "floats that hold the same"
    args = EngineArgs(model=str(folder), dtype="float32", device="cpu", num_threads=1, num_kv_blocks=64, quantization="int8")
    with (
        running(AsyncLLM(args), ServerSettings(enable_rl_api=True)) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        found = post(http, "/weight_checker", {"action": "checksum"})
        assert found["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
        plain = {name: value for name, value in found["checksums"].items() if "#" not in name}
        assert plain.items() <= sums.items() and "model.layers.0.self_attn.q_proj.weight" not in plain
        assert {name.partition("#")[0] for name in found["checksums"]} == set(sums)
        baseline = plain | {"lm_head.weight": sums["model.embed_tokens.weight"]}
        compared = post(http, "/weight_checker", {"action": "compare", "baseline": baseline})
        assert compared["equal"] is True and len(compared["unchecked"]) == len(found["checksums"]) - len(plain)
        compared = post(http, "/weight_checker", {"action": "compare", "baseline": baseline | {"lm_head.weight": 1}})
        assert compared["differing"] == ["lm_head.weight"]
        refused = post(http, "/weight_checker", {"action": "compare", "baseline": sums}, 400)["error"]
        assert refused["param"] == "baseline" and "_proj.weight is kept packed" in refused["message"]
        assert post(http, "/weight_checker", {"action": "compare", "baseline": found["checksums"]})["unchecked"] == []


def test_a_segment_with_sums_and_repeated_commands(http: httpx.Client, folder: Path, root: Path) -> None:
    """A command with the id of one that succeeded is answered as that was; other tensors than the sender's are torn weights."""
    weights = weights_of(folder, 9)
    sums = {name: checksum(value) for name, value in weights.items()}
    segment = Path("/dev/shm") / f"headrace-test-{root.parent.name}"

    def send(step: str, path: str, body: Any = None, status: int = 200) -> Any:
        answer = http.post(path, json=body or {}, headers={"X-Request-Id": step})
        assert answer.status_code == status, answer.text
        return answer.json()

    def update(run: str, sent: Weights, status: int) -> Any:
        save_file(sent, segment, metadata={"format": "pt"})
        for _ in range(2):
            send(f"{run}-begin", "/start_weight_update", {"checksums": True})
            send(f"{run}-send", "/update_weights", {"update_info": {"shm_name": segment.name}})
        segment.unlink()
        send(f"{run}-send", "/update_weights", {"update_info": {"shm_name": segment.name}})
        return send(f"{run}-end", "/finish_weight_update", {"weight_version": run, "checksums": sums}, status)

    before = http.get("/weight_info").json()["number"]
    assert update("whole", weights, 200) == send("whole-end", "/finish_weight_update")
    assert http.get("/weight_info").json()["number"] == before + 1
    assert versions(post(http, "/v1/completions", ASK)) == [("whole", 0, 6)]
    name = sorted(weights)[-1]
    other = weights | {name: weights[name].flip(0)}
    refused = update("other", other, 409)["error"]["message"]
    assert "torn" in refused and name in refused and "differs from the sender's sums" in refused
    assert "torn" in send("other-end", "/finish_weight_update", {}, 409)["error"]["message"], "failures are not repeated"
    assert http.get("/ready").status_code == 503
    update("again", weights, 200)
    assert versions(post(http, "/v1/completions", ASK)) == [("again", 0, 6)]
    post(http, "/start_weight_update")
    unasked = post(http, "/finish_weight_update", {"checksums": sums}, 409)
    assert "must begin with checksums" in unasked["error"]["message"]
    post(http, "/finish_weight_update")


class FakeWeights:
    """Pauses nothing."""

    async def pause(self, mode: str) -> WeightResult:
        return WeightResult()

    def status(self) -> WeightStatus:
        return WeightStatus()


def test_a_repeated_command_waits_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes while the first is under way is not another, and one after a failure is."""
    llm, calls = FakeLLM(), list[str]()

    class Slow(FakeWeights):
        async def resume(self) -> WeightResult:
            calls.append("resume")
            await asyncio.sleep(0.01)
            if len(calls) == 1:
                raise WeightsError("an update is open", 409)
            return WeightResult()

    monkeypatch.setattr(llm, "weights", Slow(), raising=False)

    async def ask() -> list[int]:
        async with client(llm, ServerSettings(enable_rl_api=True)) as http:
            one = {"X-Request-Id": "one"}
            both = await asyncio.gather(*(http.post("/resume", headers=one) for _ in range(2)))
            again = await asyncio.gather(*(http.post("/resume", headers=one) for _ in range(2)))
            last, other = await http.post("/resume", headers=one), await http.post("/resume", headers={"X-Request-Id": "two"})
            return [answer.status_code for answer in (*both, *again, last, other)]

    assert asyncio.run(ask()) == [409, 409, 200, 200, 200, 200]
    assert len(calls) == 3


def test_a_pause_that_nobody_lifts_is_in_the_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Once it has lasted, and again in intervals, until it is lifted."""
    monkeypatch.setattr("headrace.server.routes.rl._REMINDER_SECONDS", 0.02)
    llm, paused = FakeLLM(), [WeightStatus(pause="keep")]

    class Paused(FakeWeights):
        def status(self) -> WeightStatus:
            return paused[-1]

    monkeypatch.setattr(llm, "weights", Paused(), raising=False)

    async def ask() -> None:
        async with client(llm, ServerSettings(enable_rl_api=True, pause_timeout=0.02)) as http:
            for _ in range(2):
                await http.post("/pause?mode=keep")
            while len(caplog.messages) < 3:
                await asyncio.sleep(0.01)
            paused.append(WeightStatus())
            await asyncio.sleep(0.05)
            caplog.clear()
            await asyncio.sleep(0.05)

    with caplog.at_level("WARNING", "headrace.server"):
        asyncio.run(asyncio.wait_for(ask(), 30))
    assert not caplog.messages


@pytest.mark.parametrize(
    ("settings", "key", "status"),
    [
        ({}, None, 404),
        ({"enable_rl_api": True}, None, 200),
        ({"enable_rl_api": True, "api_keys": ("user",)}, "user", 404),
        ({"enable_rl_api": True, "api_keys": ("user",), "admin_keys": ("admin",)}, "user", 403),
        ({"enable_rl_api": True, "api_keys": ("user",), "admin_keys": ("admin",)}, "other", 401),
        ({"enable_rl_api": True, "api_keys": ("user",), "admin_keys": ("admin",)}, "admin", 200),
    ],
)
def test_who_may_call_them(settings: dict[str, Any], key: str | None, status: int) -> None:
    llm = FakeLLM()
    llm.weights = FakeWeights()
    api = Api(llm, ServerSettings(**settings))
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for path in ("/pause?mode=keep", "/pause_generation"):
        assert api.post(path, headers=headers).status_code == status
    if status == 200:
        assert api.get("/v1/models", headers=headers).status_code == 200
