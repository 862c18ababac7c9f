"""Attention modules of transformers that attend in the midst of their forward pass, written again to call the interface.

Some older families never got to call it. What these modules hold and how their projections are laid out is theirs; between
the projections stands one call. Whether such a pass makes what the module's own makes is tried when a model is loaded
(``verify.py``).
A case that is not written here runs as the family has it, and so is refused for attending by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

WINDOW = "headrace_window"
"""Argument of the interface: how many tokens a token sees, where the module and not the mask says so."""
Result = tuple[torch.Tensor, None] | list[torch.Tensor]
"""``[1, T, hidden]``, and no weights."""


def _attend(
    config: Any,
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """``[1, heads, T, width]`` each -> ``[1, T, heads * width]``. ``scale``: None for that of the queries' width."""
    attend = ALL_ATTENTION_FUNCTIONS[config._attn_implementation]
    given = {"scaling": q.shape[-1] ** -0.5 if scale is None else scale, WINDOW: window}
    out: torch.Tensor = attend(module, q, k, v, mask, **given)[0]
    return out.flatten(2)


def _heads(projected: torch.Tensor, width: int) -> torch.Tensor:
    """``[1, T, heads * width] -> [1, heads, T, width]``"""
    return projected.view(*projected.shape[:-1], -1, width).transpose(1, 2)


def _query_key_value(module: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``[1, heads, T, width]`` each, of a module whose projections are called so."""
    parts = (module.query, module.key, module.value)
    return tuple(_heads(part(hidden_states), module.attention_head_size) for part in parts)


def _projected(
    config: Any, module: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **rest: Any
) -> Result:
    """BART's old way: q_proj, k_proj, v_proj, out_proj."""
    if rest.get("key_value_states") is not None or rest.get("attn_prompt") is not None:
        return type(module).forward(module, hidden_states, attention_mask=attention_mask, **rest)  # type: ignore[no-any-return]
    q, k, v = (_heads(part(hidden_states), module.head_dim) for part in (module.q_proj, module.k_proj, module.v_proj))
    return module.out_proj(_attend(config, module, q, k, v, attention_mask)), None


def _queried(
    config: Any, module: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, *args: Any, **rest: Any
) -> Result:
    """BERT's old way: query, key, value; what follows is another module's."""
    if (args and args[0] is not None) or rest.get("encoder_hidden_states") is not None:
        return type(module).forward(module, hidden_states, attention_mask, *args, **rest)  # type: ignore[no-any-return]
    q, k, v = _query_key_value(module, hidden_states)
    return _attend(config, module, q, k, v, attention_mask), None


def _falcon(
    config: Any,
    module: Any,
    hidden_states: torch.Tensor,
    alibi: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    *,
    position_embeddings: Any = None,
    **rest: Any,
) -> Result:
    """Rotary Falcon. Newer ones repeat each key and value for the heads of its group: here it is one head again."""
    if alibi is not None:
        given = rest | {"position_embeddings": position_embeddings}
        return type(module).forward(module, hidden_states, alibi, attention_mask, **given)  # type: ignore[no-any-return]
    # [1, T, heads, width]
    q, k, v = module._split_heads(module.query_key_value(hidden_states))
    if module.new_decoder_architecture:
        group = module.num_heads // module.num_kv_heads
        k, v = k[:, :, ::group], v[:, :, ::group]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    q, k = sys.modules[type(module).__module__].apply_rotary_pos_emb(q, k, *position_embeddings)
    return module.dense(_attend(config, module, q, k, v, attention_mask)), None


def _gpt_neo(
    config: Any, module: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **rest: Any
) -> Result:
    """Unscaled; every other layer sees a window, which is in a buffer of its own."""
    parts = (module.q_proj, module.k_proj, module.v_proj)
    q, k, v = (_heads(part(hidden_states), module.head_dim) for part in parts)
    window = config.window_size if module.attention_type == "local" else None
    return module.out_proj(_attend(config, module, q, k, v, attention_mask, scale=1.0, window=window)), None


def _openai_gpt(
    config: Any, module: Any, x: torch.Tensor, attention_mask: torch.Tensor | None = None, output_attentions: bool = False
) -> Result:
    """Causal by a buffer of its own."""
    parts = module.c_attn(x).split(module.split_size, dim=-1)
    q, k, v = (_heads(part, module.split_size // module.n_head) for part in parts)
    return [module.c_proj(_attend(config, module, q, k, v, attention_mask, scale=None if module.scale else 1.0))]


def _roformer(
    config: Any,
    module: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    sinusoidal_pos: torch.Tensor | None = None,
    **rest: Any,
) -> Result:
    """As ``_queried``, rotated."""
    if sinusoidal_pos is None or rest.get("encoder_hidden_states") is not None:
        return type(module).forward(module, hidden_states, attention_mask, sinusoidal_pos, **rest)  # type: ignore[no-any-return]
    q, k, v = _query_key_value(module, hidden_states)
    if module.rotary_value:
        q, k, v = module.apply_rotary_position_embeddings(sinusoidal_pos, q, k, v)
    else:
        q, k = module.apply_rotary_position_embeddings(sinusoidal_pos, q, k)
    return _attend(config, module, q, k, v, attention_mask), None


Forward = Callable[..., Result]
"""(the model's configuration, the module, its arguments) -> its result"""
_FORWARDS: Mapping[str, Forward] = {
    "falcon.modeling_falcon.FalconAttention": _falcon,
    "gpt_neo.modeling_gpt_neo.GPTNeoSelfAttention": _gpt_neo,
    "megatron_bert.modeling_megatron_bert.MegatronBertSelfAttention": _queried,
    "mvp.modeling_mvp.MvpAttention": _projected,
    "openai.modeling_openai.Attention": _openai_gpt,
    "rembert.modeling_rembert.RemBertSelfAttention": _queried,
    "roformer.modeling_roformer.RoFormerSelfAttention": _roformer,
    "trocr.modeling_trocr.TrOCRAttention": _projected,
    "xglm.modeling_xglm.XGLMAttention": _projected,
}


def name_in_transformers(module: nn.Module) -> str:
    """Of its class, below ``transformers.models``; empty for any other's. By name, so that no release must have them all."""
    kind = type(module)
    place, name = "transformers.models.", f"{kind.__module__}.{kind.__qualname__}"
    return name.removeprefix(place) if name.startswith(place) else ""


def forward_of(module: nn.Module) -> Forward | None:
    """What is written here for a module's class."""
    return _FORWARDS.get(name_in_transformers(module))
