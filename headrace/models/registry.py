"""Which architectures there are, and how each becomes a spec, a module and a table of checkpoint names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PretrainedConfig

from headrace.errors import ConfigError
from headrace.models import llama, mistral, qwen2, qwen3
from headrace.models.decoder import Decoder
from headrace.spec import ModelSpec
from headrace.weights.names import NameTable

_FAMILIES = (llama, mistral, qwen2, qwen3)
_SPECS: dict[str, Callable[[PretrainedConfig], ModelSpec]] = {family.ARCHITECTURE: family.model_spec for family in _FAMILIES}
_OF_TYPE = {family.MODEL_TYPE: family.ARCHITECTURE for family in _FAMILIES}
"""A config without ``architectures`` (one that was never saved with a model) goes by its ``model_type``."""


def supported() -> list[str]:
    """The architectures that are served natively."""
    return list(_SPECS)


def model_spec(hf_config: PretrainedConfig) -> ModelSpec:
    """The spec of a model from its Hugging Face configuration.

    Raises:
        ConfigError: the architecture is not supported (the message lists those that are), or the configuration asks for
            something that is not; the message names the field, and the layer if it is one layer's.
    """
    architectures = getattr(hf_config, "architectures", None) or [_OF_TYPE.get(hf_config.model_type, hf_config.model_type)]
    for architecture in architectures:
        if architecture in _SPECS:
            return _SPECS[architecture](hf_config)
    raise ConfigError(
        f"architecture {' / '.join(map(str, architectures))} is not supported; supported are: {', '.join(supported())}", "model"
    )


def build(spec: ModelSpec, dtype: str | torch.dtype, device: str | torch.device) -> Decoder:
    """The model with its parameters allocated and not yet filled."""
    kind = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    return Decoder(spec, kind, device).eval()


def name_table(spec: ModelSpec) -> NameTable:
    """Checkpoint names, as Hugging Face saves a causal language model, and the parameters they fill."""
    table = NameTable()
    table.add("model.embed_tokens.weight", "embed_tokens.weight")
    for index in range(spec.num_layers):
        _add_layer(table, spec, index)
    table.add("model.norm.weight", "norm.weight")
    if spec.tie_word_embeddings:
        table.tie("lm_head.weight", "embed_tokens.weight")
    else:
        table.add("lm_head.weight", "lm_head.weight")
    return table


def _add_layer(table: NameTable, spec: ModelSpec, index: int) -> None:
    layer = spec.layers[index]
    here = f"layers.{index}."
    qkv = {"q": layer.q_size}
    if layer.kv_source is None:
        qkv |= {"k": layer.k_size, "v": layer.v_size}
    gate_up = {"gate": spec.intermediate_size, "up": spec.intermediate_size}

    def fuse(fused: str, parts: dict[str, int], kind: str) -> None:
        folder = fused.rpartition(".")[0]
        names = {f"model.{here}{folder}.{part}_proj.{kind}": rows for part, rows in parts.items()}
        table.fuse(f"{here}{fused}.{kind}", names)

    def add(name: str) -> None:
        table.add(f"model.{here}{name}", here + name)

    add("input_layernorm.weight")
    fuse("self_attn.qkv_proj", qkv, "weight")
    if spec.attention_bias:
        fuse("self_attn.qkv_proj", qkv, "bias")
    if spec.qk_norm:
        add("self_attn.q_norm.weight")
        if layer.kv_source is None:
            add("self_attn.k_norm.weight")
    add("self_attn.o_proj.weight")
    if spec.output_bias:
        add("self_attn.o_proj.bias")
    if layer.sinks:
        table.add(f"model.{here}self_attn.sinks", here + "self_attn.attention.sinks")
    add("post_attention_layernorm.weight")
    fuse("mlp.gate_up_proj", gate_up, "weight")
    add("mlp.down_proj.weight")
    if spec.mlp_bias:
        fuse("mlp.gate_up_proj", gate_up, "bias")
        add("mlp.down_proj.bias")
