"""Indexers: which blocks of keys a token attends to, by scores of small index keys, and attention to these alone."""

from __future__ import annotations

from headrace.kernels import gpu
from headrace.kernels.indexer import reference
from headrace.kernels.indexer.reference import ChoiceRule, TokenPlaces

__all__ = ["ChoiceRule", "TokenPlaces", "attend_chosen", "choose"]

choose = gpu.dispatch(reference.choose, "triton_choice")
attend_chosen = gpu.dispatch(reference.attend_chosen, "triton_attention")
