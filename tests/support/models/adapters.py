"""LoRA adapters in peft's format, and the models that they make of a base."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from headrace.outputs import RequestOutput

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PREFIX = "base_model.model."


def write_adapter(base: Path, folder: Path, seed: int = 0, **config: Any) -> Path:
    """Writes a random adapter of a checkpoint, large enough to change its answers."""
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ALL} | config
    generator = torch.Generator().manual_seed(seed)
    layers, tensors = config.get("layers_to_transform"), {}
    for name, weight in sorted(load_file(base / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        layer = re.search(r"layers\.(\d+)\.", module)
        if module.rpartition(".")[2] in config["target_modules"] and (layers is None or int(layer[1]) in layers):
            rank = _by_pattern(config.get("rank_pattern", {}), module, config["r"])
            for part, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                tensors[f"{PREFIX}{module}.lora_{part}.weight"] = 0.1 * torch.randn(shape, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged(base: Path, adapter: Path | None) -> PreTrainedModel:
    """A checkpoint with an adapter merged into its weights; None: the checkpoint as it is."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if adapter is None:
        return model
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            alpha = _by_pattern(config.get("alpha_pattern", {}), module, config["lora_alpha"])
            scale = alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
            b = tensors[name.replace("lora_A", "lora_B")]
            model.get_submodule(module).weight.data += scale * b @ a
    return model


def _by_pattern(patterns: dict[str, float], module: str, default: float) -> Any:
    return next((value for pattern, value in patterns.items() if re.search(rf"(^|\.)({pattern})$", module)), default)


def logprobs(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """``[T, vocab]``: log-probabilities of the token after each."""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


def check_greedy(model: PreTrainedModel, output: RequestOutput) -> None:
    """The sampled tokens are the likeliest of the model, with its log-probabilities."""
    (sample,) = output.outputs
    expected = logprobs(model, [*output.prompt_token_ids, *sample.token_ids])[len(output.prompt_token_ids) - 1 : -1]
    assert list(sample.token_ids) == expected.argmax(-1).tolist()
    given = [entry[token].logprob for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)]
    assert torch.allclose(torch.tensor(given), expected.amax(-1), atol=1e-4)


def randomise(model: PreTrainedModel) -> None:
    """Gives peft's matrices values that change answers: B begins with zeros."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn_like(parameter)


def write_expert_adapter(base: PreTrainedModel, folder: Path, rank: int = 3, alpha: int = 6) -> PreTrainedModel:
    """Writes an adapter of some experts' matrices, as of models whose experts are modules. Returns the merged model."""
    merged, tensors = copy.deepcopy(base), {}
    for layer, block in enumerate(merged.model.layers):
        experts = block.mlp.experts
        inner = experts.down_proj.shape[2]
        for expert in (0, 2):
            views = {"gate_proj": experts.gate_up_proj[expert, :inner], "up_proj": experts.gate_up_proj[expert, inner:]}
            for name, weight in {**views, "down_proj": experts.down_proj[expert]}.items():
                a, b = 0.1 * torch.randn(rank, weight.shape[1]), 0.1 * torch.randn(weight.shape[0], rank)
                stem = f"{PREFIX}model.layers.{layer}.mlp.experts.{expert}.{name}"
                tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
                weight.data += alpha / rank * b @ a
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": alpha}))
    return merged
