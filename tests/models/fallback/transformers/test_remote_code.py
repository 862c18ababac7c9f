"""Models whose code lies beside their weights: it runs when asked for, and whatever its forward passes look like, exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.models import tiny_models
from support.models.architectures import quiet
from support.models.foreign import decisions, engine, tokens_of

from headrace.errors import ConfigError

PROMPT = list(range(3, 40))
LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel, LlamaRotaryEmbedding


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnModel(LlamaModel):
{body}


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
        self.post_init()
"""
OPEN = """
    def forward(self, input_ids=None, **kw):
        return super().forward(input_ids, **kw)
"""
CACHING = """
    def forward(self, input_ids=None, **kw):
        return super().forward(input_ids, **kw | {"use_cache": True})
"""
POSITIONED = """
    def forward(self, input_ids, position_ids, **kw):
        return super().forward(input_ids, position_ids=position_ids.clone(), **kw)
"""
SWITCHING = """
    def __init__(self, config):
        super().__init__(config)
        self.rotary_emb = OwnRotaryEmbedding(config=config)


class OwnRotaryEmbedding(LlamaRotaryEmbedding):
    def forward(self, x, position_ids):
        return super().forward(x, torch.where(position_ids.max() < 48, position_ids, 2 * position_ids))
"""
"""Turns all tokens in another way once one of them has come further."""


def saved(folder: Path, body: str = "    pass") -> Path:
    with quiet():
        tiny_models.save(tiny_models.model("llama"), folder)
    (folder / "modeling_own.py").write_text(LLAMA.format(body=body))
    file = folder / "config.json"
    own = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    changes = {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": own}
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    folder = tmp_path_factory.mktemp("llama")
    with quiet():
        tiny_models.save(tiny_models.model("llama"), folder)
        return tokens_of(engine(folder, model_impl="native"), PROMPT)


def test_it_runs_only_when_asked(tmp_path: Path, expected: list[int]) -> None:
    saved(tmp_path)
    with quiet():
        with pytest.raises(ConfigError) as caught:
            engine(tmp_path, model_impl="auto")
        assert caught.value.param == "trust_remote_code"
        llm = engine(tmp_path, model_impl="auto", trust_remote_code=True)
    assert tokens_of(llm, PROMPT) == expected


@pytest.mark.parametrize(
    ("body", "lifted"),
    [(OPEN, 3), (CACHING, 0), (POSITIONED, 3)],
    ids=["open-ended", "with a cache of its own", "with positions"],
)
def test_other_forward_passes(body: str, lifted: int, tmp_path: Path, expected: list[int]) -> None:
    """Told by name to keep nothing; with a cache that holds more than a step; and without positions of its own making."""
    with quiet():
        llm = engine(saved(tmp_path, body), trust_remote_code=True, max_num_batched_tokens=9)
    assert f" {lifted} attentions" in decisions(llm)["our kernels for"][0]
    assert tokens_of(llm, PROMPT) == expected


def test_tokens_that_are_turned_by_how_far_others_have_come(tmp_path: Path, expected: list[int]) -> None:
    saved(tmp_path, SWITCHING)
    with quiet():
        with pytest.raises(ConfigError, match=r"depends on how far others of the batch have come \(one is at position 48\)"):
            engine(tmp_path, trust_remote_code=True, max_model_len=49)
        llm = engine(tmp_path, trust_remote_code=True, max_model_len=48)
    assert tokens_of(llm, PROMPT) == expected
