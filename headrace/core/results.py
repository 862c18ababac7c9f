"""Adds the runner's tokens and logprobs to a sequence."""

from __future__ import annotations

from headrace.core.sequence import Sequence, SequenceUpdate
from headrace.core.stops import Stop, check_stop
from headrace.errors import EngineError
from headrace.outputs import TokenLogprobs


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
            num_kept -= stop.error is not None  # A token that the constraint refuses is no output.
            break
    update = SequenceUpdate(seq, token_ids[:num_kept], logprobs[:num_kept] if logprobs is not None else None)
    if seq.prompt_logprobs is not None:
        update.prompt_logprobs = _complete_prompt_logprobs(seq)
        seq.prompt_logprobs = None
    return update, stop


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
