"""Adapters on a device: sequences get what merged weights give, whatever else is in their steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.models.adapters import write_expert_adapter
from transformers import AutoModelForCausalLM

from headrace import LLM, LoRARequest, SamplingParams

from .conftest import CUDA
from .tiny import EVERY_EXPERT

PROMPTS = [{"prompt_token_ids": list(range(3 + n, 12 + 6 * n))} for n in range(6)]


def engine(folder: Path, device: str, **options: object) -> LLM:
    sizes = {"max_model_len": 96, "max_num_seqs": 8, "num_kv_blocks": 80}
    return LLM(str(folder), dtype="float32", device=device, skip_tokenizer_init=True, **sizes, **options)


def generate(llm: LLM, names: list[Path | None]) -> list[tuple[list[int], torch.Tensor]]:
    """Returns the tokens of each prompt with its adapter, and their logprobs."""
    adapters = [None if name is None else LoRARequest(name.name, lora_path=str(name)) for name in names]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1, detokenize=False)
    samples = [output.outputs[0] for output in llm.generate(PROMPTS, params, lora_request=adapters)]
    pairs = [zip(sample.logprobs, sample.token_ids, strict=True) for sample in samples]
    return [
        (list(sample.token_ids), torch.tensor([entry[token].logprob for entry, token in own]))
        for sample, own in zip(samples, pairs, strict=True)
    ]


@pytest.mark.parametrize("device", [CUDA])
def test_experts_equal_merged_weights(folder_of: Callable[[str], Path], device: str, tmp_path: Path) -> None:
    base, one, other = folder_of(EVERY_EXPERT), tmp_path / "one", tmp_path / "other"
    for adapter in (one, other):
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        write_expert_adapter(model, adapter).save_pretrained(tmp_path / f"merged-{adapter.name}")
    names = [None, one, other] * 2
    with engine(base, device, enable_lora=True, max_loras=2, max_lora_rank=4) as llm:
        given, plain = generate(llm, names), generate(llm, [None] * len(PROMPTS))
    with engine(tmp_path / "merged-one", device) as llm:
        merged = generate(llm, [None] * len(PROMPTS))
    for name, (tokens, logprobs), (kept, unchanged), (others, wanted) in zip(names, given, plain, merged, strict=True):
        if name != other:
            assert tokens == (kept if name is None else others)
            torch.testing.assert_close(logprobs, unchanged if name is None else wanted, atol=2e-4, rtol=0)
        assert name == one or not torch.allclose(logprobs, wanted, atol=1e-2)
