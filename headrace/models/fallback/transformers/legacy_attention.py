"""Patches the attention of older transformers families, which compute it inline, to call the attention interface.

What these modules hold and how their projections are laid out is theirs; between the projections stands one call. A loaded
model's patches are compared with what they replace (``verify.py``). A case that is not patched runs as the family has it, and
is refused because it does not call the interface.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

WINDOW = "headrace_window"
"""Argument of the interface: how many tokens a token sees, where the module and not the mask decides it."""
Result = tuple[torch.Tensor, torch.Tensor | None] | list[torch.Tensor]
"""``[1, T, hidden]``, and usually the weights or None."""


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
    options = {"scaling": q.shape[-1] ** -0.5 if scale is None else scale, WINDOW: window}
    out: torch.Tensor = attend(module, q, k, v, mask, **options)[0]
    return out.flatten(2)


def _method(
    config: Any,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
) -> Result:
    """``_attn`` of GPT-J and its kin: ``[1, heads, T, width]`` each, and the result too; the scale is within."""

    def default(
        module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, weights = type(module)._attn(module, q, k, v, mask)
        return out.transpose(1, 2), weights

    attend = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, default)
    out, weights = attend(module, query, key, value, attention_mask, scaling=query.shape[-1] ** -0.5)
    return out.transpose(1, 2), weights


def _heads(width: int, *projected: torch.Tensor) -> list[torch.Tensor]:
    """``[1, T, heads * width] -> [1, heads, T, width]`` each."""
    return [x.view(*x.shape[:-1], -1, width).transpose(1, 2) for x in projected]


def _qkv(module: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """``[1, heads, T, width]`` each, by q_proj, k_proj and v_proj."""
    return _heads(module.head_dim, module.q_proj(x), module.k_proj(x), module.v_proj(x))


def _query_key_value(module: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """``[1, heads, T, width]`` each, by query, key and value."""
    return _heads(module.attention_head_size, module.query(x), module.key(x), module.value(x))


def _projected(
    config: Any, module: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **rest: Any
) -> Result:
    """BART's former attention: q_proj, k_proj, v_proj, out_proj."""
    if rest.get("key_value_states") is not None or rest.get("attn_prompt") is not None:
        return type(module).forward(module, hidden_states, attention_mask=attention_mask, **rest)  # type: ignore[no-any-return]
    q, k, v = _qkv(module, hidden_states)
    return module.out_proj(_attend(config, module, q, k, v, attention_mask)), None


def _queried(
    config: Any, module: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, *args: Any, **rest: Any
) -> Result:
    """BERT's former attention: query, key, value; the output projection is another module's."""
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
    """Falcon with rotary embedding. Newer ones repeat each key and value for the heads of its group: here it is one head."""
    if alibi is not None:
        options = rest | {"position_embeddings": position_embeddings}
        return type(module).forward(module, hidden_states, alibi, attention_mask, **options)  # type: ignore[no-any-return]
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
    """Attends unscaled; every other layer has a window, and its mask is in a buffer of the module."""
    window = config.window_size if module.attention_type == "local" else None
    q, k, v = _qkv(module, hidden_states)
    return module.out_proj(_attend(config, module, q, k, v, attention_mask, scale=1.0, window=window)), None


def _openai_gpt(
    config: Any, module: Any, x: torch.Tensor, attention_mask: torch.Tensor | None = None, output_attentions: bool = False
) -> Result:
    """Attends causally, by a mask in a buffer of the module."""
    width = module.split_size // module.n_head
    q, k, v = _heads(width, *module.c_attn(x).split(module.split_size, dim=-1))
    return [module.c_proj(_attend(config, module, q, k, v, attention_mask, scale=None if module.scale else 1.0))]


def _roformer(
    config: Any,
    module: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    sinusoidal_pos: torch.Tensor | None = None,
    **rest: Any,
) -> Result:
    """Attends like ``_queried``, with rotary embedding."""
    if sinusoidal_pos is None or rest.get("encoder_hidden_states") is not None:
        return type(module).forward(module, hidden_states, attention_mask, sinusoidal_pos, **rest)  # type: ignore[no-any-return]
    q, k, v = _query_key_value(module, hidden_states)
    if module.rotary_value:
        q, k, v = module.apply_rotary_position_embeddings(sinusoidal_pos, q, k, v)
    else:
        q, k = module.apply_rotary_position_embeddings(sinusoidal_pos, q, k)
    return _attend(config, module, q, k, v, attention_mask), None


Patch = Callable[..., Result]
"""(the model's configuration, the module, its arguments) -> its result"""
_FORWARDS: Mapping[str, Patch] = {
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
_METHODS: Mapping[str, Patch] = {
    "codegen.modeling_codegen.CodeGenAttention": _method,
    "gpt_neox_japanese.modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention": _method,
    "gptj.modeling_gptj.GPTJAttention": _method,
}
"""Classes that attend in their ``forward``, and in a method of their own, below ``transformers.models``: by name, so that no
release must have them all."""


def patch_attention(model: PreTrainedModel) -> None:
    """Makes the modules of ``model`` that compute attention inline call the interface instead, where a patch exists."""
    for module in model.modules():
        for attribute, patches in (("forward", _FORWARDS), ("_attn", _METHODS)):
            if (patch := _patch(module, patches)) is not None:
                setattr(module, attribute, functools.partial(patch, model.config, module))


def forward_patch(module: nn.Module) -> Patch | None:
    """Returns the patch of the forward of a module's class."""
    return _patch(module, _FORWARDS)


def _patch(module: nn.Module, patches: Mapping[str, Patch]) -> Patch | None:
    package, name = "transformers.models.", f"{type(module).__module__}.{type(module).__qualname__}"
    return patches.get(name.removeprefix(package)) if name.startswith(package) else None
