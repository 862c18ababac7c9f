"""Checkpoints of Megatron-core."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from support.models import megatron


def arguments(**changes: Any) -> argparse.Namespace:
    """What a training run writes down of itself, as far as it is about the model."""
    given = {
        "num_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "group_query_attention": True,
        "num_query_groups": 2,
        "kv_channels": 8,
        "ffn_hidden_size": 48,
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-5,
        "apply_layernorm_1p": False,
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "num_experts": None,
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "rotary_base": 10000,
        "max_position_embeddings": megatron.CONTEXT,
        "untie_embeddings_and_output_weights": True,
        "vocab_size": 90,
        "padded_vocab_size": megatron.VOCAB,
        "params_dtype": torch.float32,
        "tensor_model_parallel_size": 4,
        "recompute_granularity": "selective",
        "fp8": "hybrid",
        **changes,
    }
    return argparse.Namespace(**given)


def save(model: Any, folder: Path, **common: Any) -> None:
    """Megatron's own way to save, which asks for a CUDA device and for a process of its own."""
    from megatron.core import dist_checkpointing

    folder.mkdir(parents=True, exist_ok=True)
    queue = mock.patch("megatron.core.dist_checkpointing.strategies.filesystem_async._get_write_results_queue", _queue)
    with megatron.no_device_asked_for(), mock.patch("torch.cuda.synchronize"), queue:
        dist_checkpointing.save({"model": model.sharded_state_dict(), "iteration": 7, **common}, str(folder))


def _queue() -> Any:
    import queue

    return queue.Queue()
