"""Patched attention of older families: exact, compared with the modules' own, and left out where it does not apply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import tiny_models
from support.models.architectures import TOLERANCE, quiet, survey_one
from support.models.foreign import engine, model_of, tokens_of
from transformers import FalconForCausalLM
from transformers.models.xglm.modeling_xglm import XGLMAttention, XGLMConfig

from headrace.errors import ConfigError
from headrace.models.fallback.transformers.legacy_attention import forward_patch

PROMPT = list(range(3, 24))


@pytest.mark.parametrize("kind", ["falcon", "gpt_neo", "megatron-bert", "openai-gpt", "roformer", "xglm"])
def test_tokens_and_logprobs_are_transformers_own(kind: str) -> None:
    verdict = survey_one(kind)
    assert verdict.runs, verdict.reason
    assert not verdict.fault
    assert verdict.error <= TOLERANCE


def falcon(folder: Path, **changes: Any) -> FalconForCausalLM:
    torch.manual_seed(0)
    config = tiny_models.config("falcon")
    for name, value in changes.items():
        setattr(config, name, value)
    made = FalconForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32)
    for parameter in made.parameters():
        parameter.data.add_(0.15 * torch.randn_like(parameter))
    saved: Any = tiny_models.save(made, folder)
    return saved


@pytest.mark.parametrize(
    ("changes", "kv_heads"),
    [({"multi_query": False}, 4), ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2)],
    ids=["a head each", "groups"],
)
def test_keys_of_falcon_are_kept_once(changes: dict[str, Any], kv_heads: int, tmp_path: Path) -> None:
    with quiet():
        theirs = falcon(tmp_path, **changes)
        llm = engine(tmp_path, max_num_batched_tokens=9)
    assert {layer.num_kv_heads for layer in model_of(llm).spec.layers} == {kv_heads}
    tokens = list(PROMPT)
    with torch.inference_mode():
        for _ in range(6):
            tokens.append(int(theirs(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    assert tokens_of(llm, PROMPT) == tokens[len(PROMPT) :]


def test_windows_that_a_module_keeps_to_itself_are_its_layers(tmp_path: Path) -> None:
    with quiet():
        tiny_models.save(tiny_models.model("gpt_neo"), tmp_path)
        llm = engine(tmp_path)
    assert [layer.window for layer in model_of(llm).spec.layers] == [None, 7, None]


def test_falcon_with_alibi_is_refused(tmp_path: Path) -> None:
    with quiet():
        falcon(tmp_path, alibi=True)
        with pytest.raises(ConfigError, match=r"transformer\.h\.0.*: it adds biases by position to the logits \(ALiBi"):
            engine(tmp_path)


def test_a_module_that_makes_something_else_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = XGLMAttention.forward

    def other(self: Any, hidden_states: torch.Tensor, attention_mask: Any = None, **rest: Any) -> Any:
        return own(self, 1.5 * hidden_states, attention_mask=attention_mask, **rest)

    with quiet():
        tiny_models.save(tiny_models.model("xglm"), tmp_path)
        monkeypatch.setattr(XGLMAttention, "forward", other)
        with pytest.raises(ConfigError, match="layer 0: a XGLMAttention is not what it is taken for"):
            engine(tmp_path)


def test_attention_to_an_encoder_stays_the_modules_own() -> None:
    module: Any = XGLMAttention(embed_dim=32, num_heads=4, is_decoder=True)
    x, others = torch.randn(1, 3, 32), torch.randn(1, 5, 32)
    config = XGLMConfig(attn_implementation="eager")
    forward = forward_patch(module)
    assert forward is not None
    found = forward(config, module, x, key_value_states=others)[0]
    torch.testing.assert_close(found, module(x, key_value_states=others)[0])
