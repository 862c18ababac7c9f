"""Inputs that models of other libraries take besides ids and positions, and those that they refuse."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import megatron
from support.models.architectures import quiet
from transformers import LlamaConfig, LlamaForCausalLM

from headrace import LLM, SamplingParams
from headrace.models.interface import ModelInputs

IDS = [5, 17, 3, 40, 22, 8]
Change = Callable[[ModelInputs], ModelInputs]
CONFIG = LlamaConfig(
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=2,
    intermediate_size=16,
    vocab_size=97,
    max_position_embeddings=64,
)


class Given:
    """A model whose inputs are changed."""

    def __init__(self, model: Any, change: Change) -> None:
        self.spec, self.logits = model.spec, model.logits
        self._model, self._change = model, change

    def __call__(self, inputs: ModelInputs, ctx: Any) -> torch.Tensor:
        out: torch.Tensor = self._model(self._change(inputs), ctx)
        return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(path)
    return path


@pytest.fixture(params=["transformers", "megatron"])
def llm(request: pytest.FixtureRequest, folder: Path) -> LLM:
    if request.param == "megatron":
        pytest.importorskip("megatron.core")
        model = megatron.gpt()
        return LLM.from_megatron(model, model.config, None, max_model_len=64, enable_prefix_caching=False)
    with quiet():
        return LLM(
            str(folder),
            model_impl="transformers",
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=64,
            enable_prefix_caching=False,
        )


def answer(llm: LLM, change: Change | None = None) -> Any:
    runner = llm._engine.executor.runner._forward
    model = runner._model
    if change is not None:
        runner._model = Given(model, change)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
        (output,) = llm.generate([{"prompt_token_ids": IDS}], params)
    finally:
        runner._model = model
    return output.outputs[0]


def embed_of(llm: LLM) -> Callable[[torch.Tensor], torch.Tensor]:
    model: Any = llm._engine.executor.model
    if hasattr(model, "body"):
        embed: Callable[[torch.Tensor], torch.Tensor] = model.body.embed
        return embed
    return lambda ids: model.foreign.embedding(input_ids=ids[None], position_ids=None)[:, 0]


@pytest.mark.parametrize("part", [False, True])
def test_embeddings_of_the_same_ids_give_the_same_tokens(llm: LLM, part: bool) -> None:
    expected, embed, given = answer(llm), embed_of(llm), []

    def change(inputs: ModelInputs) -> ModelInputs:
        embeds, mask = embed(inputs.input_ids), None
        if part:
            mask = inputs.positions % 2 == 0
            embeds = torch.where(mask[:, None], embeds, torch.nan)
        given.append(len(embeds))
        ids = torch.zeros_like(inputs.input_ids) if mask is None else inputs.input_ids.masked_fill(mask, 0)
        return dataclasses.replace(inputs, input_ids=ids, inputs_embeds=embeds, embeds_mask=mask)

    found = answer(llm, change)
    assert given[0] == len(IDS)
    assert list(found.token_ids) == list(expected.token_ids)
    for ours, theirs, token in zip(found.logprobs, expected.logprobs, found.token_ids, strict=True):
        assert ours[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-5)


@pytest.mark.parametrize("name", ["rope_positions", "extras"])
def test_what_their_layers_do_not_take_is_refused(llm: LLM, name: str) -> None:
    model: Any = llm._engine.executor.model
    tokens = torch.zeros(3, dtype=torch.int64)
    value: Any = tokens if name == "rope_positions" else {0: torch.zeros(3, 32)}
    with pytest.raises(ValueError, match=f"{name}: the layers are another library's"):
        model(ModelInputs(tokens, tokens, **{name: value}), None)


def test_layers_that_take_ids_alone_refuse_embeddings(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = llm._engine.executor.model
    if not hasattr(model, "body"):
        pytest.skip("Megatron's decoder takes hidden states")
    monkeypatch.setattr(model.body, "_takes_embeds", False)
    with pytest.raises(ValueError, match="inputs_embeds: the layers of LlamaForCausalLM take token ids alone"):
        model.body.hidden(None, torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3, 32))
