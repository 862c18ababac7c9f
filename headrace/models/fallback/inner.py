"""Models that attend in a method of their own: made to call transformers' attention interface in its place.

Older families of transformers have ``_attn(query, key, value, attention_mask)``, heads before tokens, with the scale inside.
Which scale that is cannot be seen in a method, so the families are listed. Nothing is taken on trust: like an interface's own
function, the method is what a loaded model's layers are compared with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headrace.models.fallback.rewritten import forward_of, name_in_transformers

_WITH_A_METHOD = (
    "codegen.modeling_codegen.CodeGenAttention",
    "gpt_neox_japanese.modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention",
    "gptj.modeling_gptj.GPTJAttention",
)


def call_interface(model: PreTrainedModel) -> None:
    """Has the modules of ``model`` that attend by themselves call what the configuration asks for, where it is known how."""
    for module in model.modules():
        if (forward := forward_of(module)) is not None:
            module.forward = functools.partial(forward, model.config, module)
        if name_in_transformers(module) in _WITH_A_METHOD:
            own: Callable[..., Any] = type(module)._attn  # type: ignore[attr-defined]
            module._attn = functools.partial(_through_interface, model.config, module, own)  # type: ignore[assignment]


def _through_interface(
    config: Any,
    module: nn.Module,
    own: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As the method: ``[1, heads, T, width]`` each, and the result too."""

    def default(
        module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, weights = own(module, q, k, v, mask)
        return out.transpose(1, 2), weights

    attend = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, default)
    out, weights = attend(module, query, key, value, attention_mask, scaling=query.shape[-1] ** -0.5)
    return out.transpose(1, 2), weights
