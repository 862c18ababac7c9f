"""Token-level stop conditions. The engine checks stop strings after detokenising."""

from __future__ import annotations

from typing import NamedTuple

from headrace.core.sequence import Sequence
from headrace.outputs import FinishReason


class Stop(NamedTuple):
    reason: FinishReason
    stop_reason: int | None
    """The token of ``stop_token_ids`` that stopped the sequence; None for an end-of-sequence token and for length."""


def check_stop(seq: Sequence) -> Stop | None:
    """Returns why the sequence ends with its last token, an output, or None if it continues.

    Before ``min_tokens`` no token stops a sequence: the sampler bans end-of-sequence tokens until then.
    """
    token = seq.token_ids[-1]
    sampling = seq.request.sampling
    if len(seq.token_ids) - seq.num_prompt >= sampling.min_tokens:
        if not sampling.ignore_eos and token in seq.request.eos_token_ids:
            return Stop("stop", None)
        if token in seq.stop_token_ids:
            return Stop("stop", token)
    if len(seq.token_ids) >= seq.max_len:
        return Stop("length", None)
    return None
