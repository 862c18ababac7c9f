"""Tiny models, and their weights written to files of every kind."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, PretrainedConfig

from headrace.config import Decision
from headrace.model_spec import ModelSpec
from headrace.models import registry
from headrace.sources.files import ModelFiles
from headrace.weights.load import planned_formats
from headrace.weights.report import LoadReport

SIZES = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def config(kind: type[PretrainedConfig] = LlamaConfig, **changes: object) -> PretrainedConfig:
    architecture = kind.__name__.replace("Config", "ForCausalLM")
    return kind(architectures=[architecture], **{**SIZES, **changes})


def spec(hf_config: PretrainedConfig) -> ModelSpec:
    return registry.model_spec(hf_config)


def tensors(hf_config: PretrainedConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights under Hugging Face's names."""
    model = registry.build(spec(hf_config), "float32", "cpu")
    table = registry.name_table(model.spec)
    parameters = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 0.02 * torch.randn(part.view(parameters[part.parameter]).shape, generator=generator)
        for name, part in table.items()
    }


def planned(hf_config: PretrainedConfig, found: ModelFiles, quantization: str, dtype: str = "bfloat16") -> list[Decision]:
    """Returns the decisions that loading on a CPU would report, without loading."""
    model = registry.build(spec(hf_config), dtype, "meta")
    cpu = torch.device("cpu")
    return list(planned_formats(model, registry.name_table(model.spec), found, device=cpu, quantization=quantization))


def without_errors(report: LoadReport) -> list[Decision]:
    errors = ("; no rounding of weights", "; relative error at most ")
    return [
        Decision(one.name, one.value, min((one.reason.partition(error)[0] for error in errors), key=len))
        for one in report.decisions
    ]


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.data for name, parameter in model.named_parameters()}


def expected_parameters(hf_config: PretrainedConfig, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the parameters that the model must hold, put together by hand."""
    table = registry.name_table(spec(hf_config))
    return {parameter: torch.cat([weights[name] for name in table.names(parameter)]) for parameter in table.parameters()}


def files(hf_config: PretrainedConfig, kind: str, weight_files: list[Path]) -> ModelFiles:
    directory = weight_files[0].parent if weight_files else Path()
    return ModelFiles(
        name="test",
        kind=kind,
        directory=directory,
        weight_files=weight_files,
        config=hf_config,
        generation_config={"eos_token_id": []},
    )


def write_safetensors(folder: Path, weights: Mapping[str, torch.Tensor], shards: int = 1) -> list[Path]:
    names = list(weights)
    paths = [folder / f"model-{shard:05}.safetensors" for shard in range(shards)]
    for shard, path in enumerate(paths):
        save_file({name: weights[name].contiguous() for name in names[shard::shards]}, path)
    return paths


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as GGUF's converter for the Llama family stores them: the two halves of a head interleaved."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    """Maps a name by a table of the test's own, not the loader's."""
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    if name == "lm_head.weight":
        return "output.weight"
    _, _, layer, *rest, kind = re.sub(r"\.experts\.\d+\.", ".experts.", name).split(".")
    parts = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "mlp.gate": "ffn_gate_inp",
        "mlp.experts.gate_proj": "ffn_gate_exps",
        "mlp.experts.up_proj": "ffn_up_exps",
        "mlp.experts.down_proj": "ffn_down_exps",
    }
    return f"blk.{layer}.{parts['.'.join(rest)]}.{kind}"


def write_gguf(
    path: Path,
    arch: str,
    weights: Mapping[str, torch.Tensor],
    encode: Callable[[str, np.ndarray], tuple[np.ndarray, gguf.GGMLQuantizationType]],
) -> Path:
    """Args: encode: (name, rows as GGUF orders them) -> raw data and its type; vectors stay F32. Experts are stacked."""
    writer = gguf.GGUFWriter(path, arch)
    experts: dict[str, list[np.ndarray]] = {}
    kinds: dict[str, gguf.GGMLQuantizationType] = {}
    for name, tensor in weights.items():
        rows = tensor.numpy()
        if arch == "llama" and ".q_proj." in name:
            rows = permuted(rows, SIZES["num_attention_heads"])
        if arch == "llama" and ".k_proj." in name:
            rows = permuted(rows, SIZES["num_key_value_heads"])
        data, kind = encode(name, rows) if rows.ndim == 2 else (rows, gguf.GGMLQuantizationType.F32)
        if ".experts." in name:
            experts.setdefault(gguf_name(name), []).append(data)
            kinds[gguf_name(name)] = kind
            continue
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(data), raw_dtype=kind)
    for name, each in experts.items():
        writer.add_tensor(name, np.stack(each), raw_dtype=kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
