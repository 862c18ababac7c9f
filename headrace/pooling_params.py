"""PoolingParams: what the engine makes of a prompt in requests that generate nothing."""

from __future__ import annotations

from typing import Literal

import msgspec

PoolingMethod = Literal["last", "mean", "attention"]


class PoolingParams(msgspec.Struct, frozen=True, array_like=True):
    """The result of one prompt: a vector, the logits of the model's classes, those of some tokens, or attention weights."""

    method: PoolingMethod = "last"
    """last: the hidden state of the last token. mean: the mean of those of all tokens from ``start`` on. attention: how each
    token attends to each other in ``layer``."""
    head: Literal["none", "classes", "tokens"] = "none"
    """none: the result is the pooled vector. classes: the classification head's logits of it. tokens: the output head's logits
    of ``token_ids``."""
    token_ids: tuple[int, ...] = ()
    start: int = 0
    """Tokens at the start of the prompt that a mean leaves out; fewer than the prompt has."""
    layer: int = 0
    """The attention layer whose weights are the result."""
    query_head: int | None = None
    """The head of queries whose weights are the result; None: the mean over all."""

    @property
    def computes_all(self) -> bool:
        """Whether the result is made of all tokens of the prompt."""
        return self.method != "last"
