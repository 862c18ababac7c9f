"""Hybrid models through the whole engine: checkpoints that transformers saves, prompts in chunks, snapshots, preemption."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models.cases import greedy, prompt
from support.models.hybrids import CASES, pair

from headrace import LLM, SamplingParams

STEPS = 8
QUICK = ("qwen3.5-moe",)
UNSAVED = ("olmo-hybrid", "qwen3.5-pictures", "qwen3.5-moe-pictures")
"""transformers saves the parts of the first one's convolution as thirds, whatever their widths; the others lack processors."""


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in UNSAVED]
)
def test_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    theirs, _ = pair(name)
    theirs.save_pretrained(tmp_path)
    options = {"dtype": "float32", "max_model_len": 512, "max_num_batched_tokens": 128, "num_threads": 1}
    llm = LLM(str(tmp_path), kv_cache_memory=4 << 20, skip_tokenizer_init=True, **options)
    sampling = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    long = prompt(200)
    for prompts, cached in (([prompt(13), prompt(30), long], [0, 0, 0]), ([[*long, 5, 6], [*long[:150], 7]], [192, 0])):
        outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], sampling)
        for tokens, output, hit in zip(prompts, outputs, cached, strict=True):
            assert list(output.outputs[0].token_ids) == greedy(theirs, tokens, STEPS)[0]
            assert output.num_cached_tokens == hit
    llm.check_integrity()
    llm.close()


@pytest.mark.slow
def test_replicas_are_sent_the_prompts_whose_states_they_have(tmp_path: Path) -> None:
    theirs, _ = pair("qwen3.5")
    theirs.save_pretrained(tmp_path)
    options = {"dtype": "float32", "max_model_len": 512, "num_threads": 2, "skip_tokenizer_init": True}
    sampling = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    begun = [[token % 250 + shift for token in prompt(200)] for shift in range(4)]
    with LLM(str(tmp_path), data_parallel_size=2, kv_cache_memory=8 << 20, **options) as llm:
        for tail, cached in ((1, 0), (2, 192), (3, 192)):
            prompts = [[*tokens, tail] for tokens in begun]
            outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], sampling)
            assert [output.num_cached_tokens for output in outputs] == [cached] * 4
            for tokens, output in zip(prompts, outputs, strict=True):
                assert list(output.outputs[0].token_ids) == greedy(theirs, tokens, STEPS)[0]
