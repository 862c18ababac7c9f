"""Adapters of experts, in both of peft's forms: each sequence gets what merged weights give, whatever else is in its step."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from support.models.adapters import check_greedy, randomise, write_expert_adapter
from support.models.architectures import quiet
from support.models.cases import pair
from transformers import PreTrainedModel

from headrace import LLM, LoRARequest, SamplingParams

RANK, ALPHA = 3, 6


def write_stacked(base: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """peft's own form of adapters of parameters. Returns the merged model."""
    config = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    model = get_peft_model(copy.deepcopy(base), config)
    randomise(model)
    model.save_pretrained(folder)
    return model.merge_and_unload()


def test_experts_equal_merged_weights(tmp_path: Path) -> None:
    base = pair("qwen3-moe")[0]
    base.save_pretrained(tmp_path / "base")
    models = {
        None: base,
        "stacked": write_stacked(base, tmp_path / "stacked"),
        "apart": write_expert_adapter(base, tmp_path / "apart"),
    }
    requests = {name: None if name is None else LoRARequest(name, lora_path=str(tmp_path / name)) for name in models}
    arguments = {"enable_lora": True, "max_loras": 2, "device": "cpu", "num_kv_blocks": 80, "num_threads": 1}
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1, detokenize=False)
    names = ["stacked", None, "apart", "stacked"]
    prompts = [{"prompt_token_ids": torch.randint(0, base.config.vocab_size, (9 + n,)).tolist()} for n in range(len(names))]
    with quiet(), LLM(str(tmp_path / "base"), dtype="float32", skip_tokenizer_init=True, **arguments) as llm:
        outputs = llm.generate(prompts, params, lora_request=[requests[name] for name in names])
    for name, output in zip(names, outputs, strict=True):
        check_greedy(models[name], output)
