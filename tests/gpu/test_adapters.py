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


def generate(folder: Path, device: str, names: list[Path | None]) -> list[tuple[list[int], torch.Tensor]]:
    """Returns the tokens of each prompt with its adapter, and their logprobs."""
    adapters = [None if name is None else LoRARequest(name.name, lora_path=str(name)) for name in names]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1, detokenize=False)
    options = {"enable_lora": any(names), "max_loras": 2, "max_lora_rank": 4, "num_kv_blocks": 80, "skip_tokenizer_init": True}
    with LLM(str(folder), dtype="float32", device=device, max_num_seqs=8, **options) as llm:  # type: ignore[arg-type]
        samples = [output.outputs[0] for output in llm.generate(PROMPTS, params, lora_request=adapters)]
    pairs = [zip(sample.logprobs, sample.token_ids, strict=True) for sample in samples]
    return [
        (list(sample.token_ids), torch.tensor([entry[token].logprob for entry, token in own]))
        for sample, own in zip(samples, pairs, strict=True)
    ]


@pytest.mark.parametrize("device", [CUDA])
def test_experts_equal_merged_weights(folder_of: Callable[[str], Path], device: str, tmp_path: Path) -> None:
    base = folder_of(EVERY_EXPERT)
    merged: dict[Path | None, Path] = {None: base}
    for name in ("one", "other"):
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        merged[tmp_path / name] = tmp_path / f"merged-{name}"
        write_expert_adapter(model, tmp_path / name).save_pretrained(merged[tmp_path / name])
    names = [*merged] * 2
    given, plain = generate(base, device, names), generate(base, device, [None] * len(PROMPTS))
    for name, folder in merged.items():
        expected = plain if name is None else generate(folder, device, [None] * len(PROMPTS))
        for place in [place for place, own in enumerate(names) if own == name]:
            (tokens, logprobs), (others, wanted) = given[place], expected[place]
            assert tokens == others
            torch.testing.assert_close(logprobs, wanted, atol=2e-4, rtol=0)
            assert name is None or not torch.allclose(logprobs, plain[place][1], atol=1e-2)
