"""AnswerExplanation: where the time of one answer went, what its prompt found in the cache, and why it ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from headrace.core.request import Request
from headrace.engine.info import EngineInfo
from headrace.outputs import AttentionReport, OutputDelta, PrefixReport, RequestTimes, WeightSpan, most_computed


class AnswerExplanation:
    """Facts of one engine request, which grow until its last sample has ended."""

    def __init__(self, request: Request, engine: EngineInfo, *, caching: bool) -> None:
        """``caching``: the engine has a prefix cache."""
        self.created = time.time()
        """Seconds since 1970 at the end of the first sample."""
        self._id, self._prompt_tokens = request.request_id, len(request.prompt_token_ids)
        self._engine, self._caching, self._request = engine, caching, request.sampling
        self._max_tokens, self._own_limit = request.max_tokens, request.sampling.max_tokens is not None
        self._times: list[RequestTimes] = []
        self._cached = 0
        self._cache: PrefixReport | None = None
        self._attention: AttentionReport | None = None
        self._samples: list[tuple[int, str | None, int | str | None, list[WeightSpan], str | None]] = []

    def end(self, delta: OutputDelta, cached_tokens: int) -> None:
        """Adds the delta that finishes a sample."""
        self._cached = cached_tokens
        self._cache = delta.cache or self._cache
        self._attention = most_computed(self._attention, delta.attention)
        if delta.times is not None:
            self._times.append(delta.times)
        self._samples.append((delta.index, delta.finish_reason, delta.stop_reason, delta.weight_versions, delta.error))

    def json(self) -> dict[str, Any]:
        """The explanation as an answer of the API."""
        queue, prompt, generation = self._phases()
        return {
            "id": self._id,
            "object": "explanation",
            "created": int(self.created),
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": self._cached,
            "queue_ms": queue,
            "prompt_ms": prompt,
            "generation_ms": generation,
            "waited_for": self._waited_for,
            "preemptions": sum(times.num_preemptions for times in self._times),
            "samples": [
                {
                    "index": index,
                    "finish_reason": reason,
                    "stop_reason": stop,
                    "weight_versions": [dict(span.json) for span in spans],
                    "error": error,
                }
                for index, reason, stop, spans, error in sorted(self._samples, key=lambda sample: sample[0])
            ],
            "cache": None if self._cache is None else msgspec.to_builtins(self._cache),
            "attention": None if self._attention is None else msgspec.to_builtins(self._attention),
            "reasons": list(self._reasons()),
        }

    def _phases(self) -> tuple[float | None, float | None, float | None]:
        """Milliseconds until the first step, from there to the first token, and from there to the last; None: not reached."""
        started = [times.scheduled for times in self._times if times.scheduled is not None]
        first = [times.first_token for times in self._times if times.first_token is not None]
        ended = [times.finished for times in self._times if times.finished is not None]
        queue = 1000 * (min(started) - self._times[0].arrived) if started else None
        prompt = 1000 * (min(first) - min(started)) if first and started else None
        return queue, prompt, 1000 * (max(ended) - min(first)) if first and ended else None

    @property
    def _waited_for(self) -> str | None:
        return next((times.waited_for for times in self._times if times.waited_for), None)

    def _reasons(self) -> Iterator[str]:
        if (cause := self._waited_for) is not None:
            limit = {
                "slots": f"all {self._engine.max_num_seqs:,} places for sequences were taken (--max-num-seqs)",
                "blocks": "too few KV blocks were free for its prompt (--kv-cache-memory)",
                "tokens": f"earlier requests took the {self._engine.max_num_batched_tokens:,} tokens that a step may have "
                "(--max-num-batched-tokens)",
                "preparation": "its constraint was being compiled, or its adapter had no place (--max-loras)",
            }[cause]
            yield f"It waited {self._phases()[0] or 0.0:.0f} ms for its first step: {limit}."
        computed = self._prompt_tokens - self._cached
        without_state = self._cache is not None and self._cache.why != ""
        if self._cached:
            yield f"{self._cached} of {self._prompt_tokens} prompt tokens came from the prefix cache; {computed} were computed."
        elif without_state:
            yield f"All {self._prompt_tokens} prompt tokens were computed."
        else:
            yield f"All {self._prompt_tokens} prompt tokens were computed: {self._why_none_cached()}."
        if preemptions := sum(times.num_preemptions for times in self._times):
            times = "once" if preemptions == 1 else f"{preemptions} times"
            yield f"It was preempted {times}: earlier requests needed its KV blocks, and its tokens were computed again."
        if self._cache is not None and without_state:
            yield (
                f"The KV of {self._cache.attention} tokens was found, and {self._cache.reused} were reused: {self._cache.why}."
            )
        if self._attention is not None and self._attention.density is not None:
            yield f"The prompt attended to {100 * self._attention.density:.1f} % of the blocks that dense attention reads."
        for index, reason, stop, spans, error in sorted(self._samples, key=lambda sample: sample[0]):
            who = f"Answer {index + 1}" if len(self._samples) > 1 else "The answer"
            yield f"{who} {self._why_ended(reason, stop, error)}."
            if len(spans) > 1:
                versions = ", ".join(f"{span.version!r} from token {span.start} on" for span in spans)
                yield f"Its tokens come from several versions of the weights: {versions}."

    def _why_none_cached(self) -> str:
        block, asked = self._engine.block_size, self._request
        if not self._caching:
            return "the prefix cache is off (--no-enable-prefix-caching)"
        if asked.prompt_logprobs is not None or asked.return_routed_experts:
            return "what was asked for is made of every one of them"
        if self._prompt_tokens <= block:
            return f"the prefix cache keeps whole blocks of {block} tokens before the last one"
        return f"the prefix cache had no prompt with the same first {block} tokens, salt, adapter and weights"

    def _why_ended(self, reason: str | None, stop: int | str | None, error: str | None) -> str:
        if reason == "length":
            limit = f"{self._max_tokens} tokens, which is {'max_tokens' if self._own_limit else 'the room left in the context'}"
            return f"was cut off after {limit}"
        if reason == "stop":
            return "ended with the model's end token" if stop is None else f"ended at the stop {stop!r}"
        return f"ended with {reason}" + (f": {error}" if error else "")
