"""transformers' models with a KV-head count for each layer and values of another width than keys, which it cannot build
itself: its own modules, with the projections replaced.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def replace_projections(model: PreTrainedModel) -> None:
    """Replaces projections as the config's ``num_key_value_heads_list`` and ``v_head_dim`` say. Its attention is the eager one
    then."""
    config: Any = model.config
    heads = config.num_attention_heads
    model.set_attn_implementation("eager")
    for layer, kv_heads in zip(model.model.layers, config.num_key_value_heads_list, strict=True):
        attention = layer.self_attn
        width, v_width = attention.head_dim, getattr(config, "v_head_dim", attention.head_dim)
        bias = attention.k_proj.bias is not None
        attention.k_proj = nn.Linear(config.hidden_size, kv_heads * width, bias=bias)
        attention.v_proj = nn.Linear(config.hidden_size, kv_heads * v_width, bias=bias)
        attention.o_proj = nn.Linear(heads * v_width, config.hidden_size, bias=attention.o_proj.bias is not None)
        attention.num_key_value_groups = heads // kv_heads
        attention.forward = partial(_forward, attention, v_width)


def _forward(
    attention: Any,
    v_width: int,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    cache: Any = None,
    past_key_values: Any = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """The module's own forward, but for the width of v. ``past_key_values`` is how releases before 5.24 name the cache."""
    library = importlib.import_module(type(attention).__module__)
    shape = hidden_states.shape[:-1]
    q = attention.q_proj(hidden_states).view(*shape, -1, attention.head_dim)
    k = attention.k_proj(hidden_states).view(*shape, -1, attention.head_dim)
    v = attention.v_proj(hidden_states).view(*shape, -1, v_width).transpose(1, 2)
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm(q), attention.k_norm(k)
    q, k = library.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *position_embeddings)
    if (cache := cache or past_key_values) is not None:
        k, v = cache.update(k, v, attention.layer_idx)
    out, _ = library.eager_attention_forward(attention, q, k, v, attention_mask, scaling=attention.scaling)
    return attention.o_proj(out.reshape(*shape, -1)), None
