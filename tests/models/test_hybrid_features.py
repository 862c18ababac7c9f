"""What runs beside state layers: adapters and integers of their projections, chunks of any size, samples, sleep, pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.models.adapters import merged, write_adapter
from support.models.cases import greedy, prompt
from support.models.hybrids import CASES, pair

from headrace import LLM, LoRARequest, SamplingParams
from headrace.errors import ConfigError

from .test_hybrid_engine import UNSAVED

STEPS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
KINDS = ["qwen3.5", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3-next", "bamba", "lfm2", "falcon-h1"))]
"""Each kind of state, and of projections."""


def engine(folder: Path, **options: Any) -> LLM:
    usual = {"dtype": "float32", "max_model_len": 512, "num_threads": 1, "kv_cache_memory": 4 << 20}
    return LLM(str(folder), skip_tokenizer_init=True, **usual | options)


def tokens_of(llm: LLM, prompts: list[list[int]], **options: Any) -> list[list[list[int]]]:
    outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], options.pop("params", GREEDY), **options)
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


def projections(folder: Path) -> list[str]:
    """Names of the matrices of mixers, without their layers."""
    stored = load_file(folder / "model.safetensors")
    paths = [name.removesuffix(".weight") for name, tensor in stored.items() if name.endswith(".weight") and tensor.dim() == 2]
    mixers = [
        path for path in paths if path.count(".") > 3 and path.split(".")[3] in ("linear_attn", "mamba", "conv", "self_attn")
    ]
    return sorted({path.rpartition(".")[2] for path in mixers})


@pytest.mark.parametrize("name", KINDS)
def test_adapters_change_state_layers_and_keep_states_apart(name: str, tmp_path: Path) -> None:
    """Alone, and beside the base's prompts in one batch; neither finds the other's snapshots."""
    theirs, _ = pair(name)
    theirs.save_pretrained(base := tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "adapter", target_modules=projections(base))
    request, tokens = LoRARequest("one", lora_path=str(adapter)), prompt(100)
    own, adapted = greedy(theirs, tokens, STEPS)[0], greedy(merged(base, adapter), tokens, STEPS)[0]
    assert own != adapted
    with engine(base, enable_lora=True) as llm:
        for cached in (0, 64):
            outputs = llm.generate([{"prompt_token_ids": tokens}] * 2, GREEDY, lora_request=[None, request])
            assert [list(output.outputs[0].token_ids) for output in outputs] == [own, adapted]
            assert [output.num_cached_tokens for output in outputs] == [cached] * 2
        llm.check_integrity()


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("name", KINDS)
def test_projections_of_state_layers_are_integers(name: str, bits: str, tmp_path: Path) -> None:
    """In chunks of two sizes, cold and found, their answers are the same."""
    theirs, _ = pair(name)
    theirs.save_pretrained(tmp_path)
    prompts, said = [prompt(70), prompt(13)], []
    for budget in (128, 66):
        with engine(tmp_path, quantization=bits, max_num_batched_tokens=budget, max_num_seqs=2) as llm:
            said.append((tokens_of(llm, prompts), tokens_of(llm, prompts)))
            lines = {line.name: line.value for line in llm.info.decisions if line.name.startswith("format of ")}
            mixers = [held for where, held in lines.items() if ".in_proj" in where or ".out_proj" in where]
            assert len(mixers) == 2 and all(held.startswith(f"{bits[3]} bits") for held in mixers), lines
    assert len({str(tokens) for pairs in said for tokens in pairs}) == 1
    if bits == "int8":
        assert said[0][0][0][0][0] == greedy(theirs, prompts[0], 1)[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in UNSAVED])
def test_chunks_of_any_size_and_samples_say_what_transformers_says(name: str, tmp_path: Path) -> None:
    theirs, _ = pair(name)
    theirs.save_pretrained(tmp_path)
    prompts = [prompt(length) for length in (1, 63, 64, 65, 130, 200)]
    wanted = [[greedy(theirs, one, STEPS)[0]] for one in prompts]
    both = [[tokens[0]] * 2 for tokens in wanted]
    for budget in (64, 65, 128, 191, 512):
        with engine(tmp_path, max_num_batched_tokens=budget, max_num_seqs=4, kv_cache_memory=8 << 20) as llm:
            assert tokens_of(llm, prompts) == wanted
            forks = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, n=2)
            for _ in range(2):
                assert tokens_of(llm, prompts, params=forks) == both
            llm.check_integrity()


def test_a_model_that_slept_says_the_same(tmp_path: Path) -> None:
    """The memory of its states was another's in between."""
    theirs, _ = pair("lfm2")
    theirs.save_pretrained(tmp_path)
    with engine(tmp_path) as llm:
        before = tokens_of(llm, [prompt(100)])
        llm.sleep(level=1)
        llm.wake_up()
        (output,) = llm.generate([{"prompt_token_ids": prompt(100)}], GREEDY)
        assert [[list(output.outputs[0].token_ids)]] == before and output.num_cached_tokens == 0
        llm.check_integrity()


def test_a_cache_without_room_for_a_state_is_refused_with_numbers(tmp_path: Path) -> None:
    theirs, _ = pair("bamba")
    theirs.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"one sequence of 512 tokens needs 188 KiB of KV cache"):
        engine(tmp_path, kv_cache_memory=16 << 10)


def test_more_sequences_than_states_fit_wait_and_the_report_says_so(tmp_path: Path) -> None:
    theirs, _ = pair("bamba")
    theirs.save_pretrained(tmp_path)
    with engine(tmp_path, max_model_len=64, kv_cache_memory=200 << 10, max_num_seqs=16) as llm:
        (line,) = [line for line in llm.info.decisions if line.name == "states of all sequences"]
        assert line.value == "474 KiB" and line.reason.endswith("that there are: at most 5 run at a time, others wait")
        prompts = [prompt(20 + length) for length in range(8)]
        assert tokens_of(llm, prompts) == [[greedy(theirs, one, STEPS)[0]] for one in prompts]
        llm.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3.5", "lfm2"])
def test_shared_parts_and_turns_are_found_from_the_third_prompt_on(name: str, tmp_path: Path) -> None:
    """Of 1,500 shared tokens 1,472 are reused: the largest multiple of 64. Answers are those of an empty cache."""
    theirs, _ = pair(name)
    theirs.save_pretrained(tmp_path)
    shared = prompt(1500)
    branches = [[*shared, *prompt(700, seed)] for seed in range(1, 6)]
    with engine(tmp_path, max_model_len=2600, max_num_batched_tokens=512, kv_cache_memory=64 << 20) as llm:

        def ask(tokens: list[int]) -> tuple[int, list[int]]:
            (output,) = llm.generate([{"prompt_token_ids": tokens}], GREEDY)
            return output.num_cached_tokens or 0, list(output.outputs[0].token_ids)

        asked = [(tokens, *ask(tokens)) for tokens in branches]
        assert [found for _, found, _ in asked] == [0, 0, 1472, 1472, 1472]
        for turn in range(3):
            for tokens, _, answer in asked[:2]:
                later = [*tokens, *answer, *prompt(100, 9 + turn)]
                asked.append((later, *ask(later)))
                assert asked[-1][1] >= len(tokens) // 64 * 64
        stats = llm.stats
        assert stats.state_snapshots_saved["branch"] == 1 and not stats.state_snapshots_skipped
        for tokens, _, answer in asked:
            llm.reset_prefix_cache()
            assert ask(tokens) == (0, answer)
