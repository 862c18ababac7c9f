"""Hybrids, indexers and chunked attention with what an engine offers: samples, constraints, steps ahead of their results."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import hybrids, indexed
from support.models.cases import LLAMA4, SMALL, greedy
from support.models.hybrids import redraw
from support.models.tiny_llama import VOCAB, write_tokenizer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from headrace import LLM, SamplingParams
from headrace.model_spec import StateGroup, layer_kv
from headrace.models import registry
from headrace.outputs import RequestOutput
from headrace.sampling_params import StructuredOutputsParams

STEPS = 6
CASES = {
    name: (hybrids.CASES | indexed.CASES)[name]
    for name in (
        *("qwen3-next", "qwen3.5", "qwen3.5-moe", "nemotron-h-experts", "granite-moe", "lfm2", "lfm2-moe", "kimi-linear"),
        *("olmo-hybrid-even", "bamba", "falcon-h1", "minimax", "v3.2", "axk2", "glm-dsa", "minimax-m3", "dots3"),
    )
} | {"llama4": ("llama4_text", SMALL | LLAMA4 | {"attention_chunk_size": 24})}
QUICK = ("llama4",)
PROMPTS = [[(7 * token + 3 * length) % 250 for token in range(length)] for length in (13, 70, 150)]
GREEDY = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
FORKS = SamplingParams(n=3, seed=3, max_tokens=STEPS, ignore_eos=True)
HELD = SamplingParams(
    temperature=0, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[0-9]{3}-[a-z]{2}"), ignore_eos=False
)
REQUESTS = [*((tokens, GREEDY) for tokens in PROMPTS), (PROMPTS[1], FORKS), (PROMPTS[0], HELD)]
WAYS: dict[str, dict[str, Any]] = {
    "small chunks": {"max_num_batched_tokens": 66, "max_num_seqs": 2},
    "overlap": {"pipeline_depth": 2, "max_num_batched_tokens": 128},
    "overlap in small chunks": {"pipeline_depth": 3, "max_num_batched_tokens": 67, "max_num_seqs": 3},
}


def asked(llm: LLM, requests: Iterable[tuple[list[int], SamplingParams]]) -> list[RequestOutput]:
    tokens, params = zip(*requests, strict=True)
    return llm.generate([{"prompt_token_ids": one} for one in tokens], list(params))


def tokens_of(outputs: Iterable[RequestOutput]) -> list[list[list[int]]]:
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


def saved(name: str, folder: Path) -> PreTrainedModel:
    """A model whose folder has a tokenizer, too."""
    kind, values = CASES[name]
    torch.manual_seed(1)
    theirs = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**values | {"vocab_size": VOCAB})).float().eval()
    redraw(theirs)
    theirs.save_pretrained(folder)
    write_tokenizer(folder)
    theirs.config._experts_implementation = "eager"
    return theirs


families = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)


@families
def test_answers_are_the_same_however_they_come_about(name: str, tmp_path: Path) -> None:
    """Greedy samples equal transformers'; others equal those of a whole prompt alone. Both hold cold and from cached blocks."""
    theirs = saved(name, tmp_path)
    options = {"dtype": "float32", "max_model_len": 256, "num_threads": 1, "kv_cache_memory": 8 << 20}
    with LLM(str(tmp_path), **options) as llm:
        one_by_one = [asked(llm, [request])[0] for request in REQUESTS]
    expected = tokens_of(one_by_one)
    assert [samples[0] for samples in expected[:3]] == [greedy(theirs, tokens, STEPS)[0] for tokens in PROMPTS]
    assert one_by_one[4].outputs[0].finish_reason == "stop" and one_by_one[4].outputs[0].text[3] == "-"
    for way, changes in WAYS.items():
        with LLM(str(tmp_path), **options | changes) as llm:
            for cached in (False, True):
                outputs = asked(llm, REQUESTS)
                assert tokens_of(outputs) == expected, way
                assert bool(outputs[2].num_cached_tokens) == cached
            llm.check_integrity()


@families
@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_samples_say_what_transformers_says(name: str, depth: int, tmp_path: Path) -> None:
    """Pairs of samples whose KV and states do not fit together. Those who come again find what the others left, if anything."""
    theirs = saved(name, tmp_path)
    spec = registry.model_spec(theirs.config)
    block = 16 * sum(layer_kv(layer, "float32").bytes_per_token for layer in spec.layers)
    state = StateGroup(tuple(one.planes("float32", "float32") for one in spec.states)).block_bytes if spec.states else 0
    prompts = [[(7 * token + 3 * length) % 250 for token in range(length)] for length in (20, 33, 47, 60, 70)]
    pairs = [[greedy(theirs, tokens, 30)[0]] * 2 for tokens in prompts]
    requests = [(tokens, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, n=2)) for tokens in prompts]
    options = {"dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 80, "num_threads": 1}
    with LLM(str(tmp_path), kv_cache_memory=12 * block + 6 * state, pipeline_depth=depth, **options) as llm:
        for preempted in range(2):
            assert tokens_of(asked(llm, requests)) == pairs
            assert llm.stats.num_preemptions > preempted
        llm.check_integrity()


@families
def test_new_weights_and_logprobs_of_prompts_are_transformers(name: str, tmp_path: Path) -> None:
    """Nothing that older weights computed is found; a prompt with logprobs is computed whole, and found later."""
    theirs, tokens = saved(name, tmp_path), PROMPTS[2]
    options = {"dtype": "float32", "max_model_len": 256, "num_threads": 1, "kv_cache_memory": 8 << 20}
    with LLM(str(tmp_path), max_num_batched_tokens=100, **options) as llm:
        before = tokens_of(asked(llm, [(tokens, GREEDY)]))
        redraw(theirs)
        theirs.tie_weights()
        llm.update_weights(theirs.state_dict())
        (output,) = asked(llm, [(tokens, GREEDY)])
        wanted = [greedy(theirs, tokens, STEPS)[0]]
        assert tokens_of([output]) == [wanted] != before and output.num_cached_tokens == 0
        llm.reset_prefix_cache()
        for found in (False, True):
            (output,) = asked(llm, [(tokens, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))])
            assert output.prompt_logprobs is not None and not output.num_cached_tokens
            with torch.no_grad():
                logprobs = theirs(torch.tensor([tokens])).logits[0].log_softmax(-1)
            for place, entry in enumerate(output.prompt_logprobs[1:]):
                assert entry is not None
                assert entry[tokens[place + 1]].logprob == pytest.approx(logprobs[place, tokens[place + 1]].item(), abs=2e-4)
            assert found or asked(llm, [([*tokens, 3], GREEDY)])[0].num_cached_tokens
        llm.check_integrity()
