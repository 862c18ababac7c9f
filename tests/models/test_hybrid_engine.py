"""Hybrid models through the whole engine: checkpoints that transformers saves, prompts in chunks, snapshots, preemption."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models.cases import greedy, prompt
from support.models.hybrids import CASES, pair
from support.models.tiny_llama import VOCAB, write_tokenizer
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headrace import LLM, SamplingParams
from headrace.sampling_params import StructuredOutputsParams

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


def test_samples_and_constraints_answer_alike_from_a_snapshot(tmp_path: Path) -> None:
    """Four samples start from one state, also where the prompt is found; a constraint's answer ends where it has to."""
    kind, values = CASES["lfm2"]
    AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**values | {"vocab_size": VOCAB})).float().save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    request = {"prompt_token_ids": [token % 250 for token in prompt(100)]}
    four = SamplingParams(n=4, seed=3, max_tokens=6, ignore_eos=True)
    held = SamplingParams(
        temperature=0, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[0-9]{3}-[a-z]{2}"), ignore_eos=False
    )
    options = {"max_model_len": 160, "max_num_batched_tokens": 16, "max_num_seqs": 4, "num_threads": 1}
    with LLM(str(tmp_path), dtype="float32", **options) as llm:
        assert llm.info.max_num_batched_tokens == 64 + 4, "a chunk of a prompt beside every other sequence"
        for params in (four, held):
            llm.reset_prefix_cache()
            cold, found = llm.generate([request], params)[0], llm.generate([request], params)[0]
            assert (cold.num_cached_tokens, found.num_cached_tokens) == (0, 64)
            assert [one.token_ids for one in cold.outputs] == [one.token_ids for one in found.outputs]
        assert found.outputs[0].finish_reason == "stop" and found.outputs[0].text[3] == "-"
        llm.check_integrity()
