"""Adapters over HTTP: names, loading and unloading while requests run, and a model on the CPU that answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.models.adapters import write_adapter
from support.models.tiny_llama import write_model
from support.server.harness import Running, error, running

from headrace import LoRARequest, SamplingParams
from headrace.config import EngineArgs
from headrace.errors import ConfigError
from headrace.frontend.async_llm import AsyncLLM
from headrace.server.settings import ServerSettings


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and adapters beside it."""
    root = tmp_path_factory.mktemp("root")
    write_model(root / "model")
    for seed, name in enumerate(("first", "second", "third")):
        write_adapter(root / "model", root / "adapters" / name, seed)
    return root


@pytest.fixture(scope="module")
def api(root: Path) -> Iterator[Running]:
    args = EngineArgs(
        model=str(root / "model"),
        device="cpu",
        num_threads=1,
        num_kv_blocks=120,
        enable_lora=True,
        max_loras=2,
        max_cpu_loras=2,
    )
    settings = ServerSettings(
        served_model_names=("base",),
        lora_modules=(f"first={root}/adapters/first",),
        lora_root=root / "adapters",
        enable_rl_api=True,
        metrics_compat="vllm",
    )
    with running(AsyncLLM(args), settings) as one:
        yield one


def post(api: Running, route: str, **fields: Any) -> httpx.Response:
    return httpx.post(api.url + route, timeout=60, **fields)


def get(api: Running, route: str) -> httpx.Response:
    return httpx.get(api.url + route, timeout=60)


def ask(api: Running, model: str, **fields: Any) -> Any:
    body = {"model": model, "prompt": "The mill", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return post(api, "/v1/completions", json=body | fields)


def text(api: Running, model: str, **fields: Any) -> str:
    response = ask(api, model, **fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def load(api: Running, name: str, path: str, route: str = "/v1/load_lora_adapter", **fields: Any) -> Any:
    return post(api, route, json={"lora_name": name, "lora_path": path, **fields})


def unload(api: Running, name: str, **fields: Any) -> Any:
    return post(api, "/v1/unload_lora_adapter", json={"lora_name": name, **fields})


def test_a_request_names_the_base_or_an_adapter(api: Running) -> None:
    base, first = text(api, "base"), text(api, "first")
    assert base != first
    assert text(api, "base:first") == text(api, "base", lora_name="first") == text(api, "first", lora_name="first") == first
    assert ask(api, "first").json()["model"] == "first"
    chat = {"model": "first", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    assert post(api, "/v1/chat/completions", json=chat).json()["model"] == "first"
    for model in ("frist", "base:frist"):
        refused = error(ask(api, model), 404)
        assert "frist" in refused["message"] and refused["code"] == "model_not_found"
    assert "first" in error(ask(api, "frist"), 404)["message"], "the message says what there is"
    assert error(ask(api, "base", lora_name="frist"), 404)["param"] == "lora_name"


def test_every_route_takes_an_adapter(api: Running) -> None:
    tokens = post(api, "/tokenize", json={"model": "base", "prompt": "The mill"}).json()["tokens"]
    sampling = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}

    def inference(model: str) -> list[int]:
        body = {"model": model, "token_ids": tokens, "sampling_params": sampling}
        return post(api, "/inference/v1/generate", json=body).json()["choices"][0]["token_ids"]

    def generate(**fields: Any) -> list[int]:
        body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}
        return post(api, "/generate", json=body | fields).json()["output_ids"]

    def embedding(model: str) -> list[float]:
        return post(api, "/v1/embeddings", json={"model": model, "input": "The mill"}).json()["data"][0]["embedding"]

    for asked in (inference, embedding):
        assert asked("first") != asked("base")
    assert generate(lora_path="first") == inference("first") and generate() == inference("base")
    for answer in (
        post(api, "/generate", json={"input_ids": tokens, "lora_path": "frist"}),
        post(api, "/inference/v1/generate", json={"model": "frist", "token_ids": tokens}),
        post(api, "/v1/embeddings", json={"model": "frist", "input": "The mill"}),
    ):
        assert error(answer, 404)


def test_a_trainer_publishes_its_adapter_in_versions(api: Running, root: Path) -> None:
    """The calls of TRL's client in its adapter mode."""
    config = get(api, "/server_info?config_format=json").json()["vllm_config"]
    assert config["parallel_config"]["data_parallel_size"] == 1
    offered = config["lora_config"]
    assert (offered["max_lora_rank"], offered["max_loras"], offered["max_cpu_loras"]) == (16, 2, 2)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(text, api, "first", max_tokens=24)
        assert post(api, "/pause", params={"mode": "keep"}).status_code == 200
        body = {"lora_name": "trl-policy-v1", "lora_path": str(root / "adapters" / "second"), "load_inplace": False}
        assert post(api, "/v1/load_lora_adapter", json=body).status_code == 200
        assert post(api, "/resume").status_code == 200
        tokens = post(api, "/tokenize", json={"prompt": "The mill"}).json()["tokens"]
        sampling = {"max_tokens": 8, "temperature": 1, "top_p": 1, "top_k": -1, "repetition_penalty": 1, "n": 1, "seed": 5}
        asked = {"model": "trl-policy-v1", "prompt": tokens, "return_token_ids": True, "logprobs": 0, **sampling}
        choice = post(api, "/v1/completions", json=asked).json()["choices"][0]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) > 0
        assert running.result() == text(api, "first", max_tokens=24)
    assert unload(api, "trl-policy-v1").status_code == 200
    assert unload(api, "trl-policy-v0").status_code == 404, "TRL does not mind"


def test_python_names_an_adapter_of_an_engine_elsewhere(api: Running, root: Path) -> None:
    async def generated(lora: LoRARequest) -> str:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        outputs = [output async for output in api.llm.generate("The mill", params, lora_request=lora)]
        return outputs[-1].outputs[0].text

    def run(lora: LoRARequest) -> str:
        return asyncio.run_coroutine_threadsafe(generated(lora), api.loop).result(60)

    assert run(LoRARequest("first")) == text(api, "first")
    assert run(LoRARequest("python", lora_path=str(root / "adapters" / "second"))) == text(api, "python")
    assert unload(api, "python").status_code == 200


def test_adapters_are_listed_with_their_parent(api: Running, root: Path) -> None:
    cards = {card["id"]: card for card in get(api, "/v1/models").json()["data"]}
    assert cards.keys() == {"base", "first"}
    assert cards["first"]["parent"] == "base" and cards["first"]["root"] == f"{root}/adapters/first"
    assert "parent" not in cards["base"]
    assert get(api, "/v1/models/first").json() == cards["first"]


def test_adapters_are_loaded_and_unloaded_while_the_server_runs(api: Running, root: Path) -> None:
    answer = load(api, "another", "second", lora_int_id=7)
    assert answer.status_code == 200 and "added" in answer.text and answer.headers["content-type"].startswith("text/plain")
    second = text(api, "another")
    assert error(load(api, "another", "third"), 400)["param"] == "lora_name"
    refused = error(load(api, "more", "third"), 409)
    assert refused["code"] == "max_cpu_loras" and "there may be 2" in refused["message"]
    assert error(unload(api, "another", lora_int_id=8), 409)["param"] == "lora_int_id"
    assert 'vllm:lora_requests_info{max_lora="2"' in get(api, "/metrics").text
    answer = load(api, "another", str(root / "adapters" / "third"), "/load_lora_adapter", pinned=False)
    assert answer.json()["loaded_adapters"]["another"].endswith("third")
    third = text(api, "another")
    assert third != second
    assert load(api, "another", "second", load_inplace=True).status_code == 200
    assert text(api, "another") == second
    assert unload(api, "another", lora_int_id=7).status_code == 200
    assert error(ask(api, "another"), 404) and error(unload(api, "another"), 404)
    assert post(api, "/unload_lora_adapter", json={"lora_name": "another"}).status_code == 404


def test_clients_read_only_what_they_may(api: Running, root: Path) -> None:
    for path in ("../model", str(root / "model"), "/etc"):
        assert "--lora-root" in error(load(api, "x", path), 403)["message"]
    assert "neither a directory" in error(load(api, "x", "fourth"), 400)["message"]
    assert error(load(api, "base", "second"), 400)["param"] == "lora_name"
    folder = root / "adapters" / "dora"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "use_dora": True}))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    assert "use_dora" in error(load(api, "x", "dora"), 400)["message"]
    (folder / "adapter_config.json").write_text((root / "adapters/first/adapter_config.json").read_text())
    stored = (root / "adapters/first/adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(stored.replace(b"layers.1.", b"layers.7."))
    assert "layers.7." in error(load(api, "x", "dora"), 400)["message"], "the engine knows its matrices"
    assert error(load(api, "x", "third", is_3d_lora_weight=True), 400)["param"] == "is_3d_lora_weight"
    assert error(load(api, "x", "third", pinned=True), 400)["param"] == "pinned"
    assert {one["id"] for one in get(api, "/v1/models").json()["data"]} == {"base", "first"}


def test_replacing_an_adapter_under_load_changes_no_answer_halfway(api: Running) -> None:
    assert load(api, "policy", "second").status_code == 200
    answers = {name: text(api, name, max_tokens=24) for name in ("first", "policy")}
    load(api, "policy", "third", load_inplace=True)
    known = {answers["policy"], text(api, "policy", max_tokens=24)}
    assert len(known) == 2

    async def run() -> list[str]:
        async with httpx.AsyncClient(base_url=api.url, timeout=60) as http:
            body = {"model": "policy", "prompt": "The mill", "max_tokens": 24, "temperature": 0, "ignore_eos": True}

            async def one() -> str:
                response = await http.post("/v1/completions", json=body)
                assert response.status_code == 200, response.text
                return str(response.json()["choices"][0]["text"])

            async def replace() -> None:
                for number in range(6):
                    path = ("second", "third")[number % 2]
                    answer = await http.post("/load_lora_adapter", json={"lora_name": "policy", "lora_path": path})
                    assert answer.status_code == 200

            tasks = [asyncio.create_task(one()) for _ in range(12)]
            await replace()
            return await asyncio.gather(*tasks, *(one() for _ in range(4)))

    assert set(asyncio.run(run())) <= known
    assert text(api, "first", max_tokens=24) == answers["first"]
    assert unload(api, "policy").status_code == 200


def test_settings_that_contradict_are_refused(root: Path) -> None:
    for modules, names in ((("first",), ()), (("base=x",), ("base",))):
        with pytest.raises(ConfigError, match="lora_modules"):
            ServerSettings(lora_modules=modules, served_model_names=names)
