"""Workloads of pictures: no repetition sees a picture again, headrace and vLLM get the same requests."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.fake_vllm import VLLM
from support.runner.harness import media_of
from support.server.harness import running
from typer.testing import CliRunner

from headrace.bench import workloads
from headrace.bench.pictures import PictureFeatures, Pictures
from headrace.bench.workloads import Workload, build
from headrace.cli.main import app
from headrace.config import EngineArgs
from headrace.errors import ConfigError
from headrace.frontend.async_llm import AsyncLLM

FOLDER = Path(__file__).parents[2] / "benchmarks"
TWO = Workload("two", [[1, 2, 700], [4]], [3, 2])


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "model_configs", raising=False)
    return importlib.import_module("model_configs")


def with_pictures(**more: object) -> Workload:
    return Workload(TWO.name, TWO.prompts, TWO.output_lens, Pictures(40, 30, **more))


def test_every_repetition_has_pictures_of_its_own() -> None:
    load = with_pictures()
    seen = [
        request["multi_modal_data"]["image"][0].tobytes() for number in (0, 1) for request in load.repetition(number).requests()
    ]
    assert len(set(seen)) == 4
    assert load.repetition(1).requests()[0]["multi_modal_data"]["image"][0].size == (40, 30)
    assert seen[:2] == [media["image"][0].tobytes() for media in load.repetition(0).media]
    assert TWO.repetition(1) is TWO and set(TWO.requests()[0]) == {"prompt_token_ids"}


def test_features_have_the_size_of_the_model() -> None:
    load = with_pictures(encoded=True, features=PictureFeatures(6, 16, (1, 4, 6)))
    (first, second) = (media["image_embeds"] for media in load.repetition(0).media)
    assert first["features"].shape == (6, 16) and first["grid_thw"].tolist() == [[1, 4, 6]]
    assert (first["features"] != second["features"]).any()
    with pytest.raises(ConfigError, match="made for a model"):
        with_pictures(encoded=True).repetition(0)


def test_prompts_get_the_placeholder_of_the_model() -> None:
    config = {"image_token_id": 600, "vision_start_token_id": 598, "vision_end_token_id": 599, "model_type": "x"}
    assert workloads.placeholder(config) == [598, 600, 599]
    assert TWO.marked([598, 600, 599]).prompts == [[598, 600, 599, 1, 2, 102], [598, 600, 599, 4]]
    with pytest.raises(ConfigError, match="no image_token_id"):
        workloads.placeholder({})


def test_the_workloads_with_and_without_pictures_share_their_prompts() -> None:
    pictures, features, text = (build(name, None) for name in workloads.PICTURE_WORKLOADS)
    assert pictures.prompts == features.prompts == text.prompts and text.pictures is None
    assert {(len(prompt), length) for prompt, length in zip(text.prompts, text.output_lens, strict=True)} == {(256, 128)}


def test_headrace_runs_them(configs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures, features and text of a tiny model, from the command to its report."""
    (folder,) = configs.write(tmp_path, ["qwen2.5-vl-7b"], True)
    small = {
        "images64": with_pictures(),
        "images64_features": with_pictures(encoded=True),
        "images64_text": TWO,
    }
    monkeypatch.setattr(workloads, "PICTURE_WORKLOADS", {name: lambda load=load: load for name, load in small.items()})
    report = tmp_path / "report.json"
    words = ["bench", "throughput", str(folder), "--load-format", "dummy", "--repetitions", "2", "--output", str(report)]
    words += ["--max-model-len", "512", "--num-kv-blocks", "64", "--block-size", "16", "--workload", ",".join(small)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    rows = json.loads(report.read_text())["rows"]
    assert [(row["requests"], row["output_tokens"], len(row["seconds"])) for row in rows] == [(2, 5, 2)] * 3
    refused = CliRunner().invoke(app, ["bench", "latency", str(folder), "--load-format", "dummy", "--workload", "images64"])
    assert refused.exit_code == 2 and "bench throughput measures" in refused.output


@pytest.mark.slow
def test_a_server_gets_them_in_every_form(configs: ModuleType, tmp_path: Path) -> None:
    """A server of random weights gets pictures, from shape to report; its answers have text."""
    (folder,) = configs.write(tmp_path, ["qwen2.5-vl-7b"], True)
    fields: dict[str, Any] = {"load_format": "dummy", "max_model_len": 512, "num_kv_blocks": 200, "num_threads": 1}
    with running(AsyncLLM(EngineArgs(model=str(folder), **fields))) as server:
        for form in ("png", "jpeg", "features", "upload"):
            report = tmp_path / f"{form}.json"
            words = ["bench", "serve", "--url", server.url, "--num-requests", "3", "--max-tokens", "4", "--ignore-eos"]
            words += ["--concurrency", "2", "--image-size", "112x84", "--image-form", form, "--output", str(report)]
            words += ["--image-model", str(folder)] if form in ("features", "upload") else []
            done = CliRunner().invoke(app, words)
            assert done.exit_code == 0, done.output
            found = json.loads(report.read_text())
            assert found["requests"]["succeeded"] == 3 and found["output_tokens"] == 12
            assert found["milliseconds"]["first token"]["p99"] > 0
            prompts = found["input_tokens"]
            assert prompts == json.loads((tmp_path / "png.json").read_text())["input_tokens"], "a picture has as many tokens"


def test_the_encoders_stream_is_timed_against_the_models(
    monkeypatch: pytest.MonkeyPatch, configs: ModuleType, tmp_path: Path
) -> None:
    (folder,) = configs.write(tmp_path, ["qwen2.5-vl-7b"], True)
    monkeypatch.delitem(sys.modules, "encoder_overlap", raising=False)
    overlap = importlib.import_module("encoder_overlap")
    used: list[object] = []

    def generate(llm: Any, load: Workload) -> float:
        used.append(media_of(llm._engine.executor.runner)._side)
        assert load.media[0]["image"][0].size == (40, 30)
        return float(len(used))

    monkeypatch.setattr(overlap, "generate", generate)
    args = EngineArgs(model=str(folder), load_format="dummy", max_model_len=128, num_kv_blocks=9, num_threads=1)
    report = overlap.measure(args, with_pictures().marked([521, 524, 522]), 2)
    assert used[0] is used[2] is used[4] is not used[1] is used[3] is used[5]
    assert report["warm_up"] == {"own stream": 1.0, "model's stream": 2.0}
    assert report["seconds"] == {"own stream": [3.0, 5.0], "model's stream": [4.0, 6.0]}
    assert report["speedup"] == 4 / 3


def test_answers_of_random_weights_have_text(configs: ModuleType, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (folder,) = configs.write(tmp_path, ["qwen2.5-vl-7b"], True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = {*range(1024)} - {*range(512, 512 + len(configs.QWEN_SPECIAL))} - {*range(256)}
    assert all(tokenizer.decode([token], skip_special_tokens=True).strip() for token in ids)
    parts = [{"type": "image"}, {"type": "text", "text": "what?"}]
    text = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True)
    asked = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>what?<|im_end|>\n"
    assert text == f"{asked}<|im_start|>assistant\n"


def test_the_published_tokens_have_their_ids(configs: ModuleType, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for tiny, first in ((False, 151643), (True, 512)):
        (folder,) = configs.write(tmp_path / str(tiny), ["qwen2.5-vl-7b"], tiny)
        config, tokenizer = json.loads((folder / "config.json").read_text()), AutoTokenizer.from_pretrained(folder)
        ids = tokenizer.encode("<|vision_start|><|image_pad|><|vision_end|>")
        assert ids == workloads.placeholder(config) == [first + 9, first + 12, first + 10]
        assert tokenizer.decode(tokenizer.encode("déjà vu")) == "déjà vu"


def test_the_peer_gets_pictures(configs: ModuleType, tmp_path: Path) -> None:
    (folder,) = configs.write(tmp_path, ["qwen2.5-vl-7b"], True)
    (tmp_path / "site" / "vllm").mkdir(parents=True)
    start = "        print("
    asked = "        assert given['limit_mm_per_prompt']['image'] == 1 and not given['skip_tokenizer_init']\n"
    checks = (
        "        images = [prompt['multi_modal_data']['image'][0] for prompt in prompts]\n"
        "        assert {image.size for image in images} == {(1024, 1024)}\n"
        "        assert all(prompt['prompt_token_ids'][:3] == [521, 524, 522] for prompt in prompts)\n"
        "        assert len({image.tobytes() for image in images}) == 64\n"
    )
    checked = VLLM.replace("        time.sleep(0.01)\n", checks).replace(start, asked + start, 1)
    (tmp_path / "site" / "vllm" / "__init__.py").write_text(checked)
    words = ["--model", str(folder), "--workloads", "images64", "--max-len", "4096", "--repetitions", "1"]
    done = subprocess.run(
        [sys.executable, FOLDER / "vllm_peer.py", *words],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert (row["workload"], row["requests"], row["out_tok"]) == ("images64", 64, 8192)
