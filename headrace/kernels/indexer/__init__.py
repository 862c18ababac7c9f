"""Indexers: which blocks of keys a token attends to, by scores of small index keys, and attention to these alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.kernels import gpu
from headrace.kernels.indexer import reference
from headrace.kernels.indexer.reference import ChoiceRule, TokenPlaces

if TYPE_CHECKING:
    from headrace.kernels.indexer import triton_attention as attention_kernels
    from headrace.kernels.indexer import triton_choice as choice_kernels
else:
    attention_kernels = gpu.Late(f"{__name__}.triton_attention")
    choice_kernels = gpu.Late(f"{__name__}.triton_choice")

__all__ = ["ChoiceRule", "TokenPlaces", "attend_chosen", "choose"]

choose = gpu.dispatch(reference.choose, lambda: choice_kernels.choose)
attend_chosen = gpu.dispatch(reference.attend_chosen, lambda: attention_kernels.attend_chosen)
