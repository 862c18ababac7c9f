"""Megatron's distributed checkpoints: the model they mean, and nothing that they would have run."""

from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.models import megatron
from support.models.megatron_checkpoint import arguments, save
from support.models.megatron_engine import OWN, PROMPTS, assert_same, eager

from headrace import LLM, SamplingParams
from headrace.errors import ConfigError

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'headrace[megatron]'")

pytestmark = pytest.mark.filterwarnings("ignore")


class Runs:
    """A pickle of it leaves a file behind when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def load(folder: Path, **changes: Any) -> LLM:
    fields: dict[str, Any] = {"num_kv_blocks": 40, "block_size": 4, "max_model_len": 64, "skip_tokenizer_init": True}
    return LLM(model=str(folder), **{**fields, "device": "cpu", "num_threads": 1, **changes})


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grouped queries": ({}, {}),
    "QK-norm, tied": (
        {"qk_layernorm": True, "spec": {"qk_layernorm": True}, "model": {"share_embeddings_and_output_weights": True}},
        {"qk_layernorm": True, "untie_embeddings_and_output_weights": False},
    ),
    "biases, a head each": (
        {"add_bias_linear": True, "add_qkv_bias": True, "num_query_groups": 4},
        {"add_bias_linear": True, "add_qkv_bias": True, "group_query_attention": False, "num_query_groups": 1},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_the_model_that_was_saved(kind: str, tmp_path: Path) -> None:
    config, given = KINDS[kind]
    model = megatron.gpt(**config)
    save(model, tmp_path, args=arguments(**given))
    llm = load(tmp_path, model_impl="megatron")
    assert_same(llm, masked(eager(model)))


def masked(reference: Any) -> Any:
    """Without the columns that pad the vocabulary."""

    def logprobs(tokens: Any) -> torch.Tensor:
        out = reference(tokens)
        out[:, 90:] = -torch.inf
        return out.log_softmax(-1)

    return logprobs


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's directory, with one iteration."""
    folder = tmp_path_factory.mktemp("run")
    save(megatron.gpt(), folder / "iter_0000007", args=arguments())
    (folder / "latest_checkpointed_iteration.txt").write_text("7\n")
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """A copy of the iteration, to be broken."""
    for file in (saved / "iter_0000007").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_the_latest_iteration_of_a_run_is_loaded_by_itself(saved: Path) -> None:
    llm = load(saved)
    lines = {line.name: (line.value, line.reason) for line in llm.info.decisions}
    assert lines["model_impl"] == ("megatron", "it is a distributed checkpoint of Megatron-core")
    assert llm.info.vocab_size == megatron.VOCAB
    params = SamplingParams(temperature=3.0, max_tokens=30, ignore_eos=True, seed=1)
    (out,) = llm.generate({"prompt_token_ids": PROMPTS[0]}, params)[0].outputs
    assert max(out.token_ids) < 90


def test_bfloat16_is_read_from_float32(saved: Path) -> None:
    llm = load(saved, dtype="bfloat16")
    parameters = llm._engine.executor.model.foreign.parameters()
    assert {parameter.dtype for parameter in parameters} == {torch.bfloat16}


# What a file would have run


@pytest.mark.parametrize("name", [".metadata", "common.pt", "__0_0.distcp"])
def test_pickles_that_run_code_are_refused_and_do_not_run(copied: Path, name: str) -> None:
    mark = copied / "it ran"
    (copied / name).write_bytes(pickle.dumps({"args": Runs(mark), "state_dict_metadata": Runs(mark)}))
    with pytest.raises(ConfigError) as caught:
        load(copied)
    assert caught.value.param == "model"
    assert not mark.exists()


def test_a_weight_that_is_an_object_in_the_index_is_not_unpickled(copied: Path) -> None:
    """PyTorch unpickles entries that the index calls bytes, whatever was asked for."""
    mark = copied / "it ran"
    with (copied / ".metadata").open("rb") as file:
        index = pickle.load(file)  # noqa: S301
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    name = "decoder.final_layernorm.weight"
    index.state_dict_metadata[name] = BytesStorageMetadata()
    (entry,) = [info for key, info in index.storage_data.items() if key.fqn == name]
    payload = pickle.dumps(Runs(mark))
    (copied / entry.relative_path).write_bytes(b"\0" * entry.offset + payload)
    (copied / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ConfigError, match=r"lacks decoder\.final_layernorm\.weight"):
        load(copied)
    assert not mark.exists()


def test_an_index_that_names_files_elsewhere_is_refused(copied: Path) -> None:
    with (copied / ".metadata").open("rb") as file:
        index = pickle.load(file)  # noqa: S301
    for info in index.storage_data.values():
        info.relative_path = "../" + info.relative_path
    (copied / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ConfigError, match="which is not a file of its directory"):
        load(copied)


def test_loading_is_refused_where_plain_data_was_switched_off(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(ConfigError, match="TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"):
        load(saved)


# Refusals


@contextlib.contextmanager
def refused(match: str, param: str = "model") -> Any:
    with pytest.raises(ConfigError, match=match) as caught:
        yield
    assert caught.value.param == param


def test_checkpoints_that_are_not_whole_are_refused(copied: Path) -> None:
    index = (copied / ".metadata").read_bytes()
    (copied / ".metadata").write_bytes(index[: len(index) // 2])
    with refused("is not the index of a checkpoint of tensors"):
        load(copied)
    (copied / ".metadata").unlink()
    with refused("it has no .metadata"):
        load(copied)
    (copied / ".metadata").write_bytes(index)
    (copied / "__0_1.distcp").unlink()
    with refused("lacks __0_1.distcp"):
        load(copied)
    (copied / "metadata.json").write_text('{"sharded_backend": "zarr", "common_backend": "torch"}')
    with refused("stored as zarr and torch"):
        load(copied)
    (copied / "metadata.json").write_text("{}")
    with refused("is not a distributed checkpoint of Megatron"):
        load(copied)


def test_a_run_without_an_iteration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("../elsewhere")
    with refused("names no iteration"):
        load(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    with refused("iter_0000012 is not a distributed checkpoint"):
        load(tmp_path)


def test_weights_that_do_not_fit_the_arguments_are_refused(tmp_path: Path) -> None:
    model = megatron.gpt()
    save(model, tmp_path / "fewer", args=arguments(qk_layernorm=True))
    with refused(r"lacks decoder\.layers\.self_attention\.k_layernorm\.weight"):
        load(tmp_path / "fewer")
    save(megatron.gpt(add_qkv_bias=True), tmp_path / "more", args=arguments())
    with refused(r"has no place for decoder\.layers\.self_attention\.linear_qkv\.bias"):
        load(tmp_path / "more")
    save(model, tmp_path / "wider", args=arguments(ffn_hidden_size=64))
    with refused(r"wider cannot be loaded: .*linear_fc1\.weight"):
        load(tmp_path / "wider")
    save(model, tmp_path / "none")
    with refused("has no arguments of a training run"):
        load(tmp_path / "none")
    save(model, tmp_path / "kind", args=arguments(linear_attention_freq=2))
    with refused("linear_attention_freq is 2"):
        load(tmp_path / "kind")
    save(model, tmp_path / "words", args=arguments(vocab_size="90"))
    with refused("vocab_size is '90', and must be a whole number", "vocab_size"):
        load(tmp_path / "words")
    save(model, tmp_path / "mla", args=arguments(multi_latent_attention=True, num_query_groups=4))
    with refused("Megatron cannot build the model of .* on cpu"):
        load(tmp_path / "mla")


def test_experts_are_refused_on_a_cpu_before_their_weights_are_read(tmp_path: Path) -> None:
    with megatron.no_device_asked_for():
        save(megatron.gpt(**OWN["experts"]), tmp_path, args=arguments(num_experts=4, moe_router_topk=2))
        assert megatron.own_logprobs(load(tmp_path)._engine.executor.model.foreign, [4, 5]).isfinite().all()
    fill = mock.patch("headrace.models.fallback.megatron.checkpoint._fill")
    with fill as filled, refused(r"decoder\.layers\.0\.mlp\.router: Megatron's router (asks for|moves to)", "model_impl"):
        load(tmp_path)
    filled.assert_not_called()


def test_other_implementations_and_formats_are_refused(saved: Path) -> None:
    with refused("model_impl native does not read Megatron's", "model_impl"):
        load(saved, model_impl="native")
    with refused("load_format dummy", "load_format"):
        load(saved, load_format="dummy")
    with refused("quantization int8", "quantization"):
        load(saved, quantization="int8")


def test_without_the_library_one_line_says_how_to_install_it(saved: Path) -> None:
    with (
        mock.patch.dict("sys.modules", {"megatron.core": None}),
        pytest.raises(ImportError, match="pip install 'megatron-core"),
    ):
        load(saved)
