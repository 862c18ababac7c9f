"""Takes sampled tokens and logprobs into a sequence: token-level stop conditions and constraints.

The engine checks stop strings after detokenising.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.core.matcher import TOO_COMPLEX
from headrace.core.plan import StepResult
from headrace.core.sequence import Sequence, SequenceUpdate
from headrace.errors import EngineError
from headrace.metrics.stats import EngineStats
from headrace.outputs import Failure, FinishReason, TokenLogprobs

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
    """Cause if the reason is "error"."""


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


def collect_tokens(
    seq: Sequence, token_ids: list[int], logprobs: list[TokenLogprobs] | None
) -> tuple[SequenceUpdate, Stop | None]:
    """Appends sampled tokens up to the first that stops the sequence, and drops the others."""
    num_kept, stop = 0, None
    for token in token_ids:
        seq.token_ids.append(token)
        num_kept += 1
        if token not in seq.ending_token_ids and seq.matcher is None and len(seq.token_ids) < seq.max_len:
            continue
        stop = check_stop(seq)
        if stop is not None:
            num_kept -= stop.error is not None  # A token that the constraint refuses is not an output.
            break
    update = SequenceUpdate(seq, token_ids[:num_kept], logprobs[:num_kept] if logprobs is not None else None)
    if seq.prompt_logprobs is not None:
        update.prompt_logprobs = _complete_prompt_logprobs(seq)
        seq.prompt_logprobs = None
    return update, stop


def collect_pooled(seq: Sequence, pooled: bytes | None) -> tuple[SequenceUpdate, Stop]:
    """Ends a sequence whose prompt is computed, with its pooled result."""
    if pooled is None:
        return SequenceUpdate(seq), Stop("error", None, error=Failure("the step returned no result for this sequence"))
    return SequenceUpdate(seq, pooled=pooled), Stop("stop", None)


def keep_prompt_logprobs(seq: Sequence, start: int, entries: list[TokenLogprobs]) -> None:
    """Stores the entries for prompt tokens ``start + 1, start + 2, ...``; a recomputed chunk overwrites them."""
    kept = seq.prompt_logprobs
    if kept is None:
        return
    if start + len(entries) > len(kept):
        raise EngineError(f"{seq!r} got {len(entries)} prompt logprobs from token {start + 1} on, of {seq.num_prompt} tokens")
    kept[start : start + len(entries)] = entries


def _complete_prompt_logprobs(seq: Sequence) -> list[TokenLogprobs]:
    entries = [entry for entry in seq.prompt_logprobs or [] if entry is not None]
    if len(entries) != seq.num_prompt - 1:
        raise EngineError(f"{seq!r} has prompt logprobs for {len(entries)} of {seq.num_prompt - 1} tokens")
    return entries


def count_step(counters: EngineStats, result: StepResult) -> None:
    """Adds what a step took."""
    counters.forward_seconds += result.forward_seconds
    counters.sample_seconds += result.sample_seconds
    counters.replayed_steps += result.replayed is True
    counters.eager_steps += result.replayed is False
    counters.padding_tokens += result.padding_tokens
