"""Llama 4 through the whole engine: attention in chunks, whose KV goes when the next chunk begins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models.cases import LLAMA4, SMALL, VISION, VOCAB, greedy, pair, prompt
from support.models.harness import copy_weights
from transformers import Llama4Config, Llama4ForCausalLM, Llama4ForConditionalGeneration, Llama4TextConfig

from headrace import LLM, SamplingParams
from headrace.errors import ConfigError
from headrace.models import registry

STEPS = 8
SAMPLING = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama4")
    torch.manual_seed(3)
    theirs = Llama4ForCausalLM(Llama4TextConfig(**SMALL | LLAMA4 | {"attention_chunk_size": 24})).eval()
    for parameter in theirs.parameters():
        parameter.data += 0.15 * torch.randn_like(parameter)
    theirs.save_pretrained(folder)
    return folder


def test_tokens_equal_transformers(folder: Path) -> None:
    """Cold and found, in chunks of prompts that cut those of attention anywhere, with a cache for two of the long ones."""
    theirs = Llama4ForCausalLM.from_pretrained(folder).eval()
    prompts = [prompt(13), prompt(30), prompt(200), [*prompt(200)[:150], 7], [*prompt(200), 5, 6]]
    wanted = [greedy(theirs, tokens, STEPS)[0] for tokens in prompts]
    options = {"dtype": "float32", "max_model_len": 256, "max_num_batched_tokens": 38, "block_size": 8, "num_threads": 1}
    with LLM(str(folder), kv_cache_memory=160 << 10, skip_tokenizer_init=True, **options) as llm:
        assert [(line.window, line.chunked) for line in llm.info.layers] == [(24, True), (None, False), (24, True)]
        for found in (False, True):
            outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], SAMPLING)
            assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
            assert (outputs[2].num_cached_tokens > 100) == found
        llm.check_integrity()


def test_checkpoints_with_pictures_are_read_as_text() -> None:
    theirs, _ = pair("llama4")
    vision = {"image_size": 8, "projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16, **VISION}
    config = Llama4Config(text_config=SMALL | LLAMA4, vision_config=vision)
    ours = registry.build(registry.model_spec(config), "float32", "cpu")
    copy_weights(ours, Llama4ForConditionalGeneration(config).state_dict())
    assert ours.spec.layers == registry.model_spec(theirs.config).layers and ours.spec.vocab_size == VOCAB


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["sliding_attention", "full_attention", "full_attention"]}, "layer 0: layer_types"),
        ({"moe_layers": [1, 3]}, "there is no layer 3"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "layer 0: q and k are normed"),
        ({"floor_scale": 0}, "floor_scale must be a number above 0"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        registry.model_spec(Llama4TextConfig(**SMALL | LLAMA4 | changes))
