"""PoolingParams: what the engine makes of a prompt's hidden states, in requests that generate nothing."""

from __future__ import annotations

from typing import Literal

import msgspec

PoolingMethod = Literal["last", "mean"]


class PoolingParams(msgspec.Struct, frozen=True, array_like=True):
    """The result of one prompt: a vector, the logits of the model's classes, or those of some tokens."""

    method: PoolingMethod = "last"
    """last: the hidden state of the last token. mean: the mean of those of all tokens from ``start`` on."""
    head: Literal["none", "classes", "tokens"] = "none"
    """none: the result is the pooled vector. classes: the classification head's logits of it. tokens: the output head's logits
    of ``token_ids``."""
    token_ids: tuple[int, ...] = ()
    start: int = 0
    """Tokens at the start of the prompt that a mean leaves out; fewer than the prompt has."""
