"""A tiny model with a router, as PAW's checkpoints have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headrace.models import registry
from support.runner.sparse_world import BLOCK, MAX_LEN, elastic, model, spec_of

CONFIG: dict[str, Any] = {
    "architectures": ["PawQwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": MAX_LEN,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "retrieval_mode": "xattn",
    "toggle_type": "streaming",
    "sink_size": 1,
    "local_window_size": BLOCK + 1,
    "pooling_mode": "ctx_q",
    "use_softmax": True,
    "enable_ada_sparsity": True,
    "xattn_stride": 16,
    "xattn_threshold": 0.6,
    "xattn_norm": 1,
    "block_size": BLOCK,
    "suggested_sparsity": 0.5,
    "topk_k": 2048,
    "erank_analysis_path": None,
}


def tensors(architecture: str = "PawQwen3ForCausalLM") -> dict[str, torch.Tensor]:
    """A checkpoint of the tiny model, with what training leaves in it."""
    made = model(spec_of(architecture, elastic("xattn", "streaming")))
    table, parameters = registry.name_table(made.spec), dict(made.named_parameters())
    found = {name: part.view(parameters[part.parameter]).contiguous().clone() for name, part in table.items()}
    for layer in range(2):
        here = f"model.layers.{layer}.self_attn"
        found[f"{here}.mask_allocator.log_temp"] = torch.zeros(())
        found[f"{here}.attn_mask_log_alphas"] = torch.zeros(3)
    found["model.layers.0.self_attn.mask_allocator.task_embedding.weight"] = torch.zeros(4, 16)
    found["model.sparsity_lambda_1"] = found["model.sparsity_lambda_2"] = torch.zeros(1)
    found["model.sparsity_lambda1_task"] = found["model.sparsity_lambda2_task"] = torch.zeros(5)
    return {name: tensor.clone() for name, tensor in found.items()}


def write(folder: Path, weights: dict[str, torch.Tensor], **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(weights, folder / "model.safetensors")
    return folder
