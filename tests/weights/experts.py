"""Models whose experts are quantised in the formats of checkpoints, and what to compare once they are loaded."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.models.harness import Bench
from support.models.packers import Rounded, words
from transformers import GptOssConfig, PretrainedConfig, Qwen3MoeConfig

from headrace.layers.moe import Experts
from headrace.models import registry
from headrace.models.decoder import Decoder
from headrace.models.kinds import model_tensors, own_weights
from headrace.models.update import update_plan
from headrace.parallel.layout import ParallelSizes, shard_model
from headrace.quant.experts import CodedExperts
from headrace.quant.native_experts import NativeExperts
from headrace.weights.load import load_weights
from headrace.weights.report import LoadReport

from .models import files, tensors

INNER = 192
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": INNER}
QWEN = {"num_experts": 4, **ROUTED}
DEEPSEEK = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    **ROUTED,
}

Packed = dict[str, torch.Tensor]


def tiles(weight: torch.Tensor, tile: tuple[int, int], name: str = "weight_scale_inv") -> Packed:
    rows, columns = weight.shape
    grid = -(-rows // tile[0]), -(-columns // tile[1])
    scales = (0.5 + torch.rand(grid, generator=torch.Generator().manual_seed(rows))) * 2e-4
    return {"weight": (weight * 4000).clamp(-448, 448).to(torch.float8_e4m3fn), name: scales}


def integers(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales."""
    made = Rounded(*weight.shape, group=group)
    return made.codes, made.scales


def gptq(weight: torch.Tensor) -> Packed:
    return Rounded(*weight.shape, zero=8).gptq()


def ordered(weight: torch.Tensor) -> Packed:
    """With inputs in the opposite order."""
    return Rounded(*weight.shape, zero=8, order=torch.arange(weight.shape[1]).flip(0) // 32).gptq()


def packed(weight: torch.Tensor, group: int = 64) -> Packed:
    codes, scales = integers(weight, group)
    return {"weight_packed": words(codes, 4), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}


def pairs(weight: torch.Tensor) -> Packed:
    codes, scales = integers(weight, 64)
    signed = (codes - 8).to(torch.int8)
    both = (signed[:, ::2] & 15) | (signed[:, 1::2] << 4)
    return {
        "weight": both,
        "weight_scale_inv": scales.bfloat16(),
        "input_scale": torch.tensor(0.02 + weight.std().item() / 100),
    }


def in_groups(group: int) -> tuple[dict[str, Any], Callable[[torch.Tensor], Packed]]:
    """compressed-tensors, 4 bits."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": True}
    groups = {"g": {"targets": ["Linear"], "weights": weights}}
    scheme = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    return scheme, functools.partial(packed, group=group)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
ACT_ORDER = GPTQ | {"desc_act": True}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Packed]]] = {
    "blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, lambda weight: tiles(weight, (128, 128))),
    "outputs": ({"quant_method": "fbgemm_fp8"}, lambda weight: tiles(weight, (1, weight.shape[1]), "weight_scale")),
    "tensor": ({"quant_method": "fp8"}, lambda weight: tiles(weight, tuple(weight.shape), "weight_scale")),
    "gptq": (GPTQ, gptq),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64}, lambda weight: Rounded(*weight.shape, group=64).awq()),
    "packed": in_groups(64),
    "w4afp8": ({"quant_method": "w4afp8", "group_size": 64}, pairs),
}
ROUNDED = {"blocks", "outputs", "tensor", "w4afp8"}
"""Formats with rounded activations."""


def saved(folder: Path, kind: type[PretrainedConfig], changes: dict[str, Any], name: str) -> PretrainedConfig:
    """Saves a model whose experts are quantised, and all else is floats."""
    scheme, pack = FORMATS[name]
    architecture = "Qwen3MoeForCausalLM" if kind is Qwen3MoeConfig else "DeepseekV3ForCausalLM"
    hf_config = kind(architectures=[architecture], **{**SIZES, **changes}, quantization_config=scheme)
    held: Packed = {}
    for full, tensor in tensors(hf_config).items():
        module = full.removesuffix(".weight")
        if ".experts." not in full:
            held[full] = tensor
            continue
        held |= {f"{module}.{leaf}": one.contiguous() for leaf, one in pack(tensor).items()}
    save_file(held, folder / "model.safetensors")
    return hf_config


def saved_gpt_oss(folder: Path) -> PretrainedConfig:
    hf_config = GptOssConfig(
        architectures=["GptOssForCausalLM"],
        **{**SIZES, "intermediate_size": INNER},
        num_local_experts=4,
        num_experts_per_tok=2,
        quantization_config={"quant_method": "mxfp4"},
    )
    generator = torch.Generator().manual_seed(0)
    held: Packed = {}
    for name, tensor in tensors(hf_config).items():
        if name.endswith("_proj") and ".experts." in name:
            outputs, inputs = tensor.shape[1:]
            held[f"{name}_blocks"] = torch.randint(
                0, 256, (4, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8
            )
            exponents = torch.randint(117, 123, (4, outputs, inputs // 32), generator=generator)
            held[f"{name}_scales"] = exponents.to(torch.uint8)
        else:
            held[name] = tensor
    save_file(held, folder / "model.safetensors")
    return hf_config


def loaded(
    hf_config: PretrainedConfig, folder: Path, quantization: str, rank: int = 0, **sizes: Any
) -> tuple[Decoder, LoadReport]:
    spec = registry.model_spec(hf_config)
    if sizes:
        spec = shard_model(spec, rank, ParallelSizes(**sizes))
    model = registry.build(spec, "float32", "cpu", to_load=True)
    found = files(hf_config, "safetensors", [folder / "model.safetensors"])
    device = torch.device("cpu")
    return model, load_weights(model, registry.name_table(spec), found, device=device, quantization=quantization)


def same_experts(
    held: Decoder, floats: Decoder, method: type[CodedExperts | NativeExperts], tolerance: float = 0.0
) -> list[Experts]:
    """The codes mean the numbers that are read as floats, up to ``tolerance`` of a matrix's largest number."""
    found = []
    for path, theirs in floats.named_modules():
        if isinstance(theirs, Experts):
            ours = held.get_submodule(path)
            assert isinstance(ours, Experts) and isinstance(ours.method, method)
            assert not any(name in ours.shapes for name, _ in ours.named_parameters())
            for matrix in theirs.shapes:
                exact = theirs.get_parameter(matrix)
                error = (ours.method.dequantize(ours, matrix) - exact).abs().max()
                assert error <= tolerance * exact.abs().max(), (path, matrix)
            found.append(ours)
    assert found
    return found


def rounding_errors(held: Decoder, floats: Decoder) -> list[float]:
    """Relative errors of experts that were rounded while they were loaded, which the report bounds."""
    errors = []
    for path, theirs in floats.named_modules():
        if isinstance(theirs, Experts):
            ours = held.get_submodule(path)
            for matrix in theirs.shapes:
                meant, rounded = theirs.get_parameter(matrix), ours.method.dequantize(ours, matrix)
                errors.append(float((rounded - meant).norm() / meant.norm()))
                assert errors[-1] <= ours.method.error() * 1.1
    return errors


def same_answers(held: Decoder, floats: Decoder, bound: float) -> None:
    prompts = [[5, 17, 3, 60, 44, 9, 12], [8]]
    expected, found = (Bench(model).generate(prompts, 1)[1] for model in (floats, held))
    for ours, theirs in zip(found, expected, strict=True):
        error = (ours - theirs).norm() / theirs.norm()
        assert error <= bound, float(error)


def with_heads(hf_config: PretrainedConfig, folder: Path, changes: dict[str, int]) -> PretrainedConfig:
    """The same experts in a model with other heads."""
    held = load_file(folder / "model.safetensors")
    fields = json.loads(hf_config.to_json_string(use_diff=False))
    other = type(hf_config)(**fields | changes)
    experts = {name: one for name, one in held.items() if ".experts." in name}
    rest = {name: one for name, one in tensors(other).items() if ".experts." not in name}
    save_file(experts | rest, folder / "model.safetensors")
    return other


def read_again(model: Decoder, hf_config: PretrainedConfig, folder: Path) -> None:
    """Drops all weights, reads the files again, and compares every bit."""
    before = {name: one.clone().flatten().view(torch.uint8) for name, one in model.named_buffers()}
    dropped = model_tensors(model).weights
    for one in dropped:
        one.untyped_storage().fill_(0)
    codes = [one for name, one in model.named_buffers() if "experts" in name and name.endswith(("codes", "packed", "scales"))]
    assert codes and {one.data_ptr() for one in codes} <= {one.data_ptr() for one in dropped}
    source = own_weights(model, files(hf_config, "safetensors", [folder / "model.safetensors"]), 0, torch.device("cpu"))
    update = update_plan(model, source.facts)
    for full, tensor in source.tensors():
        update.put(full, tensor)
    update.finish()
    source.close()
    assert not update.unwritten(update.written)
    for leaf, one in model.named_buffers():
        assert torch.equal(before[leaf], one.flatten().view(torch.uint8)), leaf
