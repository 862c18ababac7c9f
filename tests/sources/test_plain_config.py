"""Configurations read without transformers are what transformers reads."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headrace.errors import ConfigError
from headrace.models import registry
from headrace.sources.plain_config import REQUIRED, PlainConfig, in_transformers, plain_config

SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "gelu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
    "use_sliding_window": True,
    "sliding_window": 32,
    "max_window_layers": 2,
    "bos_token_id": 5,
    "eos_token_id": [6, 7],
    "pad_token_id": None,
    "decoder_sparse_step": 2,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "num_experts": 4,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
TYPES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}
ROPES: list[dict[str, Any]] = [
    {},
    {"rope_theta": 500000.0},
    {"rope_theta": 1000000, "rope_scaling": None},
    {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6}},
]
READ = [
    "architectures",
    "attention_bias",
    "decoder_sparse_step",
    "mlp_only_layers",
    "moe_intermediate_size",
    "norm_topk_prob",
    "num_experts",
    "num_experts_per_tok",
    "bos_token_id",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "pad_token_id",
    "pretraining_tp",
    "quantization_config",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "use_sliding_window",
    "vocab_size",
]


def spec_of(config: Any) -> object:
    try:
        return registry.model_spec(config)
    except ConfigError as error:
        return error.message


@given(
    kind=st.sampled_from(list(TYPES)),
    left_out=st.sets(st.sampled_from([name for name in SMALL if name not in REQUIRED])),
    rope=st.sampled_from(ROPES),
    windows=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_equals_what_transformers_reads(kind: str, left_out: set[str], rope: dict[str, Any], windows: bool) -> None:
    raw = {name: value for name, value in (SMALL | {"use_sliding_window": windows}).items() if name not in left_out}
    raw |= {"model_type": kind, "architectures": [f"{TYPES[kind]}ForCausalLM"], **rope}
    plain = plain_config(raw)
    assert plain is not None
    whole = CONFIG_MAPPING[kind].from_dict(raw)
    for name in READ:
        assert getattr(plain, name, None) == getattr(whole, name, None), name
    assert plain.dtype is None or f"torch.{plain.dtype}" == str(whole.dtype)
    assert spec_of(plain) == spec_of(whole)
    assert in_transformers(plain).to_dict() == whole.to_dict()


@pytest.mark.parametrize(
    "odd",
    [
        {"model_type": "gemma3_text"},
        {"hidden_size": "64"},
        *({name: None} for name in REQUIRED),
        {"hidden_size": 66},
        {"num_key_value_heads": [2, 2, 2, 1]},
        {"rms_norm_eps": 1},
        {"tie_word_embeddings": 1},
        {"per_layer_config": {"0": {"head_dim": 16}}},
        {"partial_rotary_factor": 0.5},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        {"layer_types": ["full_attention"]},
        {"dtype": "float8"},
    ],
)
def test_what_is_not_plain_is_left_to_transformers(odd: dict[str, Any]) -> None:
    assert plain_config({**SMALL, "model_type": "qwen3", **odd}) is None


def test_transformers_own_configs_stay() -> None:
    config = CONFIG_MAPPING["llama"]()
    assert in_transformers(config) is config and not isinstance(config, PlainConfig)


def test_reading_imports_neither_transformers_nor_torch() -> None:
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
from headrace.config import EngineArgs
from headrace.sources.files import find_model
find_model(EngineArgs())
print([name for name in ("transformers", "torch", "huggingface_hub") if name in sys.modules])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
