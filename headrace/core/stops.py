"""Token-level stop conditions and constraints. The engine checks stop strings after detokenising."""

from __future__ import annotations

from typing import NamedTuple

from headrace.core.matcher import TOO_COMPLEX
from headrace.core.sequence import Sequence
from headrace.outputs import Failure, FinishReason

REPETITION = "repetition"
"""Stop reason of a constrained output that repeats itself without end."""


class Stop(NamedTuple):
    reason: FinishReason
    stop_reason: int | str | None
    """The token of ``stop_token_ids`` that stopped the sequence, or REPETITION; None for an end-of-sequence token and for
    length."""
    by_token: bool = False
    """The last token is one that stops sequences."""
    error: Failure | None = None
    """With the reason "error"."""


def check_stop(seq: Sequence) -> Stop | None:
    """Returns why the sequence ends with its last token, an output, or None if it continues. Advances its matcher.

    Before ``min_tokens`` no token stops a sequence: the sampler bans end-of-sequence tokens until then. The end of a
    constraint does.
    """
    stop = _token_stop(seq)
    matcher = seq.matcher
    if matcher is None:
        return stop
    if stop is not None and stop.by_token:
        if matcher.accepting:
            return stop
        message = f"token {seq.token_ids[-1]} ended the output before its constraint was met"
        return Stop("error", None, error=Failure(message))
    refusal = matcher.advance(seq.token_ids[-1:])
    if refusal is not None:
        # A limit is the request's fault; a token that the mask should have banned is not.
        limited = refusal.startswith(TOO_COMPLEX)
        failure = Failure(f"structured_outputs: {refusal}", client=limited, code=TOO_COMPLEX if limited else None)
        return Stop("error", None, error=failure)
    if matcher.ended:
        return Stop("stop", None)
    return Stop("length", REPETITION) if stop is None and matcher.stuck else stop


def _token_stop(seq: Sequence) -> Stop | None:
    token = seq.token_ids[-1]
    sampling = seq.request.sampling
    if len(seq.token_ids) - seq.num_prompt >= sampling.min_tokens:
        if not sampling.ignore_eos and token in seq.request.eos_token_ids:
            return Stop("stop", None, by_token=True)
        if token in seq.stop_token_ids:
            return Stop("stop", token, by_token=True)
    if len(seq.token_ids) >= seq.max_len:
        return Stop("length", None)
    return None
