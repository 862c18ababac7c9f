"""``layers_to_patch``: every layer of a foreign model runs on headrace's attention, or the option is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import megatron
from support.models.architectures import quiet
from transformers import LlamaConfig, LlamaForCausalLM

from headrace import LLM, SamplingParams
from headrace.errors import ConfigError

LAYERS = 2
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_hidden_layers=LAYERS,
        intermediate_size=16,
        vocab_size=97,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def of_files(folder: Path, impl: str, **fields: Any) -> LLM:
    with quiet():
        return LLM(str(folder), model_impl=impl, skip_tokenizer_init=True, dtype="float32", max_model_len=64, **fields)


def foreign(kind: str, folder: Path, **fields: Any) -> LLM:
    if kind == "transformers":
        return of_files(folder, "transformers", **fields)
    pytest.importorskip("megatron.core")
    model = megatron.gpt(num_layers=LAYERS)
    return LLM.from_megatron(model, model.config, None, max_model_len=64, **fields)


def tokens(llm: LLM) -> list[int]:
    (output,) = llm.generate([{"prompt_token_ids": [5, 17, 3, 40, 22, 8]}], GREEDY)
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("kind", ["transformers", "megatron"])
def test_a_list_of_all_layers_is_what_runs_without_one(kind: str, folder: Path) -> None:
    assert tokens(foreign(kind, folder, layers_to_patch=[1, 0, 1])) == tokens(foreign(kind, folder))


@pytest.mark.parametrize("kind", ["transformers", "megatron"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([0], "leaves out 1: a layer that keeps its own attention has no paged KV cache"),
        ([], "leaves out 0, 1: a layer that keeps its own attention"),
        ([0, 1, 2, 7], "names 2, 7, and the model has the layers 0 to 1"),
        ([-1, 0, 1], "must be an integer"),
        ([True, 0, 1], "must be an integer"),
        ((0, 1), "must be a list"),
    ],
)
def test_other_lists_are_refused(kind: str, given: Any, message: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        foreign(kind, folder, layers_to_patch=given)
    assert (caught.value.param or "").startswith("layers_to_patch")


def test_native_models_refuse_it(folder: Path) -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLM is native") as caught:
        of_files(folder, "auto", layers_to_patch=[0, 1])
    assert caught.value.param == "layers_to_patch"
